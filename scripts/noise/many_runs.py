"""The recipes, the small public model and the word reward of this repository, for many runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from dprlhf.worth import models, runs
from dprlhf.worth.runs import Job, overrides_of

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = models.small(ROOT)
"""What the small model changes in a recipe of the IMDB task, besides the model."""


def run_all(
    jobs: Iterable[Job], folder: Path, *, side_by_side: int, write_only: bool = False
) -> dict[str, dict[str, Any]]:
    """Run or read all jobs, as :func:`dprlhf.worth.runs.run_all` with this repository's recipes."""
    return runs.run_all(
        jobs,
        folder,
        recipes=ROOT / "recipes",
        side_by_side=side_by_side,
        write_only=write_only,
    )


def small_policy(folder: Path) -> dict[str, Any]:
    """Return what the small policy changes in every recipe; it is trained on the first call."""
    return models.small_policy(folder, ROOT)


__all__ = ["ROOT", "SMALL", "Job", "overrides_of", "run_all", "small_policy"]
