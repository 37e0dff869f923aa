"""Measure whether a policy learns to read: balanced reviews, continued in their author's mood.

    python scripts/worth/reading.py                             # about 15 hours of one core
    python scripts/worth/reading.py --curves responses --epsilons none --seeds 1
    python scripts/worth/reading.py --model small               # the small public model: minutes

Praise for everybody and criticism for everybody both earn 0 on these reviews, so a rise of the
reward on held-out prompts is reading. Three curves go through one middle cell (6,000 users, eight
responses, the recipe's adapter): over the users, over the responses to a prompt, and over the
trained parameters. Without noise and clipping ("none") unless told otherwise. Users are the first
ones of the private split, other ones in each seed; finished runs are kept and read again.

Writes docs/results/worth.json, and docs/results/worth-reading-MODEL.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from dprlhf.runs.measurements import Result, write_results
from noise.many_runs import (
    SMALL,
    Job,
    options_of_runs,
    overrides_of,
    page,
    run_cells,
    small_policy,
)

RECIPE = "reading"
POOL = 22_970
"""Private rows of the recipe's data."""
ADAPTERS: dict[str, dict[str, dict[str, Any]]] = {
    "smollm2": {
        "v, 8 layers": {},
        "q and v, rank 4": {
            "policy.adapter.target_modules": ["q_proj", "v_proj"],
            "policy.adapter.rank": 4,
            "policy.adapter.alpha": 4,
            "policy.adapter.layers": None,
        },
        "all linear, rank 8, both factors": {
            "policy.adapter.type": "lora",
            "policy.adapter.target_modules": "all-linear",
            "policy.adapter.rank": 8,
            "policy.adapter.alpha": 8,
            "policy.adapter.layers": None,
            "policy.adapter.init": "random",
        },
    },
    "small": {
        "v, 2 layers": {"policy.adapter.layers": [2, 3]},
        "q and v, rank 4": {
            "policy.adapter.target_modules": ["q_proj", "v_proj"],
            "policy.adapter.rank": 4,
            "policy.adapter.alpha": 4,
            "policy.adapter.layers": None,
        },
    },
}
"""What an adapter changes in the recipe; the first of each model is the middle cell's."""
RATES = {"smollm2": 0.5, "small": 4.0}
"""Length of a step, that of scripts/noise/grid.py: chosen on another task."""
USERS = [1200, 3000, 6000, 12_000]
RESPONSES = [2, 4, 8, 16]
PLAIN = {"privacy.epsilon": ".inf", "update.clip_norm": ".inf", "update.subspace": "null"}


@dataclass(frozen=True)
class Cell:
    """One place on a curve; ``epsilon`` is None without noise and clipping."""

    adapter: str
    users: int = 6000
    responses: int = 8
    epsilon: float | None = None

    @property
    def label(self) -> str:
        """The cell in words, for tables and names of rows."""
        privacy = "no privacy" if self.epsilon is None else f"epsilon {self.epsilon:g}"
        return f"{self.adapter}, {self.users} users, {self.responses} responses, {privacy}"

    def job(self, model: str, seed: int, policy: dict[str, Any]) -> Job:
        """Return the run of a seed, on users of its own as far as there are enough."""
        small = {**SMALL, **policy, "rollout.batch_size": 64, "update.batch_size": 64}
        rewards = [{**SMALL["rewards"][0], "times_column": "wants"}]
        settings = {**small, "rewards": rewards} if model == "small" else {}
        settings |= ADAPTERS[model][self.adapter]
        settings |= PLAIN if self.epsilon is None else {"privacy.epsilon": self.epsilon}
        settings |= {
            "data.limit": self.users,
            "data.skip": seed * self.users % (POOL - self.users + 1),
            "rollout.responses": self.responses,
            "optimizer.learning_rate": RATES[model],
            "evaluation.prompts": 1000,
            "seed": seed,
        }
        words = "".join(c if c.isalnum() else "-" for c in self.label)
        return Job(f"reading-{words}-seed-{seed}", RECIPE, overrides_of(settings))


def cells(model: str, curves: list[str], epsilons: list[float | None]) -> list[Cell]:
    """Return the cells of the curves, each once, the cheap ones first."""
    adapters = list(ADAPTERS[model])
    middle = Cell(adapters[0])
    of = {
        "users": [replace(middle, users=n) for n in USERS],
        "responses": [replace(middle, responses=k) for k in RESPONSES],
        "capacity": [replace(middle, adapter=name) for name in adapters],
    }
    found = dict.fromkeys(
        replace(cell, epsilon=epsilon)
        for curve in curves
        for cell in of[curve]
        for epsilon in epsilons
    )
    return sorted(found, key=lambda cell: cell.users * cell.responses)


def rows(model: str, done: dict[Cell, list[float]]) -> Iterator[Result]:
    """Yield the rise of the reward of each cell, with its standard error over the seeds."""
    for cell, rises in done.items():
        name = f"reading ({model}): {cell.label}"
        yield Result(f"{name}: seeds", len(rises), "1")
        yield Result(f"{name}: rise of the reward", float(np.mean(rises)), "reward")
        if len(rises) > 1:
            error = float(np.std(rises, ddof=1) / len(rises) ** 0.5)
            yield Result(f"{name}: standard error of the rise", error, "reward")


def table(done: dict[Cell, list[float]]) -> list[str]:
    """Return a Markdown table, a row for each cell."""
    lines = ["| trained | users | responses | ε | rise | worst seed |", "|---" * 6 + "|"]
    for cell, rises in done.items():
        epsilon = "none" if cell.epsilon is None else f"{cell.epsilon:g}"
        error = np.std(rises, ddof=1) / len(rises) ** 0.5 if len(rises) > 1 else np.nan
        shown = f"{np.mean(rises):+.2f}" + (f" ± {error:.2f}" if error >= 0 else "")
        lines.append(
            f"| {cell.adapter} | {cell.users:,} | {cell.responses} | {epsilon} | {shown} |"
            f" {min(rises):+.2f} |"
        )
    return lines


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=ADAPTERS, default="smollm2")
    names = ["users", "responses", "capacity"]
    parser.add_argument("--curves", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--epsilons", nargs="+", default=[None],
        type=lambda text: None if text == "none" else float(text),
    )  # fmt: skip
    return options_of_runs(parser, runs="reading", results="worth.json", seeds=3).parse_args()


def main() -> None:
    """Run the cells, write the results."""
    options = parsed()
    folder = options.runs / options.model
    policy = small_policy(folder / "reviews-lm") if options.model == "small" else {}
    jobs = {
        (cell, seed): cell.job(options.model, seed, policy)
        for seed in range(options.seeds)
        for cell in cells(options.model, options.curves, options.epsilons)
    }
    found = run_cells(jobs, folder, options).items()
    done = {cell: [run["rise"] for run in runs] for cell, runs in found}
    text = page(
        f"Reading, on balanced reviews ({options.model})",
        "Rise of the reward on held-out prompts, where praise or criticism for everybody earns",
        "0, ± standard error over seeds.",
        "",
        *table(done),
    )
    print(text)
    write_results(options.results, rows(options.model, done))
    (options.results.parent / f"worth-reading-{options.model}.md").write_text(text)


if __name__ == "__main__":
    main()
