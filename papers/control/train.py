"""Training a small policy on simulated users: the recipe of a task, and the loop over rounds."""

from __future__ import annotations

import contextlib
import copy
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from dprlhf.policies.optimizers import make_optimizer, set_learning_rate
from dprlhf.privacy.accounting import Adjacency, Partition, PrivacyCost
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import Ledger
from dprlhf.privacy.partition import Allocation, allocate
from dprlhf.privacy.plan import Plan, check_promise, make_plan
from dprlhf.recipe import Optimizer, PositiveFloat, PositiveInt, Settings
from dprlhf.recipe.loading import read_settings
from papers.control import policies
from papers.control.environments import Environment, make_environment
from papers.control.policies import Array
from papers.control.trajectories import evaluate, simulate
from papers.control.updates import LEAKS, PGPE, UPDATES, ControlRound, TrajectoryNPG, TrajectoryPG


class TrajectoryPolicySettings(Settings):
    """Which policy acts, and how it sees observations (:mod:`papers.control.policies`)."""

    type: Literal["log-linear", "mlp", "linear"] = "log-linear"
    hidden: PositiveInt = 64  # Units of the hidden layer of mlp
    scale: tuple[float, ...] | None = None  # [size]
    levels: tuple[float, ...] | None = None  # [actions]
    shift: tuple[float, ...] | None = None  # [size]
    spread: PositiveFloat = 1.0
    center: float = 0.0  # Action of linear where its output is 0

    def build(self, environment: Environment) -> policies.TrajectoryPolicy:
        """Return the policy for an environment's observations and actions."""
        size, actions = environment.size, environment.actions
        if self.type == "linear":
            given = self.scale, self.shift, self.spread, self.center
            return policies.LinearAction(size, actions, *given)
        if self.type == "mlp":
            return policies.MLPSoftmax(size, actions, self.hidden, self.scale)
        return policies.LogLinearSoftmax(size, actions, self.scale, self.levels)


class TrajectoryPrivacy(Settings):
    """The privacy budget, as :func:`dprlhf.privacy.plan.make_plan` takes it."""

    epsilon: Annotated[float, Field(gt=0)] = 3.0  # Privacy loss ε; inf for a non-private baseline
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    partition: Partition = "random-allocation"  # How users are assigned to rounds
    adjacency: Adjacency | None = None  # What makes two data sets neighbours; None takes zero-out


class ControlRecipe(Settings):
    """The settings of a run on a control task, one YAML file of ``recipes/control``."""

    environment: str  # Name of the task (``ENVIRONMENTS``)
    users: PositiveInt = 1000  # Number N of users; a user is one trajectory
    rounds: PositiveInt = 100  # Number T of rounds
    privacy: TrajectoryPrivacy = TrajectoryPrivacy()
    policy: TrajectoryPolicySettings = TrajectoryPolicySettings()
    update: TrajectoryPG | TrajectoryNPG | PGPE = Field(TrajectoryPG(), discriminator="name")
    optimizer: Optimizer = Optimizer(name="sgd", learning_rate=1.0)
    evaluation_episodes: PositiveInt = 192


def load(path: Path, changes: Mapping[str, Any]) -> ControlRecipe:
    return make(read_settings(path), changes)


def make(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> ControlRecipe:
    """Return a recipe; ``changes`` maps dotted keys to values that replace those in settings."""
    tree: Any = copy.deepcopy(dict(settings))
    for key, value in changes.items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return ControlRecipe.model_validate(tree)


@dataclass(frozen=True)
class ControlOutcome:
    theta: Array  # the final parameters, [d]
    plan: Plan  # with the guarantee
    returns: Array  # Returns of the final policy on fresh simulated trajectories, [episodes]


def train(
    recipe: ControlRecipe,
    *,
    key: bytes,
    seed: int,
    environment: Environment | None = None,
    watch: Callable[[int, Array], None] | None = None,
) -> ControlOutcome:
    """Train on simulated users; the ledger lasts as long as the run, for they are nobody."""
    environment = environment or make_environment(recipe.environment)
    policy = recipe.policy.build(environment)
    plan = plan_of(recipe)
    allocation = allocate(plan, key)
    theta = torch.from_numpy(policy.initial(np.random.default_rng((seed, 1)))).requires_grad_()
    optimizer = make_optimizer(recipe.optimizer, [theta])
    memory: dict[str, Any] = {}
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

            def seeds(of: Allocation, t: int = t) -> list[tuple[int, int]]:
                return [(seed, int(user)) for user in of.round(t)]

            of_seeds = partial(simulate, environment, policy, now, directions=directions)
            users = allocation.map(seeds).map(of_seeds)
            round_ = ControlRound(
                t, policy, theta, users, plan, gate, optimizer, memory, directions
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
        users=recipe.users, rounds=recipe.rounds, delta=privacy.delta, epsilon=privacy.epsilon,
        clip_norm=update.clip_norm, partition=privacy.partition, adjacency=privacy.adjacency,
        releases_per_round=update.oracle.releases if isinstance(update, TrajectoryNPG) else 1,
    )  # fmt: skip
    if isinstance(update, PGPE) or update.advantage.baseline == "public":
        return plan
    why = f"not private: {LEAKS[update.advantage.baseline]}"
    none = PrivacyCost(math.inf, math.inf, privacy.delta, why, ())
    return Plan(**{**vars(plan), "guarantee": none})
