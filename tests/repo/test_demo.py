"""What ``make demo`` prints and keeps, on a tiny model and made-up reviews."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import demo
from dprlhf import load_recipe, train
from dprlhf.assets.catalogue import ASSETS
from helpers import tiny
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
        "optimizer.learning_rate=200",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("run") / "run"
    return train(demo.RECIPE, overrides=overrides, output_dir=folder, quiet=True)


def test_the_figures_of_a_run(run: Any, overrides: list[str], capsys: Any) -> None:
    figures = demo.measured(run, load_recipe(demo.RECIPE, overrides))
    # The public split of the community: four bad ratings, then a good one.
    assert figures.wants.tolist() == [-1, -1, -1, -1, 1] * 8
    assert figures.praise == pytest.approx(-0.6 * 3)
    base, _ = figures.texts
    assert base.kl == 0
    assert base.perplexity > 100  # 257 tokens, about alike
    # The texts measured are those that the run has evaluated.
    for side, text in zip(("before", "after"), figures.texts, strict=True):
        assert text.distinct == demo.distinct_bigrams([s[side] for s in run.samples])
    public = {
        demo.PUBLIC_ONLY: {"value": run.after.mean - 1, "date": "2026-11-23", "command": "c"},
        f"{demo.PUBLIC_ONLY}, standard error": {"value": 0.0},
    }
    found = {row.name: row for row in demo.rows(run, figures, public)}
    above = found["demo: reward above public prompts alone, over its standard error"]
    assert above.value == pytest.approx(1 / run.after.standard_error)
    assert found["demo: epsilon (delta 1e-5)"].holds
    assert demo.PUBLIC_ONLY not in found
    assert len(demo.rows(run, figures, {})) == len(found) - 1
    demo.show(run, figures, public)
    told = capsys.readouterr().out
    assert "praise for everybody would earn     -1.800" in told
    assert "criticism for everybody would earn  +1.800" in told
    assert "measured 2026-11-23: c" in told


def test_public_prompts_alone_are_no_users(overrides: list[str]) -> None:
    recipe = load_recipe(demo.RECIPE, [*overrides, *demo.PUBLIC_ROWS])
    assert recipe.privacy.baseline
    assert recipe.data.split == "sentences"
    assert recipe.update.subspace is None


def test_the_pairs_follow_the_rule_and_not_the_direction(capsys: Any) -> None:
    texts = ["good", "bad", "a", "bad", "good", "good", "good", "bad"]
    samples = [
        {"prompt": f"p{i}", "before": "a", "after": text, "reward_before": 0, "reward_after": 0}
        for i, text in enumerate(texts)
    ]
    wants = np.array([1.0, 1, 1, 1, -1, 1, 1, 1])
    judged = np.array(
        [[lexicon.sentiment(s[side]) for s in samples] for side in ("before", "after")]
    )
    text = demo.Text(0, 1, 1)
    demo.show_pairs(samples, demo.Figures(wants, judged * wants, (text, text), 3.0))
    told = capsys.readouterr().out
    assert "before from after on 7 of 8" in told
    assert "3 moved the way the author\nwants, 4 the other way" in told.replace(" wants", "\nwants")
    assert [f"p{i} ..." in told for i in range(8)] == [1, 1, 0, 1, 1, 1, 0, 0]


def test_distinct_bigrams() -> None:
    assert demo.distinct_bigrams(["a b a b", "a b", "c"]) == pytest.approx(2 / 4)
    assert demo.distinct_bigrams(["one"]) == 0


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
