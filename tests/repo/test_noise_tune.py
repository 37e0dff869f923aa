"""The comparison of settings from public prompts with those by hand: whose rows, and what ratio."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from dprlhf import load_recipe
from dprlhf.tuning.space import with_settings
from dprlhf.worth.tasks import TASKS, Cell, Setup
from noise import tune
from noise.many_runs import ROOT

CASES = [(model, task) for model, tasks in tune.COMPARED.items() for task in tasks]


def compared(model: str, task: str) -> tune.Compared:
    cell = Cell(task, "", 1.0, 1500)
    return tune.Compared(Setup(model, ROOT, Path("runs")), cell, tune.STAND_INS[task])


@pytest.mark.parametrize(("model", "task"), CASES)
def test_only_what_is_searched_differs_from_the_settings_by_hand(model: str, task: str) -> None:
    one = compared(model, task)
    (hand, *_), (start, *_) = one.jobs(0, {}), one.jobs(0, one.start)
    recipes = [
        load_recipe(ROOT / "recipes" / f"{job.recipe}.yaml", overrides=job.overrides)
        for job in (hand, start)
    ]
    rates = [recipe.optimizer.learning_rate for recipe in recipes]
    assert max(rates) / min(rates) >= 8
    alike = [with_settings(recipe, {"optimizer.learning_rate": 1.0}) for recipe in recipes]
    assert alike[0] == alike[1]
    assert hand.file != start.file
    assert len(one.jobs(0, one.start)) == (2 if TASKS[task].turned else 1)


@pytest.mark.parametrize(("model", "task"), CASES)
def test_what_stands_in_knows_nothing_that_the_public_does_not(model: str, task: str) -> None:
    public = TASKS[task].public[tune.STAND_INS[task]]
    assert public.split != "private"
    if TASKS[task].turned or task == "community":
        assert public.wants == "praise" or public.split == "sentences"


def test_the_ratio_has_the_error_of_paired_seeds() -> None:
    hand = np.array([1.0, 2.0, 3.0, 4.0])
    kl = {tune.TUNED: [30.0, 40.0, 50.0, 60.0], tune.BY_HAND: [2.0, 2.0, 3.0, 3.0]}
    texts = {"kl": kl, "distinct_2": {tune.TUNED: [0.2, 0.4], tune.BY_HAND: [0.5, 0.7]}}
    gains = {tune.TUNED: list(0.9 * hand), tune.BY_HAND: list(hand)}
    rows = {row.name: row for row in tune.rows_of("t", gains, texts)}
    for title, values in (
        ("KL to the base model", [45.0, 2.5]),
        ("different pairs of words, a pair", [0.3, 0.6]),
    ):
        found = [rows[f"t: {kind}: {title}"].value for kind in (tune.TUNED, tune.BY_HAND)]
        assert found == pytest.approx(values)
    ratio = rows["t: tuned over set by hand"]
    assert ratio.value == pytest.approx(0.9)
    assert ratio.holds is False
    assert rows["t: tuned over set by hand, standard error"].value == pytest.approx(0, abs=1e-12)
    apart = {tune.TUNED: list(hand[::-1]), tune.BY_HAND: list(hand)}
    rows = {row.name: row for row in tune.rows_of("t", apart, texts)}
    assert rows["t: tuned over set by hand"].holds
    # Differences of -3, -1, 1 and 3, over a mean of 2.5.
    expected = np.std([-3, -1, 1, 3], ddof=1) / 2 / 2.5
    error = rows["t: tuned over set by hand, standard error"]
    assert error.value == pytest.approx(expected)
