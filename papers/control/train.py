"""Training a small policy on simulated users, a page to read from top to bottom."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dprlhf.boundary import Private
from dprlhf.policies.optimizers import make_optimizer, set_learning_rate
from dprlhf.privacy.accounting import PrivacyCost
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import Ledger
from dprlhf.privacy.partition import allocate
from dprlhf.privacy.plan import Plan, check_promise, make_plan
from papers.control.environments import Environment, make_environment
from papers.control.policies import Array
from papers.control.settings import PGPE, ControlRecipe, TrajectoryNPG
from papers.control.trajectories import collect, evaluate
from papers.control.updates import UPDATES, ControlRound

Watch = Callable[[int, Array], None]


@dataclass(frozen=True)
class ControlOutcome:
    """What a run released, and how it does on fresh trajectories."""

    theta: Array  # the final parameters, [d]
    plan: Plan  # with the guarantee
    returns: Array  # Returns of the final policy on fresh simulated trajectories, [episodes]


def train(
    recipe: ControlRecipe,
    *,
    key: bytes,
    seed: int,
    environment: Environment | None = None,
    watch: Watch | None = None,
) -> ControlOutcome:
    """Train on simulated users; the ledger lasts as long as the run, for they are nobody."""
    environment = environment or make_environment(recipe.environment)
    policy = recipe.policy.build(environment)
    plan = plan_of(recipe)
    allocation = allocate(plan, key)
    theta = torch.from_numpy(policy.initial(np.random.default_rng((seed, 1)))).requires_grad_()
    optimizer = make_optimizer(recipe.optimizer, [theta])
    memory: dict[str, float] = {}
    leak: dict[str, Private[Any]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Ledger(Path(folder) / "ledger.jsonl", plan.terms())) as ledger,
    ):
        gate = Gate(plan, ledger, key)
        for t in range(1, plan.rounds + 1):
            now = theta.detach().numpy()
            if watch is not None:
                watch(t, now.copy())
            directions = None
            if isinstance(recipe.update, PGPE):
                directions = recipe.update.draw(np.random.default_rng((seed, 5, t)), len(now))
            users = collect(environment, policy, now, allocation, t, seed, directions)
            round_ = ControlRound(
                t, policy, theta, users, plan, gate, optimizer, memory, directions, leak
            )
            set_learning_rate(optimizer, recipe.optimizer, t, plan.rounds)
            UPDATES[recipe.update.name](round_, recipe.update)
            ledger.commit(t)
    final = theta.detach().numpy().copy()
    returns = evaluate(environment, policy, final, (seed, 3), recipe.evaluation_episodes)
    return ControlOutcome(final, plan, returns)


@lru_cache
def plan_of(recipe: ControlRecipe) -> Plan:
    """Return the plan of a recipe; one that leaks keeps its noise and states no ε."""
    privacy, update = recipe.privacy, recipe.update
    check_promise(privacy.adjacency)
    plan = make_plan(
        users=recipe.users,
        rounds=recipe.rounds,
        delta=privacy.delta,
        epsilon=privacy.epsilon,
        clip_norm=update.clip_norm,
        partition=privacy.partition,
        adjacency=privacy.adjacency,
        releases_per_round=update.oracle.releases if isinstance(update, TrajectoryNPG) else 1,
    )
    if recipe.leak is None:
        return plan
    inf = float("inf")
    none = PrivacyCost(inf, inf, privacy.delta, f"not private: {recipe.leak}", ())
    return Plan(**{**vars(plan), "guarantee": none})
