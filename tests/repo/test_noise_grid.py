"""The grid of ε and users: whose runs it compares, what it calls a share, what it says of goals."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from dprlhf import load_recipe
from dprlhf.runs.measurements import write_results
from noise import grid
from noise.many_runs import ROOT, digest_of, run_all

POLICY = {"policy.model_name_or_path": "folder", "policy.adapter.layers": [2, 3]}
CELLS = [grid.Cell(task, "today", 1.0, n) for task in grid.TASKS for n in grid.USERS]


def rows_of(cell: grid.Cell, seed: int, tuning: bool) -> range:
    job = cell.job(seed, "small", POLICY, {}, tuning)
    made = load_recipe(ROOT / "recipes" / f"{job.recipe}.yaml", overrides=job.overrides)
    assert made.data.limit == cell.users
    return range(made.data.skip, made.data.skip + cell.users)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_users_of_the_table_are_never_those_for_tuning(cell: grid.Cell) -> None:
    last = max(rows_of(cell, seed, tuning=False).stop for seed in (0, 1, 7))
    tuned = [rows_of(cell, seed, tuning=True) for seed in (100, 103)]
    assert last <= min(rows.start for rows in tuned)
    assert max(rows.stop for rows in tuned) <= grid.TASKS[cell.task].users
    assert len({rows_of(cell, seed, tuning=False).start for seed in (0, 1)}) == 2


def test_a_changed_setting_is_another_run() -> None:
    cell = grid.Cell("community", "today", 0.3, 1500)
    job = cell.job(0, "small", POLICY, {}, False)
    assert job == cell.job(0, "small", POLICY, {}, False)
    other = cell.job(0, "small", POLICY, {"optimizer.learning_rate": "0.1"}, False)
    assert digest_of(other) != digest_of(job)
    reference = grid.Cell("community", "reference", None, 1500)
    made = load_recipe(
        ROOT / "recipes" / "community.yaml",
        overrides=reference.job(0, "smollm2", {}, {}, False).overrides,
    )
    assert made.privacy.baseline
    assert made.rewards[0].times_column == "wants"


def written(done: dict[grid.Cell, grid.Measured], folder: Path) -> tuple[str, dict[str, Any]]:
    """Write the cells as a call does; return the tables, and the rows by the rest of their name."""
    results = folder / "noise.json"
    write_results(results, grid.rows("small", done))
    known = grid.recorded("small", results)
    write_results(results, grid.share_rows("small", known, done))
    rows = json.loads(results.read_text())
    found = {row["name"].removeprefix("grid (small): "): row for row in rows}
    return "\n".join(grid.tables(known)), found


def test_shares_goals_and_the_area(tmp_path: Path) -> None:
    plain = grid.Cell("demo", "reference", None, 300)
    kept, missed = (grid.Cell("demo", m, 1.0, 300) for m in ("subspace", "today"))
    done = {
        plain: grid.measured([{"before": 0.5, "rise": 2.0, "after": 2.5, "public": [1.5]}] * 3),
        kept: grid.Measured([1.9, 1.93, 1.96], [1.2] * 3),
        missed: grid.Measured([1.0, 1.2], [0.5, 0.7]),
    }
    assert done[plain] == grid.Measured([2.0] * 3, [1.5] * 3)
    shown, found = written(done, tmp_path / "three")
    start = "demo, subspace, epsilon 1, 300 users: share of the non-private"
    rise, area = found[f"{start} rise"], found[f"{start} area under the curve"]
    assert (rise["value"], rise["holds"]) == (pytest.approx(0.965), True)
    assert (area["value"], area["holds"]) == (pytest.approx(0.8), False)
    assert (
        found["demo, today, epsilon 1, 300 users: share of the non-private rise"]["holds"] is None
    )
    assert "| 96% ± 1%, 80% ± 0% (3) | +2.00 ± 0.00 (3) |" in shown
    # Two runs are too few to say that a goal is reached.
    done[kept] = grid.Measured([1.9, 1.96], [1.2, 1.2])
    assert written(done, tmp_path / "two")[1][f"{start} rise"]["holds"] is False
    # An earlier call could not always tell the rise over the rounds.
    done[kept] = grid.Measured([2.0], [])
    shown, found = written(done, tmp_path / "one")
    assert "| 100% (1) |" in shown
    assert f"{start} area under the curve" not in found
    assert not any("nan" in str(row["value"]).lower() for row in found.values())


def test_the_error_of_a_share_is_that_of_both_runs(tmp_path: Path) -> None:
    plain, kept = grid.Cell("demo", "reference", None, 300), grid.Cell("demo", "axis", 1.0, 300)
    done = {plain: grid.Measured([1.6, 2.4], [2.0, 2.0]), kept: grid.Measured([0.7, 1.3], [1.0])}
    found = written(done, tmp_path)[1]
    start = "demo, axis, epsilon 1, 300 users: standard error of the share of the"
    # Standard errors 0.4 of 2 and 0.3 of 1; the single area has none.
    assert found[f"{start} rise"]["value"] == pytest.approx(0.5 * (0.2**2 + 0.3**2) ** 0.5)
    assert f"{start} area under the curve" not in found


def test_cells_of_an_earlier_call_stay_in_the_tables(tmp_path: Path) -> None:
    earlier, later = (grid.Cell("demo", "reference", None, users) for users in (300, 1500))
    kept = grid.Cell("demo", "subspace", 1.0, 300)
    first = {earlier: grid.Measured([2.0], [1.0]), kept: grid.Measured([1.0], [1.0])}
    before = written(first, tmp_path)[1]
    later_kept = grid.Cell("demo", "subspace", 1.0, 1500)
    second = {later: grid.Measured([4.0], [1.0]), later_kept: grid.Measured([1.0], [1.0])}
    shown, found = written(second, tmp_path)
    assert "| subspace | 300 | 50%, 100% (1) | +2.00 (1) |" in shown
    assert "| subspace | 1,500 | 25%, 100% (1) | +4.00 (1) |" in shown
    assert before.items() <= found.items()
    known = grid.recorded("small", tmp_path / "noise.json")
    assert all("1500 users" in row.name for row in grid.share_rows("small", known, second))


def test_a_reference_that_is_measured_again_changes_every_share_of_it(tmp_path: Path) -> None:
    plain, kept = grid.Cell("demo", "reference", None, 300), grid.Cell("demo", "axis", 1.0, 300)
    written({plain: grid.Measured([2.0], [1.0]), kept: grid.Measured([1.0], [1.0])}, tmp_path)
    shown, found = written({plain: grid.Measured([4.0], [2.0])}, tmp_path)
    assert "| axis | 300 | 25%, 50% (1) | +4.00 (1) |" in shown
    name = "demo, axis, epsilon 1, 300 users: share of the non-private rise"
    assert found[name]["value"] == 0.25


def test_finished_runs_are_read_and_not_run_again(tmp_path: Path) -> None:
    jobs = [grid.Cell("demo", "today", 1.0, n).job(0, "smollm2", {}, {}, False) for n in (300, 500)]
    kept = tmp_path / f"{jobs[0].file}-{digest_of(jobs[0])}.json"
    kept.write_text(json.dumps({"rise": 1.0}))
    found = run_all(jobs, tmp_path, side_by_side=1, write_only=True)
    assert found == {jobs[0].file: {"rise": 1.0}}
    # Figures of other settings are not this run's: of other changes, or of another recipe.
    changed = replace(jobs[0], overrides=(*jobs[0].overrides, "rounds=9"))
    moved = replace(jobs[0], recipe="reading")
    for other in (changed, moved):
        assert run_all([other], tmp_path, side_by_side=1, write_only=True) == {}


@pytest.mark.parametrize("model", grid.METHODS)
@pytest.mark.parametrize("task", grid.TASKS)
def test_every_method_is_a_recipe_and_guides_are_of_another_kind(model: str, task: str) -> None:
    for method in grid.METHODS[model]:
        epsilon = None if method == "reference" else 1.0
        job = grid.Cell(task, method, epsilon, 300).job(0, model, POLICY, {}, False)
        made = load_recipe(ROOT / "recipes" / f"{job.recipe}.yaml", overrides=job.overrides)
        assert made.privacy.baseline == (method == "reference")
        if made.update.subspace is None:
            continue
        guides = made.update.subspace.data
        assert guides is not None
        assert (guides.path, guides.split) != (made.data.path, made.data.split)
        assert guides.split in ("sentences", "train")


def test_a_method_may_say_how_many_responses_more_users_have() -> None:
    responses = {
        method: [
            word
            for word in grid.Cell("community", method, 0.3, 1500)
            .job(0, "small", POLICY, {}, False)
            .overrides
            if word.startswith("rollout.responses=")
        ]
        for method in ("axis", "subspace")
    }
    assert responses == {"axis": ["rollout.responses=8"], "subspace": ["rollout.responses=4"]}
