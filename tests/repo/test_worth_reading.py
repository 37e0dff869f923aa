"""The curves of reading: which runs they are made of."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from dprlhf import load_recipe
from dprlhf.assets.catalogue import ASSETS
from noise.many_runs import ROOT
from worth import reading

POLICY = {"policy.model_name_or_path": "folder"}


@pytest.mark.parametrize("model", reading.ADAPTERS)
def test_every_cell_is_a_recipe_that_loads(model: str) -> None:
    found = reading.cells(model, ["users", "responses", "capacity"], [None, 4.0])
    assert len(found) == len(set(found))
    for cell in found:
        job = cell.job(model, 2, POLICY if model == "small" else {})
        made = load_recipe(ROOT / "recipes" / f"{job.recipe}.yaml", overrides=job.overrides)
        assert made.privacy.baseline == (cell.epsilon is None)
        assert (made.data.limit, made.rollout.responses) == (cell.users, cell.responses)
        assert made.data.skip + cell.users <= reading.POOL
        assert made.rewards[0].times_column == "wants"
    names = {cell.job(model, seed, {}).file for cell in found for seed in (0, 1)}
    assert len(names) == 2 * len(found)


def test_the_pool_is_what_the_asset_says() -> None:
    assert f"{reading.POOL:,} private" in ASSETS["balanced-reviews"].about


def test_a_single_run_states_no_error() -> None:
    one, two = reading.Cell("v"), reading.Cell("v", users=3000)
    done = {one: [0.5], two: [0.5, 0.7]}
    names = [row.name for row in reading.rows("small", done)]
    assert sum("standard error" in name for name in names) == 1
    assert "+0.60 ± 0.10 | +0.50 |" in "\n".join(reading.table(done))
