"""Measure the private answers on a small model: what share is right, by ε and the number of users.

    python scripts/worth/answers.py --folder runs/answers
    python scripts/worth/answers.py --folder runs/answers --epsilons none --seeds 1

The policy is the small model of ``answers_lm.py``, which knows the codes and no map; a policy that
was made without the users answers 1/8 right on average over the maps. Each seed has a map, users
and test questions of its own, none of which the settings below were chosen on (they were chosen on
the map of seed 901). Runs without noise ("none") have no clip norm and no subspace. An interrupted
call is continued by the same call.

The codes of public questions are random, so their gradients average to zero: no direction leads
anywhere by itself. What the subspace takes from them is in which directions they vary: those that
tie some intent to some code, about 16 times 7 of them, near whose span the private gradient is.

Writes docs/results/worth.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from dprlhf.assets.answers import CODES, private_answers
from dprlhf.runs.measurements import Result, command, write_results
from noise.many_runs import ROOT, Job, overrides_of, run_all

RESULTS = ROOT / "docs" / "results" / "worth.json"
RECIPE = "private_answers"
FIRST_MAP = 1000
"""Seed of the map of seed 0."""
POOL = {"private": 6000, "public": 2000, "test": 1000}
KEPT = 0.8
"""The goal: share of the gain without privacy that a private run keeps."""

SETTINGS: dict[str, Any] = {
    "policy.adapter.target_modules": ["gate_proj", "up_proj", "down_proj"],
    "policy.adapter.layers": [2, 3],
    "policy.adapter.rank": 64,
    "policy.adapter.alpha": 64,
    "policy.dtype": "float32",
    "rollout.batch_size": 512,
    "update.batch_size": 512,
    "optimizer.learning_rate": 0.03,
    "rounds": 24,
    "evaluation.prompts": 1000,
}
"""What the small model changes in the recipe: all that a run without noise has."""
PRIVATE: dict[str, Any] = {
    "optimizer.learning_rate": 0.04,
    "optimizer.schedule": "cosine",
    "update.subspace.rank": 128,
    "update.subspace.prompts": 512,
    "update.subspace.refresh": 6,
    "update.subspace.data.split": "public",
    "update.subspace.data.max_prompt_tokens": 48,
}
"""What a private run has: directions from the gradients of public questions, and steps that
shorten, so that noise does not undo what was learned."""
PLAIN: dict[str, Any] = {"privacy.epsilon": ".inf", "update.clip_norm": ".inf"}


@dataclass(frozen=True)
class Cell:
    """A number of users and an ε; None is without noise and clipping."""

    users: int
    epsilon: float | None

    @property
    def name(self) -> str:
        """How the cell is called in the results."""
        privacy = "no privacy" if self.epsilon is None else f"epsilon {self.epsilon:g}"
        return f"{privacy}, {self.users} users"


def job_of(cell: Cell, seed: int, model: Path, data: Path) -> Job:
    """Return the run of a cell and a seed."""
    paths = {"data.path": str(data), "evaluation.data.path": str(data)}
    privacy = PLAIN
    if cell.epsilon is not None:
        privacy = {
            "privacy.epsilon": cell.epsilon,
            "update.subspace.data.path": str(data),
            **PRIVATE,
        }
    settings = {
        "policy.model_name_or_path": str(model),
        **SETTINGS,
        **paths,
        **privacy,
        "data.limit": cell.users,
        "seed": seed,
    }
    epsilon = "none" if cell.epsilon is None else f"{cell.epsilon:g}"
    file = f"answers-users-{cell.users}-epsilon-{epsilon}-seed-{seed}"
    return Job(file, RECIPE, overrides_of(settings))


def questions(folder: Path, seed: int) -> Path:
    """Return the folder with a seed's map, users and test questions; it is written once."""
    place = folder / f"questions-{seed}"
    place.mkdir(parents=True, exist_ok=True)
    if not all((place / f"{split}.parquet").exists() for split in POOL):
        for split, rows in private_answers(POOL, seed=FIRST_MAP + 10 * seed).items():
            rows.to_parquet(place / f"{split}.parquet", index=False)
    return place


def results_of(done: dict[Cell, list[float]]) -> Iterable[Result]:
    """Turn the shares of right answers after the runs into results.

    The share of the gain kept is (J(ε) − 1/8) / (J(∞) − 1/8), of the means over seeds at the same
    number of users.

    Args:
        done: For each cell the share of right answers with each seed.
    """
    start = 1 / len(CODES)
    for cell, found in done.items():
        values = np.array(found)
        label = f"private answers (small): {cell.name}"
        shown = command()
        yield Result(f"{label}: share of right answers", float(values.mean()), "1", command=shown)
        yield Result(f"{label}: worst seed", float(values.min()), "1", command=shown)
        yield Result(f"{label}: seeds", len(values), "seeds", command=shown)
        if len(values) > 1:
            error = float(values.std(ddof=1) / np.sqrt(len(values)))
            yield Result(f"{label}: its standard error over seeds", error, "1", command=shown)
        plain = done.get(Cell(cell.users, None))
        if cell.epsilon is not None and plain and float(np.mean(plain)) > start:
            kept = (float(values.mean()) - start) / (float(np.mean(plain)) - start)
            at_one = cell.epsilon == 1
            yield Result(
                f"{label}: share of the gain without privacy",
                kept,
                "1",
                f">= {KEPT}" if at_one else "",
                kept >= KEPT if at_one else None,
                command=shown,
            )


def main(arguments: argparse.Namespace) -> None:
    """Run what is not done yet, and write the results."""
    folder: Path = arguments.folder
    model = folder / "model"
    if not (model / "tokenizer_config.json").exists():
        from worth.answers_lm import train

        train(model)
    cells = [Cell(users, epsilon) for users in arguments.users for epsilon in arguments.epsilons]
    jobs = {
        (cell, seed): job_of(cell, seed, model, questions(folder, seed))
        for seed in range(arguments.seeds)
        for cell in cells
    }
    done = run_all(
        jobs.values(),
        folder,
        side_by_side=arguments.jobs,
        write_only=arguments.write_only,
    )
    after = {
        cell: [
            done[job.file]["after"]
            for (other, _), job in jobs.items()
            if other == cell and job.file in done
        ]
        for cell in cells
    }
    write_results(RESULTS, results_of({cell: found for cell, found in after.items() if found}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/answers"))
    parser.add_argument("--users", type=int, nargs="+", default=[6000, 1500])
    parser.add_argument(
        "--epsilons",
        type=lambda word: None if word == "none" else float(word),
        nargs="+",
        default=[None, 4.0, 1.0],
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--write-only", action="store_true", help="write what is finished")
    main(parser.parse_args())
