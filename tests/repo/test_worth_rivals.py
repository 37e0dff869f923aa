"""The rivals' table: who is trained on, what is tried for whom, and what counts as first."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from dprlhf.data.public import HELD_OUT
from dprlhf.data.users import Prompts
from dprlhf.worth.tasks import TASKS, TUNING_USERS
from worth import rival_methods, rivals
from worth.rival_methods import Place

SMALL = Path("folder")


def test_as_many_settings_are_tried_for_each_method() -> None:
    counts = {len({str(setting) for setting in one.tried}) for one in rivals.RIVALS.values()}
    assert counts == {4}


@pytest.mark.parametrize("task", ["community", "praise"])
def test_settings_are_chosen_on_users_and_prompts_of_no_table(task: str) -> None:
    pool = TASKS[task].users - TUNING_USERS
    for tuning in (False, True):
        for seed in (0, 1, 4, rivals.FIRST_TUNING_SEED):
            place = Place(task, rivals.USERS, 2.0, seed, SMALL, tuning)
            made = rival_methods.recipe_for(place, {})
            first = made.data.skip
            assert made.data.limit == rivals.USERS
            assert (first >= pool) if tuning else (first + rivals.USERS <= pool)
            assert first + rivals.USERS <= TASKS[task].users
            assert made.evaluation is not None
            taken = rival_methods.EVALUATED + HELD_OUT
            assert (made.evaluation.data.skip >= taken) == tuning
    assert rival_methods.public_of(task, "reviews").skip >= rival_methods.EVALUATED


def test_the_budget_is_the_asked_one_and_plain_runs_have_none() -> None:
    private = rival_methods.recipe_for(Place("community", 600, 0.5, 0, SMALL), {})
    assert (private.privacy.epsilon, private.data.max_prompts_per_user) == (0.5, 1)
    assert math.isfinite(private.update.radius)
    plain = rival_methods.recipe_for(Place("community", 600, math.inf, 0, SMALL), {})
    assert math.isinf(plain.privacy.epsilon or 0)
    assert math.isinf(plain.update.radius)


def test_pairs_are_of_one_user_and_the_better_sample_is_chosen() -> None:
    prompts = Prompts(["p", "q"], np.arange(2), np.zeros(2, dtype=np.int64), {})
    found = rival_methods.pairs_of(prompts, [["a", "b", "c", "d"], ["e", "f", "g", "h"]], 2)
    assert found.to_numpy().tolist() == [
        ["0", "p", "a", "d"],
        ["0", "p", "b", "c"],
        ["1", "q", "e", "h"],
        ["1", "q", "f", "g"],
    ]


def found_in(
    task: str, seeds: int, ours: float, theirs: float
) -> dict[tuple[rivals.Cell, int], float]:
    """Return gains in all cells of a task; seed s adds s to each."""
    return {
        (cell, seed): (ours if cell.rival == rivals.OURS else theirs) + seed
        for cell in rivals.cells_of(task, False)
        for seed in range(seeds)
    }


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rivals.CHOSEN, "made up", dict.fromkeys(rivals.RIVALS, 0))


@pytest.mark.usefixtures("chosen")
def test_only_seeds_that_are_finished_everywhere_count() -> None:
    found = found_in("made up", 3, 1.0, 0.0)
    del found[rivals.cells_of("made up", False)[-1], 1]
    table = rivals.table_of("made up", found)
    assert table is not None
    assert table.seeds == 2
    assert table.at("public", 8.0).tolist() == [0.0, 2.0]
    assert rivals.table_of("made up", {k: v for k, v in found.items() if k[1] == 1}) is None


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize(("ours", "seeds", "first", "holds"), [
    (1.0, 5, 5, True), (1.0, 4, 5, False), (-1.0, 5, 0, False),
])  # fmt: skip
def test_first_is_stated_with_enough_seeds(
    ours: float, seeds: int, first: int, holds: bool
) -> None:
    table = rivals.table_of("made up", found_in("made up", seeds, ours, 0.0))
    assert table is not None
    [row] = [one for one in rivals.rows(table) if "first" in one.name]
    assert (row.value, row.holds) == (first, holds)
    assert f"{ours + (seeds - 1) / 2:+.2f} ±" in "\n".join(rivals.lines(table))


@pytest.mark.usefixtures("chosen")
def test_a_method_without_privacy_is_no_rival() -> None:
    found = found_in("made up", 2, 1.0, 0.0)
    for cell, seed in found:
        if rivals.RIVALS[cell.rival].kind in ("plain", "reference", "variant"):
            found[cell, seed] = 9.0
    table = rivals.table_of("made up", found)
    assert table is not None
    assert np.mean(table.lead(1.0)) == 1.0
