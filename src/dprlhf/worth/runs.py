"""Runs of recipes by name, side by side and resumable, and the figures that each leaves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dprlhf.api import resume, train
from dprlhf.data.public import evaluated, public_users
from dprlhf.hardware import usable_cores
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.recipe import Recipe, load_recipe
from dprlhf.rewards import Scorer, load_reward
from dprlhf.runs.folder import RunFolder
from dprlhf.runs.many import run_missing
from dprlhf.training.evaluate import Evaluated, evaluate
from dprlhf.training.measures import estimate


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        file: Name of its folder, and of the file of its figures.
        recipe: Name of its recipe.
        overrides: Changes of the recipe, ``section.key=value``.
        judged: Changes of the recipe's rewards with which the tuned policy is evaluated again, one
            tuple for each evaluation; empty for none. The policy itself does not depend on them.
    """

    file: str
    recipe: str
    overrides: tuple[str, ...]
    judged: tuple[tuple[str, ...], ...] = ()


def overrides_of(settings: dict[str, Any]) -> tuple[str, ...]:
    """Return settings by key as the overrides of a recipe."""
    return tuple(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in settings.items()
    )


def run_all(
    jobs: Iterable[Job],
    folder: Path,
    *,
    recipes: Path,
    side_by_side: int = 1,
    write_only: bool = False,
) -> dict[str, dict[str, Any]]:
    """Run what is missing; return the figures of finished runs by the job's file name.

    Args:
        jobs: The runs, the most wanted ones first.
        folder: Folder of the run folders and figures.
        recipes: Folder of the recipes.
        side_by_side: Number of processes.
        write_only: Read what is finished, and run nothing.
    """
    threads = max(1, usable_cores() // max(1, side_by_side))
    work = {folder / f"{job.file}.json": (job, folder, recipes, threads) for job in jobs}
    found = run_missing(run, work, side_by_side=side_by_side, write_only=write_only)
    return {file.name.removesuffix(".json"): figures for file, figures in found.items()}


def run(job: Job, folder: Path, recipes: Path, threads: int) -> dict[str, Any]:
    """Train or resume one run; return its figures, from public rows and released values only.

    Returns:
        ``before``, ``after`` and ``rise``: mean reward on the public prompts; ``public`` and
        ``private``: rewards after each round where the run has them, the mean on the public
        prompts (``evaluation.every``) and the users' noised mean before the round's step;
        ``curve``: (KL to the base model in nats, mean reward) at each evaluation, the last one at
        the end; ``measures``: each built-in measure of the responses, before and after; ``judges``:
        the mean rise by each judge of the recipe; ``judged``: the rise under each change of
        ``job.judged``; and facts of the plan.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _figures(job, folder / job.file, recipes / f"{job.recipe}.yaml")
    finally:
        torch.set_num_threads(before)


def _figures(job: Job, place: Path, recipe: Path) -> dict[str, Any]:
    if (place / "ledger.jsonl").exists():
        result = resume(place, quiet=True)
    else:
        shutil.rmtree(place, ignore_errors=True)
        given = (*job.overrides, "evaluation.log_probs=true")
        result = train(recipe, overrides=given, output_dir=place, quiet=True)
    assert result.before and result.after and result.difference  # noqa: PT018
    sides = (result.before.measures, result.after.measures)
    rounds = [json.loads(line) for line in RunFolder(place).metrics.read_text("utf-8").splitlines()]
    return {
        "before": result.before.mean,
        "after": result.after.mean,
        "rise": result.difference.mean,
        "public": [r["public_reward"] for r in rounds if "public_reward" in r],
        "private": [r["private_reward_noised"] for r in rounds if "private_reward_noised" in r],
        "curve": [
            *((r["public_kl"], r["public_reward"]) for r in rounds if "public_reward" in r),
            (result.after.measures["kl"].mean, result.after.mean),
        ],
        "measures": {name: [side[name].mean for side in sides] for name in sides[0]},
        "judges": {
            name: one.difference.mean for name, one in result.compared.items() if name != "reward"
        },
        "judged": [
            rise_under(result.policy, load_recipe(recipe, overrides=(*job.overrides, *changes)))
            for changes in job.judged
        ],
        "users": result.plan.users,
        "rounds": result.plan.rounds,
        "dimension": result.policy.dimension,
        "epsilon": result.plan.guarantee.epsilon,
    }


def rise_under(policy: CausalLMPolicy, recipe: Recipe) -> float:
    """Return the rise of the mean reward over the base model, by a recipe's rewards and evaluation.

    The draws are those of every evaluation with this seed, so that two recipes that differ in
    their rewards score the same continuations.
    """
    before, after = (_evaluated(policy, recipe, base=base).rewards for base in (True, False))
    return estimate(after - before).mean


def _evaluated(policy: CausalLMPolicy, recipe: Recipe, *, base: bool) -> Evaluated:
    prompts = evaluated(recipe, public_users(recipe, None))
    assert prompts is not None
    assert recipe.evaluation is not None
    return evaluate(
        policy,
        Scorer([load_reward(reward) for reward in recipe.rewards], recipe.reward_range),
        prompts,
        recipe.rollout,
        seed=recipe.seed,
        max_prompt_tokens=recipe.evaluation.data.max_prompt_tokens,
        base=base,
    )


def gain(figures: dict[str, Any]) -> float:
    """Return a run's rise; the mean over ``judged`` where it was evaluated again."""
    judged: Sequence[float] = figures.get("judged") or [figures["rise"]]
    return sum(judged) / len(judged)


def judged_by(judge: str, figures: dict[str, Any]) -> float:
    """Return a run's rise by a judge, which multiplies its scores by the users' wishes.

    It is 0 where the run was evaluated again under the opposite wishes: the mean over both.
    """
    return 0.0 if figures.get("judged") else float(figures["judges"][judge])
