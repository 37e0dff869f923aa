"""The script that measures the private answers, without a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from dprlhf import load_recipe  # noqa: E402
from worth.answers import Cell, job_of, questions, results_of  # noqa: E402


@pytest.mark.parametrize("epsilon", [None, 4.0])
def test_a_run_takes_its_directions_from_public_questions_only(
    epsilon: float | None, tmp_path: Path
) -> None:
    data = questions(tmp_path, 3)
    job = job_of(Cell(1500, epsilon), 3, tmp_path / "model", data)
    made = load_recipe(SCRIPTS.parent / "recipes" / f"{job.recipe}.yaml", overrides=job.overrides)
    assert (made.data.split, made.data.limit) == ("private", 1500)
    assert made.privacy.baseline == (epsilon is None)
    assert (made.update.subspace is None) == (epsilon is None)
    if made.update.subspace is not None:
        assert made.update.subspace.data is not None
        assert made.update.subspace.data.split == "public"
        assert made.update.subspace.data.path == made.data.path == str(data)


def test_what_is_kept_is_measured_from_one_in_eight() -> None:
    rows = {
        row.name.removeprefix("private answers (small): "): row
        for row in results_of(
            {Cell(9, None): [0.6, 0.65], Cell(9, 1.0): [0.5, 0.525], Cell(9, 4.0): [0.5, 0.55]}
        )
    }
    kept = rows["epsilon 1, 9 users: share of the gain without privacy"]
    assert kept.value == pytest.approx((0.5125 - 0.125) / (0.625 - 0.125))
    assert kept.holds is False
    assert rows["epsilon 4, 9 users: share of the gain without privacy"].holds is None
    assert rows["epsilon 1, 9 users: worst seed"].value == 0.5
    error = rows["no privacy, 9 users: its standard error over seeds"]
    assert error.value == pytest.approx(0.025)
