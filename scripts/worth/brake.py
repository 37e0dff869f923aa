"""Measure the brake: reward against the distance to the base model, by KL coefficient.

    python scripts/worth/brake.py --model small                   # the small public model: minutes
    python scripts/worth/brake.py --recipes demo --betas 0.05 0.1 0.2 --seeds 1 --tuning
    python scripts/worth/brake.py                                 # hours of one core

For each recipe and each ``kl.beta``: the rise of the reward on held-out prompts; KL(π ‖ μ) in nats
a response; the base model's perplexity and the distinct bigrams, after over before, which a brake
should keep within 5% of 1; and what the word list of ``lexicon.py`` says. ``--tuning``
takes users that no table has, and other held-out prompts than the demo's, and writes no results:
that is where a coefficient is chosen. Finished runs are kept and read again.

Writes docs/results/worth.json, and docs/results/worth-brake-MODEL.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from demo import measured
from dprlhf import load_recipe, train
from dprlhf.runs.measurements import Result, command, write_results
from noise.many_runs import ROOT, SMALL, overrides_of, small_policy

RESULTS = ROOT / "docs" / "results"
RECIPES = {"demo": 14_355, "imdb_sentiment": 23_000}
"""The recipes, and how many private rows their data has."""
TUNING_USERS = 6000
"""Users at the end of the private split that are for tuning alone, as in scripts/noise/grid.py."""
TUNING_PROMPTS = 600
"""Held-out prompts that come before those on which a coefficient is chosen."""
BETAS = [0.0, 0.05, 0.1, 0.2, 0.4]
SMALL_CHANGES: dict[str, dict[str, Any]] = {
    "demo": {"optimizer.learning_rate": 4.0, "update.subspace.rank": 64,
             "update.subspace.prompts": 128},
    "imdb_sentiment": {"optimizer.learning_rate": 0.5, "update.clip_norm": 0.7},
}  # fmt: skip
"""For the small model: what scripts/noise/grid.py found on other users, without a brake."""


@dataclass(frozen=True)
class Cell:
    """A recipe and a coefficient β."""

    recipe: str
    beta: float

    def settings(self, model: str, seed: int, policy: dict[str, Any], tuning: bool) -> list[str]:
        """Return the overrides of the run of a seed."""
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
        return list(
            overrides_of({**changes, "kl.beta": self.beta, "data.skip": first, "seed": seed})
        )


def figures(cell: Cell, given: list[str], place: Path) -> dict[str, float]:
    """Run a cell, or read what it found."""
    kept = place.with_name(f"{place.name}.json")  # a name with a point in it has no suffix
    if kept.exists():
        found: dict[str, float] = json.loads(kept.read_text())
        return found
    file = ROOT / "recipes" / f"{cell.recipe}.yaml"
    result = train(file, overrides=given, output_dir=_unused(place), quiet=True)
    assert result.difference
    seen = measured(result, load_recipe(file, given))
    base, tuned = seen.texts
    found = {
        "rise": result.difference.mean,
        "KL": tuned.kl,
        "perplexity": tuned.perplexity / base.perplexity,
        "bigrams": tuned.distinct / base.distinct,
        "lexicon": seen.gold_rise.mean,
    }
    kept.write_text(json.dumps(found))
    return found


def _unused(place: Path) -> Path:
    tries = (place.with_name(f"{place.name}-{number}") for number in range(1000))
    return next(folder for folder in tries if not folder.exists())


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
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/brake"))
    parser.add_argument("--results", type=Path, default=RESULTS / "worth.json")
    parser.add_argument("--tuning", action="store_true", help="users outside tables; no results")
    return parser.parse_args()


def main() -> None:
    """Run the cells, write the results."""
    options = parsed()
    folder = options.runs / options.model
    folder.mkdir(parents=True, exist_ok=True)
    policy = small_policy(folder / "reviews-lm") if options.model == "small" else {}
    done: dict[Cell, list[dict[str, float]]] = {}
    for seed in range(options.seeds):
        for cell in (Cell(recipe, beta) for recipe in options.recipes for beta in options.betas):
            given = cell.settings(options.model, seed, policy, options.tuning)
            kind = "tuning" if options.tuning else "table"
            name = f"{kind}-{cell.recipe}-beta-{cell.beta:g}-seed-{seed}"
            done.setdefault(cell, []).append(figures(cell, given, folder / name))
    text = [f"# The brake ({options.model})", "", f"`{command()}`", "", *table(done)]
    print("\n".join(text))
    if not options.tuning:
        write_results(options.results, rows(options.model, done))
        place = options.results.parent / f"worth-brake-{options.model}.md"
        place.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
