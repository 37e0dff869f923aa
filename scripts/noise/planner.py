"""How well ``dprlhf plan RECIPE`` predicts and ranks private runs: ten plans, drawn at random.

    python scripts/noise/planner.py --seeds 3 --side-by-side 2    # half a core-minute a run
    python scripts/noise/planner.py --seeds 3 --write-only        # reads the finished runs only
    python scripts/noise/planner.py --model smollm2 --trial-runs 1    # some minutes a run

The plans were drawn once, with a fixed seed: users, ε, partition, rounds, passes, bands and
responses. There are two predictions, from public prompts alone: the formula's, which the command
shows at once, and the mean rise of its trial runs (``--trial-runs``), in which public prompts stand
in for the users. The result is the mean rise of finished private runs on public prompts that no
trial run sees; runs of one plan differ by secret rounds and noise. DP-PG, either with the small
public model and the word reward of ``scripts/utility.py --small``, or with SmolLM2-135M as in
``recipes/imdb_few_users.yaml``. The users are in no other table: rows 9,000 and up of IMDB's
private split. Finished runs are kept and read again, interrupted ones resumed.

Writes rows to docs/results/noise.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from scipy.stats import spearmanr

from dprlhf.hardware import usable_cores
from dprlhf.recipe import load_recipe
from dprlhf.runs.many import run_missing
from dprlhf.runs.measurements import Result, write_results
from dprlhf.training.choices import Candidate, Choice, planner
from dprlhf.training.planner import measure, with_choice
from dprlhf.tuning.public_rows import public_rows
from dprlhf.tuning.stand_in import run_stand_ins
from noise.many_runs import ROOT, SMALL, Job, overrides_of, run_all, small_policy

OUT = ROOT / "docs" / "results" / "noise.json"
PLANS = 10
SHARE, WANTED = 0.1, 8


@dataclass(frozen=True)
class Task:
    """What the plans are of.

    Attributes:
        recipe: Name of the recipe.
        changes: Changes to it.
        users: Numbers of users to draw from.
        most_responses: Largest number of responses to users in a run.
        bands: Whether there are plans with correlated noise; not where directions are found anew,
            along which noise of earlier rounds could not be taken back.
    """

    recipe: str
    changes: dict[str, Any]
    users: tuple[int, ...]
    most_responses: int
    bands: bool

    @property
    def file(self) -> Path:
        """The file of the recipe."""
        return ROOT / "recipes" / f"{self.recipe}.yaml"


TASKS = {
    "small": Task(
        "imdb_sentiment",
        {
            **SMALL,
            "data.skip": 9000, "data.limit": 1500, "update.clip_norm": 0.7,
            "optimizer.name": "normalized-sgd", "optimizer.momentum": 0.6,
            "optimizer.learning_rate": 4,
        },
        (600, 1000, 1500),
        6000,
        bands=True,
    ),
    "smollm2": Task(
        "imdb_few_users", {"data.skip": 9000, "data.limit": 600}, (300, 400, 600), 2400, bands=False
    ),
}  # fmt: skip
Plans = Sequence[tuple[int, float, Candidate]]


def held_out(task: Task) -> Plans:
    """Return the plans: users, ε and settings, drawn once with a fixed seed."""
    random = np.random.default_rng(18)
    drawn: list[tuple[int, float, Candidate]] = []
    while len(drawn) < PLANS:
        users = int(random.choice(task.users))
        epsilon = float(random.choice([1, 2, 4, 8]))
        rounds = int(random.choice([4, 6, 8, 12, 16]))
        passes = int(random.choice([1, 1, 2]))
        responses = int(random.choice([2, 4]))
        partition = str(random.choice(["random-allocation"] * 3 + ["fixed"]))
        bands = 1
        if partition == "fixed":
            passes, correlated = 1, int(random.choice([4, rounds]))
            bands = correlated if task.bands else 1
        plan = (users, epsilon, Candidate(partition, rounds, passes, bands, responses))
        fits = rounds % passes == 0 and users * passes * responses <= task.most_responses
        if fits and plan not in drawn:
            drawn.append(plan)
    return drawn


def predicted(task: Task) -> list[Choice]:
    """Return every plan with the figures that ``dprlhf plan RECIPE`` shows of it.

    The public prompts are measured once: they do not depend on the number of users, nor on ε.
    """
    recipe = load_recipe(task.file, overrides_of(task.changes))
    facts = measure(recipe, responses=[2, 4], trial_runs=True)
    print(facts.describe(), flush=True)
    found = []
    for users, epsilon, candidate in held_out(task):
        cost, _ = planner(
            users,
            epsilon,
            recipe.privacy.delta,
            adjacency=recipe.privacy.adjacency,
            releases=recipe.update.releases,
        )
        found.append(replace(facts, users=users).rated(candidate, cost(candidate)))
    return found


def trial_run(task: Task, number: int, seed: int, threads: int) -> dict[str, Any]:
    """Run a plan on public prompts in place of its users; return the rise."""
    torch.set_num_threads(threads)
    users, epsilon, candidate = held_out(task)[number]
    changes = {**task.changes, "data.limit": users, "privacy.epsilon": epsilon}
    recipe = load_recipe(task.file, overrides_of(changes))
    chosen = with_choice(recipe, candidate)
    run = run_stand_ins(chosen, public_rows(recipe), users=users, seed=seed)
    return {"rise": run.rise.mean, "stand_ins": run.stand_ins, "prompts": run.prompts}


def trial_rises(
    task: Task, folder: Path, *, runs: int, side_by_side: int, write_only: bool
) -> dict[int, list[float]]:
    """Return the rises of all finished trial runs, by the plan's position; missing ones are run."""
    threads = max(1, usable_cores() // side_by_side)
    work = {
        folder / f"trial-{number}-{seed}.json": (task, number, seed, threads)
        for seed in range(runs)
        for number in range(PLANS)
    }
    finished = run_missing(trial_run, work, side_by_side=side_by_side, write_only=write_only)
    return by_plan({file.stem: figures for file, figures in finished.items()})


def by_plan(figures: dict[str, dict[str, Any]]) -> dict[int, list[float]]:
    """Return the rises of runs whose files are called ``KIND-PLAN-SEED``, by the plan."""
    found: dict[int, list[float]] = {}
    for file, of_run in sorted(figures.items()):
        found.setdefault(int(file.split("-")[1]), []).append(of_run["rise"])
    return found


def jobs(task: Task, choices: Sequence[Choice], seeds: int) -> list[Job]:
    """Return the private runs, with the overrides that the command shows."""
    found = []
    for seed in range(seeds):
        for number, ((users, epsilon, _), choice) in enumerate(
            zip(held_out(task), choices, strict=True)
        ):
            changes = {**task.changes, "data.limit": users, "privacy.epsilon": epsilon}
            overrides = (*overrides_of(changes), *choice.overrides())
            found.append(Job(f"plan-{number}-{seed}", task.recipe, overrides))
    return found


def rows(
    model: str,
    choices: Sequence[Choice],
    tried: dict[int, list[float]],
    rises: dict[int, list[float]],
) -> list[Result]:
    """Return each finished plan's predictions and result, the errors, and how well plans rank.

    Args:
        model: Name of the task.
        choices: The plans with the formula's prediction.
        tried: The rises of each plan's trial runs, by the plan's position.
        rises: The rises of each plan's finished private runs.
    """
    name, plans = f"planner ({model})", held_out(TASKS[model])
    found = [Result(f"{name}: finished private runs", sum(map(len, rises.values())), "runs")]
    for number, reached in rises.items():
        (users, epsilon, c), choice = plans[number], choices[number]
        label = (
            f"{name}: plan {number + 1}, {users} users, epsilon {epsilon:g}, {c.partition},"
            f" {c.rounds} rounds, {c.participations} passes, {c.bands} bands,"
            f" {c.responses} responses"
        )
        found += [
            Result(f"{label}, predicted rise", choice.reward or 0.0, "reward"),
            Result(f"{label}, measured rise", float(np.mean(reached)), "reward"),
        ]
        if len(reached) > 1:
            error = float(np.std(reached, ddof=1)) / len(reached) ** 0.5
            found.append(Result(f"{label}, measured rise, standard error", error, "reward"))
        if number in tried:
            mean = float(np.mean(tried[number]))
            found.append(Result(f"{label}, rise of its trial runs", mean, "reward"))
    formula = {number: choices[number].reward or 0.0 for number in rises}
    found += compared(name, "", formula, rises)
    spreads = [np.std(r, ddof=1) / np.mean(r) for r in rises.values() if len(r) > 1]
    if spreads:
        spread = "standard deviation between runs of a plan over its mean rise, median"
        found.append(Result(f"{name}: {spread}", float(np.median(spreads)), "1"))
    if tried:
        means = {number: float(np.mean(tried[number])) for number in rises if number in tried}
        found.append(Result(f"{name}: trial runs", sum(map(len, tried.values())), "runs"))
        found += compared(name, ", by trial runs", means, rises)
    return found


def compared(
    name: str, by: str, predicted: dict[int, float], rises: dict[int, list[float]]
) -> list[Result]:
    """Return how far predictions are from the mean measured rises, and how well they rank.

    Args:
        name: Beginning of the rows' names.
        by: Their end.
        predicted: The prediction for each plan, by its position.
        rises: The rises of each plan's finished private runs.
    """
    foreseen = np.array(list(predicted.values()))
    reached = np.array([np.mean(rises[number]) for number in predicted])
    errors = foreseen / reached - 1
    near = int((np.abs(errors) <= SHARE).sum())
    within = f"{name}: plans predicted within 10%{by}"
    rank = float(spearmanr(foreseen, reached).statistic)
    return [
        Result(within, near, "plans", f"at least {WANTED} of {PLANS}", near >= WANTED),
        Result(
            f"{name}: median relative error of the prediction{by}", float(np.median(errors)), "1"
        ),
        Result(
            f"{name}: rank correlation of predicted and measured rise (Spearman){by}", rank, "1"
        ),
        Result(
            f"{name}: measured rise of the plan ranked first over the largest measured rise{by}",
            float(reached[foreseen.argmax()] / reached.max()),
            "1",
        ),
    ]


def main() -> None:
    """Predict, run what is missing, compare and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=TASKS, default="small")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "noise-planner")
    parser.add_argument("--results", type=Path, default=OUT)
    parser.add_argument("--seeds", type=int, default=1, help="private runs of each plan")
    parser.add_argument("--trial-runs", type=int, default=3, help="trial runs of each plan")
    parser.add_argument("--side-by-side", type=int, default=1, help="number of processes")
    parser.add_argument("--write-only", action="store_true", help="read the finished runs only")
    options = parser.parse_args()
    task, folder = TASKS[options.model], options.runs / options.model
    if options.model == "small":
        policy = small_policy(options.runs / "reviews-lm")
        task = replace(task, changes=task.changes | policy)
    choices = predicted(task)
    figures = run_all(
        jobs(task, choices, options.seeds),
        folder,
        side_by_side=options.side_by_side,
        write_only=options.write_only,
    )
    tried = trial_rises(
        task,
        folder,
        runs=options.trial_runs,
        side_by_side=options.side_by_side,
        write_only=options.write_only,
    )
    results = rows(options.model, choices, tried, by_plan(figures))
    for row in results:
        print(f"{row.name}: {row.value:.3f}")
    write_results(options.results, results)


if __name__ == "__main__":
    main()
