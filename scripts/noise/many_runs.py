"""The recipes, the small public model and the word reward of this repository, for many runs."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from dprlhf.runs.measurements import command
from dprlhf.worth import models, runs
from dprlhf.worth.runs import Job, overrides_of
from dprlhf.worth.tasks import TUNING_USERS

C = TypeVar("C")

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
SMALL: dict[str, Any] = models.small(ROOT)
"""What the small model changes in a recipe of the IMDB task, besides the model."""


def run_all(
    jobs: Iterable[Job], folder: Path, *, side_by_side: int, write_only: bool = False
) -> dict[str, dict[str, Any]]:
    """Run or read all jobs, as :func:`dprlhf.worth.runs.run_all` with this repository's recipes.

    The file of a run has a digest of its recipe and its changes in its name, so that the figures of
    other settings are not taken for its own.
    """
    named = {job.file: replace(job, file=f"{job.file}-{digest_of(job)}") for job in jobs}
    found = runs.run_all(
        named.values(),
        folder,
        recipes=ROOT / "recipes",
        side_by_side=side_by_side,
        write_only=write_only,
    )
    return {name: found[job.file] for name, job in named.items() if job.file in found}


def digest_of(job: Job) -> str:
    """Return eight letters that change with the recipe, its changes and how it is judged."""
    recipe = (ROOT / "recipes" / f"{job.recipe}.yaml").read_text("utf-8")
    what = [recipe, sorted(job.overrides), [sorted(changes) for changes in job.judged]]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:8]


def small_policy(folder: Path) -> dict[str, Any]:
    """Return what the small policy changes in every recipe; it is trained on the first call."""
    return models.small_policy(folder, ROOT)


def options_of_runs(
    parser: argparse.ArgumentParser, *, runs: str, results: str, seeds: int
) -> argparse.ArgumentParser:
    """Add the options that every script of many runs has; the arguments are their defaults."""
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--runs", type=Path, default=Path("runs") / runs)
    parser.add_argument("--results", type=Path, default=RESULTS / results)
    parser.add_argument("--write-only", action="store_true", help="write what is finished")
    return parser


def run_cells(
    jobs: Mapping[tuple[C, int], Job], folder: Path, options: argparse.Namespace
) -> dict[C, list[dict[str, Any]]]:
    """Run the jobs of cells and seeds; return the figures of each cell's finished runs."""
    figures = run_all(
        list(jobs.values()), folder, side_by_side=options.jobs, write_only=options.write_only
    )
    done: dict[C, list[dict[str, Any]]] = {}
    for (cell, _), job in jobs.items():
        if job.file in figures:
            done.setdefault(cell, []).append(figures[job.file])
    return done


def page(title: str, *lines: str) -> str:
    """Return a Markdown page that names the command it was made with."""
    return "\n".join([f"# {title}", "", f"`{command()}`", "", *lines]) + "\n"


__all__ = [
    "RESULTS",
    "ROOT",
    "SMALL",
    "TUNING_USERS",
    "Job",
    "options_of_runs",
    "overrides_of",
    "page",
    "run_all",
    "run_cells",
    "small_policy",
]
