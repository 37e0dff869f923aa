"""How well ``dprlhf plan RECIPE`` predicts and ranks private runs: ten plans, drawn at random.

    python scripts/noise/planner.py --side-by-side 2    # half a core-minute a run
    python scripts/noise/planner.py --write-only        # reads the finished runs only

The plans were drawn once, with a fixed seed: users, ε, partition, rounds, passes, bands and
responses. The prediction is the rise that the command shows, from public prompts alone. The result
is the rise of a finished private run on the same public prompts that every run is evaluated on;
runs of one plan differ by secret rounds and noise. DP-PG with the small public model and the word
reward of ``scripts/utility.py --small``, on users that are in no other table: rows 9,000 and up of
IMDB's private split. Finished runs are kept and read again, interrupted ones resumed.

Writes rows to docs/results/noise.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from scipy.stats import spearmanr

from dprlhf.recipe import load_recipe
from dprlhf.runs.measurements import Result, write_results
from dprlhf.training.choices import Candidate, Choice, planner
from dprlhf.training.planner import measure
from noise.many_runs import ROOT, SMALL, Job, overrides_of, run_all, small_policy

OUT = ROOT / "docs" / "results" / "noise.json"
COMMON: dict[str, Any] = {
    **SMALL,
    "data.skip": 9000, "data.limit": 1500, "update.clip_norm": 0.7,
    "optimizer.name": "normalized-sgd", "optimizer.momentum": 0.6, "optimizer.learning_rate": 4,
}  # fmt: skip
PLANS, MOST_RESPONSES = 10, 6000
SHARE, WANTED = 0.1, 8
NAME = "planner (small)"


def held_out() -> list[tuple[int, float, Candidate]]:
    """Return the plans: users, ε and settings, drawn once with a fixed seed."""
    random = np.random.default_rng(18)
    drawn: list[tuple[int, float, Candidate]] = []
    while len(drawn) < PLANS:
        users = int(random.choice([600, 1000, 1500]))
        epsilon = float(random.choice([1, 2, 4, 8]))
        rounds = int(random.choice([4, 6, 8, 12, 16]))
        passes = int(random.choice([1, 1, 2]))
        responses = int(random.choice([2, 4]))
        partition = str(random.choice(["random-allocation"] * 3 + ["fixed"]))
        bands = 1
        if partition == "fixed":
            passes, bands = 1, int(random.choice([4, rounds]))
        plan = (users, epsilon, Candidate(partition, rounds, passes, bands, responses))
        fits = rounds % passes == 0 and users * passes * responses <= MOST_RESPONSES
        if fits and plan not in drawn:
            drawn.append(plan)
    return drawn


def predicted(settings: dict[str, Any]) -> list[Choice]:
    """Return every plan with the figures that ``dprlhf plan RECIPE`` shows of it.

    The public prompts are measured once: they do not depend on the number of users, nor on ε.
    """
    recipe = load_recipe(ROOT / "recipes" / "imdb_sentiment.yaml", overrides_of(settings))
    facts = measure(recipe, responses=[2, 4])
    print(facts.describe(), flush=True)
    found = []
    for users, epsilon, candidate in held_out():
        cost, _ = planner(
            users,
            epsilon,
            recipe.privacy.delta,
            adjacency=recipe.privacy.adjacency,
            releases=recipe.update.releases,
        )
        found.append(replace(facts, users=users).rated(candidate, cost(candidate)))
    return found


def jobs(settings: dict[str, Any], choices: Sequence[Choice], seeds: int) -> list[Job]:
    """Return the private runs, with the overrides that the command shows."""
    found = []
    for seed in range(seeds):
        for number, ((users, epsilon, _), choice) in enumerate(
            zip(held_out(), choices, strict=True)
        ):
            changes = {**settings, "data.limit": users, "privacy.epsilon": epsilon}
            overrides = (*overrides_of(changes), *choice.overrides())
            found.append(Job(f"plan-{number}-{seed}", "imdb_sentiment", overrides))
    return found


def rows(choices: Sequence[Choice], rises: dict[int, list[float]]) -> list[Result]:
    """Return each finished plan's prediction and result, the errors, and how well plans rank.

    Args:
        choices: The plans with their predictions.
        rises: The rise of every finished run, by the plan's position.
    """
    found = []
    for number, reached in rises.items():
        (users, epsilon, c), choice = held_out()[number], choices[number]
        label = (
            f"{NAME}: plan {number + 1}, {users} users, epsilon {epsilon:g}, {c.partition},"
            f" {c.rounds} rounds, {c.participations} passes, {c.bands} bands,"
            f" {c.responses} responses"
        )
        found += [
            Result(f"{label}, predicted rise", choice.reward or 0.0, "reward"),
            Result(f"{label}, measured rise", float(np.mean(reached)), "reward"),
        ]
    foreseen = np.array([choices[number].reward for number in rises])
    reached = np.array([np.mean(rises[number]) for number in rises])
    errors = foreseen / reached - 1
    near = int((np.abs(errors) <= SHARE).sum())
    return [
        *found,
        Result(f"{NAME}: finished private runs", sum(map(len, rises.values())), "runs"),
        Result(
            f"{NAME}: plans predicted within 10%",
            near,
            "plans",
            f"at least {WANTED} of {PLANS}",
            near >= WANTED,
        ),
        Result(f"{NAME}: median relative error of the prediction", float(np.median(errors)), "1"),
        Result(
            f"{NAME}: rank correlation of predicted and measured rise (Spearman)",
            float(spearmanr(foreseen, reached).statistic),
            "1",
        ),
        Result(
            f"{NAME}: measured rise of the plan ranked first over the largest measured rise",
            float(reached[foreseen.argmax()] / reached.max()),
            "1",
        ),
    ]


def main() -> None:
    """Predict, run what is missing, compare and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "noise-planner")
    parser.add_argument("--seeds", type=int, default=1, help="private runs of each plan")
    parser.add_argument("--side-by-side", type=int, default=1, help="number of processes")
    parser.add_argument("--write-only", action="store_true", help="read the finished runs only")
    options = parser.parse_args()
    settings = COMMON | small_policy(options.runs / "reviews-lm")
    choices = predicted(settings)
    figures = run_all(
        jobs(settings, choices, options.seeds),
        options.runs,
        side_by_side=options.side_by_side,
        write_only=options.write_only,
    )
    rises: dict[int, list[float]] = {}
    for file, of_run in sorted(figures.items()):
        rises.setdefault(int(file.split("-")[1]), []).append(of_run["rise"])
    results = rows(choices, rises)
    for row in results:
        print(f"{row.name}: {row.value:.3f}")
    write_results(OUT, results)


if __name__ == "__main__":
    main()
