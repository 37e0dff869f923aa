"""What ``make demo`` prints and keeps, on a tiny model and made-up reviews."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import demo
from dprlhf import load_recipe, train
from dprlhf.assets.catalogue import ASSETS
from helpers import commands, tiny
from worth import lexicon

REWARD = """
def reward(prompts, completions, **columns):
    return [len(set(text)) / 4 - 2 for text in completions]
"""


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("demo")
    for name in ("private", "public", "train"):
        texts = [f"A {name} review, number {i}" for i in range(300)]
        reviews = pd.DataFrame({"text": texts, "label": [0, 1] * 150})
        reviews.to_parquet(folder / f"{name}.parquet", index=False)
    data = folder / "community"
    data.mkdir()
    ASSETS["community"].build({"imdb": folder, "rotten-tomatoes": folder}, data, True)
    (folder / "by_length.py").write_text(REWARD)
    reward = f'{{"function": "{folder}/by_length.py:reward", "times_column": "wants"}}'
    return [
        f"policy.model_name_or_path={tiny.save(folder / 'model', 'llama')}",
        "policy.dtype=float32", "policy.adapter.layers=[0,1]", f"data.path={data}",
        f"update.subspace.data.path={data}", "update.subspace.rank=4", "update.subspace.prompts=8",
        f"evaluation.data.path={data}", "evaluation.prompts=40", f"rewards=[{reward}]",
        "data.limit=40", "rounds=2", "rollout.max_new_tokens=4", "rollout.responses=2",
        "optimizer.learning_rate=200", demo.JUDGE,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("run") / "run"
    return train(demo.RECIPE, overrides=overrides, output_dir=folder, quiet=True)


def test_the_figures_of_a_run(run: Any, overrides: list[str], capsys: Any) -> None:
    told = demo.wishes(load_recipe(demo.RECIPE, overrides))
    # The public split of the community: four bad ratings, then a good one.
    assert told.wants == [-1, -1, -1, -1, 1] * 8
    assert told.praise == pytest.approx(-0.6 * 3)
    rise = [
        wish * (lexicon.sentiment(row["after"]) - lexicon.sentiment(row["before"]))
        for wish, row in zip(told.wants, run.samples, strict=True)
    ]
    public = {
        demo.PUBLIC_ONLY: {"value": run.after.mean - 1, "date": "2026-11-23", "command": "c"},
        f"{demo.PUBLIC_ONLY}, standard error": {"value": 0.0},
    }
    found = {row.name: row for row in demo.rows(run, told, public)}
    above = found["demo: reward above public prompts alone, over its standard error"]
    assert above.value == pytest.approx(1 / run.after.standard_error)
    assert found["demo: epsilon (delta 1e-5)"].holds
    assert found["demo: lexicon, rise"].value == pytest.approx(sum(rise) / len(rise))
    # An estimate from few texts of a hardly changed policy, which may be below 0.
    assert abs(found["demo: KL to the base model"].value) < 1
    assert demo.PUBLIC_ONLY not in found
    assert len(demo.rows(run, told, {})) == len(found) - 1
    demo.show(run, told, public)
    printed = capsys.readouterr().out
    assert "praise for everybody would earn     -1.800" in printed
    assert "criticism for everybody would earn  +1.800" in printed
    assert "measured 2026-11-23: c" in printed


def test_texts_come_before_the_reward_is_fitted(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    printed = []

    def pull(names: Any) -> dict[str, Path]:
        printed.append((tuple(names), capsys.readouterr().out))
        return dict.fromkeys(names, tmp_path)

    monkeypatch.setattr(demo, "pull", pull)
    monkeypatch.setattr(demo, "cores", lambda: 1)  # on more, a second process takes part
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metrics.json").write_text('{"accuracy": 0.81}')
    times = demo.Times(100.0)
    found = {row.name: row for row in demo.tune(overrides, times)}
    assert [names for names, _ in printed] == [demo.SHOWN_FIRST, (demo.REWARD,)]
    assert "the untuned model" in printed[1][1]
    assert capsys.readouterr().out.count("mean reward of the first round's users") == 1
    assert found["demo: accuracy of the reward model"].holds is False
    assert len(times.rewards) == 2
    assert times.built < times.texts < times.fitted < times.rewards[0] < times.rewards[1]
    times.built, times.texts, times.fitted, times.rewards = 110.0, 130.0, 170.0, [190.0, 200.0]
    seconds = {row.name: row.value for row in times.rows(started=60.0, ready=95.0)}
    assert seconds["demo: installing"] == 35
    assert seconds["demo: models, data and the reward's fit"] == 10 + 40
    assert seconds["demo: waiting for the reward's fit"] == 40
    assert seconds["demo: first continuations"] == 70
    assert seconds["demo: first noised reward"] == 130


WITHOUT_ASSETS = """
import os, sys
from pathlib import Path
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # see test_processes.py
sys.path.insert(0, {scripts!r})
import demo
demo.SCRIPT, demo.cores = __file__, lambda: 2
def pull(names, quiet=False):
    print("pull", *names, file=sys.stderr)
    if "--helper" in sys.argv and {dies!r} in names:
        raise SystemExit(3)
    return dict.fromkeys(names, Path(__file__).parent)
demo.pull = pull
demo.main()
"""


def in_two_processes(folder: Path, overrides: list[str], dies: str) -> Any:
    (folder / "metrics.json").write_text('{"accuracy": 0.84}')
    script = WITHOUT_ASSETS.format(scripts=str(Path(demo.__file__).parent), dies=dies)
    (folder / "script.py").write_text(script)
    return commands.python(folder / "script.py", *overrides, cwd=folder)


@pytest.mark.slow
def test_two_processes_share_the_demo(overrides: list[str], tmp_path: Path) -> None:
    done = in_two_processes(tmp_path, overrides, dies="nothing")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("mean reward of the first round's users") == 1
    assert done.stdout.count("guarantee: ") == 1
    assert len(list(tmp_path.glob("runs/*/ledger.jsonl"))) == 1
    assert done.stderr.count(f"pull {demo.REWARD}\n") == 2
    assert "seconds for tuning and evaluation" in done.stdout


@pytest.mark.slow
def test_a_second_process_that_dies_ends_the_demo(overrides: list[str], tmp_path: Path) -> None:
    done = in_two_processes(tmp_path, overrides, dies=demo.REWARD)
    assert done.returncode == 1
    assert "the second process ended with status 3" in done.stderr
    assert "the untuned model" in done.stdout
    assert not list(tmp_path.glob("runs/*"))


def test_a_round_whose_reward_the_noise_hides_stops_nothing(capsys: Any) -> None:
    hidden = {"private_reward_noised": None, "private_reward_noise_std": None}
    times = demo.Times(0.0)
    times.report(hidden)
    times.report(hidden)
    assert "the noise hides it" in capsys.readouterr().out


def test_public_prompts_alone_are_no_users(overrides: list[str]) -> None:
    recipe = load_recipe(demo.RECIPE, [*overrides, *demo.PUBLIC_ROWS])
    assert recipe.privacy.baseline
    assert recipe.data.split == "sentences"
    assert recipe.update.subspace is None


def test_the_pairs_are_the_first_whatever_they_say(capsys: Any) -> None:
    samples = [
        {"prompt": f"p{i}", "before": "a", "after": f"b{i}", "reward_before": 0, "reward_after": i}
        for i in range(8)
    ]
    demo.show_pairs(samples, [-1, -1, -1, -1, 1, -1, -1, -1])
    printed = capsys.readouterr().out
    assert [f"p{i} ..." in printed for i in range(8)] == [True] * 5 + [False] * 3
    assert printed.count("wants criticism") == 4
    assert "p4 ...   (rating: good; wants praise)" in printed


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("A wonderful, moving film.", 2),
        ("not good", -1),
        ("It wasn't a bad one", 1),
        ("It wasn\u2019t very bad", 1),
        ("boring and dull, but honest", -1),
        ("the table", 0),
        ("goodness", 0),
    ],
)
def test_the_lexicon_counts_words_of_opinion(text: str, score: float) -> None:
    assert lexicon.sentiment(text) == score
    assert lexicon.judge(["p"], [text], wants=[1]) == [score]
    assert not lexicon.GOOD & lexicon.BAD
