"""What ``make demo`` prints and keeps, on a tiny model and made-up reviews."""

import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import demo
from dprlhf import load_recipe, train
from dprlhf.assets.catalogue import ASSETS
from helpers import tiny

REWARD = """
def reward(prompts, completions, **columns):
    return [len(set(text)) / 4 - 2 for text in completions]
"""


SAID = ["I think it is long.", "I think so.", "I saw it.", "My film.", "The film is of tin."]
"""How reviews go on: four in five in the first person."""


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("demo")
    for name in ("private", "public", "train"):
        texts = [f"A {name} review of some film, the number {i}. {SAID[i % 5]}" for i in range(300)]
        reviews = pd.DataFrame({"text": texts, "label": [0, 1] * 150})
        reviews.to_parquet(folder / f"{name}.parquet", index=False)
    data = folder / "voices"
    data.mkdir()
    ASSETS["voices"].build({"imdb": folder, "rotten-tomatoes": folder}, data, True)
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
    known = demo.wishes(load_recipe(demo.RECIPE, overrides))
    # The public split: four who write in the first person, then one who does not.
    assert known.wants == [1, 1, 1, 1, -1] * 8
    assert known.alike == pytest.approx(0.6 * 3)
    rise, error = known.judged(run.samples)
    public = {
        demo.PUBLIC_ONLY: {"value": run.after.mean - 1, "date": "2026-11-23", "command": "c"},
        f"{demo.PUBLIC_ONLY}, standard error": {"value": 0.0},
    }
    found = {row.name: row for row in demo.rows(run, known, public)}
    above = found["demo: reward above public prompts alone, over its standard error"]
    assert above.value == pytest.approx(1 / run.after.standard_error)
    assert found["demo: epsilon (delta 1e-5)"].holds
    assert found["demo: judge of other words, rise"].value == rise
    assert found["demo: judge of other words, rise over its standard error"].holds is (
        rise >= 5 * error > 0  # so short a run may leave all texts as they were
    )
    # An estimate from few texts of a hardly changed policy, which may be below 0.
    assert abs(found["demo: KL to the base model"].value) < 1
    assert demo.PUBLIC_ONLY not in found
    assert len(demo.rows(run, known, {})) == len(found) - 1
    demo.show(run, known, public)
    printed = capsys.readouterr().out
    assert "the first person for everybody      +1.800" in printed
    assert "the first person for nobody         -1.800" in printed
    assert "measured 2026-11-23: c" in printed
