"""Training a small policy on simulated users, a page to read from top to bottom."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save

from dprlhf.boundary import Private
from dprlhf.papers.control.environments import Environment, make_environment
from dprlhf.papers.control.policies import Array
from dprlhf.papers.control.settings import PGPE, ControlRecipe
from dprlhf.papers.control.trajectories import collect, evaluate, record
from dprlhf.papers.control.updates import UPDATES, ControlRound
from dprlhf.policies.optimizers import make_optimizer, set_learning_rate
from dprlhf.privacy.accounting import Epsilon
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import Ledger, opened_terms
from dprlhf.privacy.partition import allocate
from dprlhf.privacy.plan import Plan, check_promise, make_plan
from dprlhf.privacy.randomness import commitment
from dprlhf.privacy.relations import Adjacency
from dprlhf.runs.checkpoint import load_moments, moments_of
from dprlhf.runs.folder import write_atomically

Watch = Callable[[int, Array], None]

_CHECKPOINT = "checkpoint.safetensors"


@dataclass(frozen=True)
class Outcome:
    """What a run released, and how it does on fresh trajectories.

    Attributes:
        theta: the final parameters, ``[d]``.
        plan: with the guarantee.
        returns: Returns of the final policy on fresh simulated trajectories, ``[episodes]``.
        curve: (users so far, mean return) of the policies on the way.
    """

    theta: Array
    plan: Plan
    returns: Array
    curve: list[tuple[float, float]]


def train(
    recipe: ControlRecipe,
    folder: Path,
    *,
    key: bytes,
    seed: int,
    environment: Environment | None = None,
    watch: Watch | None = None,
) -> Outcome:
    """Train, or continue what an interrupted run in the same folder began.

    Args:
        recipe: what to run.
        folder: Where the ledger, the checkpoint and ``secret/`` go.
        key: 32 secret bytes: allocation and noise come from it.
        seed: Seed of the simulated users, and of the fresh trajectories that evaluate.
        environment: in place of the recipe's name.
        watch: told each round t and the released θ_t that its users meet.

    Raises:
        DprlhfError: the recipe cannot run, or the folder belongs to another.
    """
    environment = environment or make_environment(recipe.environment)
    policy = recipe.policy.build(environment)
    opened = opened_terms(folder / "ledger.jsonl")
    plan = plan_of(recipe, opened.get("adjacency")).continued(opened)
    folder.mkdir(parents=True, exist_ok=True)
    terms = {**plan.terms(), "recipe": _digest(recipe), "key": commitment(key, "control")}
    with contextlib.closing(Ledger(folder / "ledger.jsonl", terms)) as ledger:
        gate = Gate(plan, ledger, key)
        allocation = allocate(plan, key)
        theta = torch.from_numpy(policy.initial(np.random.default_rng((seed, 1))))
        theta.requires_grad_()
        optimizer = make_optimizer(
            recipe.optimizer, [theta], plan.noise_std / plan.expected_batch_size
        )
        memory: dict[str, float] = {}
        leak: dict[str, Private[Any]] = {}
        curve: list[tuple[float, float]] = []
        saved = _load(folder, theta, optimizer, memory, curve)
        ledger.confirm(saved)
        for t in range(ledger.next_round, plan.rounds + 1):
            if watch is not None:
                watch(t, theta.detach().numpy().copy())
            now = theta.detach().numpy()
            directions = _directions(recipe, len(now), seed, t)
            users = collect(environment, policy, now, allocation, t, seed, directions)
            record(folder, t, users)
            round_ = ControlRound(
                t, policy, theta, users, plan, gate, optimizer, memory, directions, leak
            )
            set_learning_rate(optimizer, recipe.optimizer, t, plan.rounds)
            UPDATES[recipe.update.name](round_, recipe.update)
            if recipe.curve_points and t % max(1, plan.rounds // recipe.curve_points) == 0:
                fresh = evaluate(environment, policy, now, (seed, 2, t), recipe.curve_episodes)
                curve.append((t * plan.users / plan.rounds, float(fresh.mean())))
            _save(folder, t, theta, optimizer, memory, curve)
            ledger.commit(t)
        final = theta.detach().numpy().copy()
        returns = evaluate(environment, policy, final, (seed, 3), recipe.evaluation_episodes)
        return Outcome(final, plan, returns, curve)


@lru_cache
def plan_of(recipe: ControlRecipe, stated: str | None = None) -> Plan:
    """Return the plan of a recipe; one that leaks keeps its noise and states no ε.

    Args:
        recipe: The settings.
        stated: The adjacency that the ledger of a continued run states, which it keeps.

    Raises:
        DprlhfError: A new run asks for add-remove, or a setting is out of range.
    """
    privacy = recipe.privacy
    if stated is None:
        check_promise(privacy.adjacency)
    plan = make_plan(
        users=recipe.users,
        rounds=recipe.rounds,
        delta=privacy.delta,
        epsilon=privacy.epsilon,
        noise_multiplier=privacy.noise_multiplier,
        clip_norm=recipe.update.clip_norm,
        partition=privacy.partition,
        adjacency=cast(Adjacency | None, stated) or privacy.adjacency,
        participations=privacy.participations,
        releases_per_round=releases(recipe),
    )
    if recipe.leak is None:
        return plan
    inf = float("inf")
    none = Epsilon(inf, inf, privacy.delta, f"not private: {recipe.leak}", ())
    return Plan(**{**vars(plan), "guarantee": none})


def releases(recipe: ControlRecipe) -> int:
    """Return J, the noised sums that a round takes."""
    update = recipe.update
    if update.name == "npg" and update.oracle != "sufficient-statistics":
        return update.steps
    return 1


def _directions(recipe: ControlRecipe, dimension: int, seed: int, round_: int) -> Array | None:
    if not isinstance(recipe.update, PGPE):
        return None
    return recipe.update.draw(np.random.default_rng((seed, 5, round_)), dimension)


def _digest(recipe: ControlRecipe) -> str:
    return hashlib.sha256(recipe.model_dump_json().encode()).hexdigest()


def _save(
    folder: Path,
    round_: int,
    theta: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    memory: dict[str, float],
    curve: list[tuple[float, float]],
) -> None:
    """Write what a resumed run needs, all of it released or public."""
    told = {"round": round_, "memory": memory, "curve": curve}
    tensors = {"theta": theta.detach().clone(), **moments_of(optimizer, ["theta"])}
    # One file, so that a crash cannot part what belongs together.
    write_atomically(folder / _CHECKPOINT, save(tensors, {"told": json.dumps(told)}))


def _load(
    folder: Path,
    theta: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    memory: dict[str, float],
    curve: list[tuple[float, float]],
) -> int:
    """Restore a checkpoint, if there is one, and return its round."""
    path = folder / _CHECKPOINT
    if not path.exists():
        return 0
    with safe_open(path, "pt") as held:
        told = json.loads(held.metadata()["told"])
        tensors = {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
    with torch.no_grad():
        theta.copy_(tensors.pop("theta"))
    load_moments(optimizer, ["theta"], tensors)
    memory.update(told["memory"])
    curve.extend((float(x), float(y)) for x, y in told["curve"])
    return int(told["round"])
