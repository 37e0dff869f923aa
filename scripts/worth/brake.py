"""Measure the brake: reward against the distance to the base model, by KL coefficient.

    python scripts/worth/brake.py --model small                   # the small public model: minutes
    python scripts/worth/brake.py --recipes demo --betas 0.05 0.1 0.2 --seeds 1 --tuning
    python scripts/worth/brake.py                                 # hours of one core
    python scripts/worth/brake.py --recipes imdb_fluent --betas 0    # fluent by its directions

For each recipe and each ``kl.beta``: the rise of the reward on held-out prompts; KL(π ‖ μ) in nats
a response; the base model's perplexity and the distinct bigrams, after over before, which a brake
should keep within 5% of 1; and what the word list of ``lexicon.py`` says. ``--tuning``
takes users that no table has, and other held-out prompts than the demo's, and writes no results:
that is where a coefficient is chosen. Finished runs are kept and read again.

Writes docs/results/worth.json, and docs/results/worth-brake-MODEL.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from demo import WORDS
from dprlhf import load_recipe
from dprlhf.runs.measurements import Result, write_results
from noise.many_runs import (
    ROOT,
    SMALL,
    TUNING_USERS,
    Job,
    options_of_runs,
    overrides_of,
    page,
    run_cells,
    small_policy,
)

RECIPES = {"demo": 14_355, "imdb_sentiment": 23_000, "imdb_fluent": 23_000}
"""The recipes, and how many private rows their data has."""
TUNING_PROMPTS = 600
"""Held-out prompts that come before those on which a coefficient is chosen."""
BETAS = [0.0, 0.05, 0.1, 0.2, 0.4]
SMALL_CHANGES: dict[str, dict[str, Any]] = {
    "demo": {"optimizer.learning_rate": 4.0, "update.subspace.rank": 64,
             "update.subspace.prompts": 128},
    "imdb_sentiment": {"optimizer.learning_rate": 0.5, "update.clip_norm": 0.7},
    "imdb_fluent": {"optimizer.learning_rate": 4.0},
}  # fmt: skip
"""For the small model: what scripts/noise/grid.py found on other users, without a brake."""


@dataclass(frozen=True)
class Cell:
    """A recipe and a coefficient β."""

    recipe: str
    beta: float

    def job(self, model: str, seed: int, policy: dict[str, Any], tuning: bool) -> Job:
        """Return the run of a seed."""
        made = load_recipe(ROOT / "recipes" / f"{self.recipe}.yaml")
        changes: dict[str, Any] = {}
        if model == "small":
            small = {k: v for k, v in SMALL.items() if not k.startswith(("data.", "rounds"))}
            changes = {**small, **policy, "rollout.batch_size": 64, "update.batch_size": 64}
            changes |= {"rollout.responses": made.rollout.responses, "evaluation.prompts": 256}
            times = made.rewards[0].times_column
            changes["rewards"] = [{**SMALL["rewards"][0], "times_column": times}]
            changes |= SMALL_CHANGES[self.recipe]
        users, pool = made.data.limit or 0, RECIPES[self.recipe]
        first = seed * users
        if tuning:
            first = pool - TUNING_USERS + seed * users % (TUNING_USERS - users + 1)
            changes["evaluation.data.skip"] = TUNING_PROMPTS
        words = {**WORDS, "times_column": made.rewards[0].times_column}
        changes |= {"evaluation.judges": {"words": words}, "evaluation.log_probs": True}
        changes |= {"data.skip": first, "kl.beta": self.beta, "seed": seed}
        name = f"{'tuning' if tuning else 'table'}-{self.recipe}-beta-{self.beta:g}-seed-{seed}"
        return Job(name, self.recipe, overrides_of(changes))


def figures_of(found: dict[str, Any]) -> dict[str, float]:
    """Return what the table shows of a run."""
    measures = found["measures"]
    return {
        "rise": found["rise"],
        "KL": measures["kl"][1],
        "perplexity": measures["perplexity"][1] / measures["perplexity"][0],
        "bigrams": measures["distinct_2"][1] / measures["distinct_2"][0],
        "lexicon": found["judges"]["words"],
    }


UNITS = {
    "rise": "reward", "KL": "nats a response", "perplexity": "1", "bigrams": "1",
    "lexicon": "words a text",
}  # fmt: skip
NAMES = {
    "rise": "rise of the reward",
    "KL": "KL to the base model",
    "perplexity": "perplexity under the base model, after over before",
    "bigrams": "distinct bigrams, after over before",
    "lexicon": "rise by the word list",
}


def rows(model: str, done: dict[Cell, list[dict[str, float]]]) -> Iterator[Result]:
    """Yield the means over seeds of each cell's figures."""
    for cell, runs in done.items():
        name = f"brake ({model}): {cell.recipe}, beta {cell.beta:g}"
        yield Result(f"{name}: seeds", len(runs), "1")
        for key, unit in UNITS.items():
            mean = float(np.mean([run[key] for run in runs]))
            goal: tuple[str, bool | None] = ("", None)
            if unit == "1" and cell.beta == load_recipe(_file(cell)).kl.beta:
                goal = "within 5% of 1", abs(mean - 1) <= 0.05
            yield Result(f"{name}: {NAMES[key]}", mean, unit, *goal)


def _file(cell: Cell) -> Path:
    return ROOT / "recipes" / f"{cell.recipe}.yaml"


def table(done: dict[Cell, list[dict[str, float]]]) -> list[str]:
    """Return a Markdown table, a row for each cell."""
    lines = ["| recipe | β | " + " | ".join(NAMES.values()) + " |"]
    lines.append("|---" * (len(NAMES) + 2) + "|")
    for cell, runs in done.items():
        means = [float(np.mean([run[key] for run in runs])) for key in NAMES]
        lines.append(
            f"| {cell.recipe} | {cell.beta:g} | {means[0]:+.2f} | {means[1]:.2f} | {means[2]:.2f} |"
            f" {means[3]:.2f} | {means[4]:+.2f} |"
        )
    return lines


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=["smollm2", "small"], default="smollm2")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--betas", nargs="+", type=float, default=BETAS)
    parser.add_argument("--tuning", action="store_true", help="users outside tables; no results")
    return options_of_runs(parser, runs="brake", results="worth.json", seeds=3).parse_args()


def main() -> None:
    """Run the cells, write the results."""
    options = parsed()
    folder = options.runs / options.model
    policy = small_policy(folder / "reviews-lm") if options.model == "small" else {}
    jobs = {
        (cell, seed): cell.job(options.model, seed, policy, options.tuning)
        for seed in range(options.seeds)
        for cell in (Cell(recipe, beta) for recipe in options.recipes for beta in options.betas)
    }
    found = run_cells(jobs, folder, options).items()
    done = {cell: [figures_of(run) for run in runs] for cell, runs in found}
    text = page(f"The brake ({options.model})", *table(done))
    print(text)
    if not options.tuning:
        write_results(options.results, rows(options.model, done))
        (options.results.parent / f"worth-brake-{options.model}.md").write_text(text)


if __name__ == "__main__":
    main()
