"""The brake: whose runs it measures, and what it calls within 5%."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from dprlhf import load_recipe
from noise.many_runs import ROOT
from worth import brake

POLICY = {"policy.model_name_or_path": "folder"}


@pytest.mark.parametrize("recipe", brake.RECIPES)
@pytest.mark.parametrize("model", ["small", "smollm2"])
def test_users_for_tuning_are_nobody_else(recipe: str, model: str) -> None:
    cell = brake.Cell(recipe, 0.2)
    policy = POLICY if model == "small" else {}
    for tuning, seeds in ((False, range(3)), (True, range(3))):
        for seed in seeds:
            job = cell.job(model, seed, policy, tuning)
            made = load_recipe(ROOT / "recipes" / f"{job.recipe}.yaml", job.overrides)
            assert made.kl.beta == 0.2
            assert made.data.limit
            assert made.evaluation
            assert made.evaluation.judges["words"].times_column == made.rewards[0].times_column
            first, last = made.data.skip, made.data.skip + made.data.limit
            pool = brake.RECIPES[recipe] - brake.TUNING_USERS
            assert (first >= pool) if tuning else (last <= pool)
            assert last <= brake.RECIPES[recipe]
            assert (made.evaluation.data.skip >= made.evaluation.prompts) == tuning


def test_neighbouring_coefficients_are_different_runs() -> None:
    files = {brake.Cell("demo", beta).job("smollm2", 0, {}, True).file for beta in (0.1, 0.3)}
    assert len(files) == 2


def test_the_figures_compare_after_with_before() -> None:
    measures = {"kl": [0.0, 3.0], "perplexity": [20.0, 30.0], "distinct_2": [0.9, 0.45]}
    found = {"rise": 1.0, "measures": measures, "judges": {"words": 0.2}}
    shown = {"rise": 1.0, "KL": 3.0, "perplexity": 1.5, "bigrams": 0.5, "lexicon": 0.2}
    assert brake.figures_of(found) == shown


def test_the_goal_is_stated_for_the_recipes_own_coefficient() -> None:
    own = load_recipe(ROOT / "recipes" / "demo.yaml").kl.beta
    run = {"rise": 1.0, "KL": 2.0, "perplexity": 1.04, "bigrams": 0.9, "lexicon": 0.1}
    done = {brake.Cell("demo", own): [run], brake.Cell("demo", own + 1): [run, run]}
    found = {row.name: row for row in brake.rows("small", done)}
    start = f"brake (small): demo, beta {own:g}: "
    assert found[start + brake.NAMES["perplexity"]].holds is True
    assert found[start + brake.NAMES["bigrams"]].holds is False
    assert sum(row.holds is not None for row in found.values()) == 2
    assert f"| demo | {own:g} | +1.00 | 2.00 | 1.04 | 0.90 | +0.10 |" in brake.table(done)
