"""The recipe of a control task: strict, typed settings, read from YAML or with overrides."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Adjacency, Partition
from dprlhf.recipe import Optimizer, Oracle, PositiveFloat, PositiveInt, Settings
from dprlhf.recipe.loading import read_settings
from papers.control.environments import Environment
from papers.control.policies import (
    Array,
    LinearAction,
    LogLinearSoftmax,
    MLPSoftmax,
    TrajectoryPolicy,
)

LEAKS = {
    "batch": "advantages normalised over the batch couple all users of a round",
    "critic": "an un-noised critic carries earlier users into later rounds",
}
"""Baselines of the papers' own runs, and why no ε holds with them."""


class TrajectoryPolicySettings(Settings):
    """Which policy acts, and how it sees observations (:mod:`papers.control.policies`)."""

    type: Literal["log-linear", "mlp", "linear"] = "log-linear"
    hidden: PositiveInt = 64  # Units of the hidden layer of mlp
    scale: tuple[float, ...] | None = None  # [size]
    levels: tuple[float, ...] | None = None  # [actions]
    shift: tuple[float, ...] | None = None  # [size]
    spread: PositiveFloat = 1.0
    center: float = 0.0  # Action of linear where its output is 0

    def build(self, environment: Environment) -> TrajectoryPolicy:
        """Return the policy for an environment's observations and actions."""
        size, actions = environment.size, environment.actions
        if (self.type == "linear") != environment.continuous:
            wanted = "linear" if environment.continuous else "log-linear or mlp"
            raise DprlhfError(f"policy.type {self.type} cannot serve these actions: use {wanted}")
        wanted_lengths = {"scale": size, "shift": size, "levels": actions}
        for name, length in wanted_lengths.items():
            constants = getattr(self, name)
            if constants is not None and len(constants) != length:
                raise DprlhfError(f"policy.{name} has {len(constants)} numbers, not {length}")
        if self.type == "linear":
            return LinearAction(size, actions, self.scale, self.shift, self.spread, self.center)
        if self.type == "mlp":
            return MLPSoftmax(size, actions, self.hidden, self.scale)
        return LogLinearSoftmax(size, actions, self.scale, self.levels)


class Advantage(Settings):
    """Advantage of step t: Â_t = Σ_k γ^{k−t} (r_k − ρ), and −γ^{L−t} ρ/(1−γ) for an end at step L.

    This is the discounted return, compared with a reward of ρ at every step for ever. For CartPole
    with ρ = 1 it is the blame −γ^{L−t}/(1−γ) for a fall, and 0 in an episode that the time limit
    cut. γ and ρ are public, so each advantage depends on one user alone.
    """

    discount: Annotated[float, Field(ge=0, lt=1)] = 0.99  # Discount factor γ
    reference: float = 0.0  # Reference reward ρ, subtracted from the reward of every step
    baseline: Literal["public", "batch", "critic"] = "public"


class TrajectoryPG(Settings):
    """DP-PG on trajectories: a user contributes Σ_t Â_t ∇ log π(a_t|s_t), clipped to S."""

    name: Literal["pg"] = "pg"
    clip_norm: PositiveFloat = 1.0  # L2 bound S on a user's contribution
    advantage: Advantage = Advantage()  # How the advantages Â_t are computed from rewards


class TrajectoryNPG(Settings):
    """DP-NPG on trajectories: a user's loss is the mean over its steps of (w · φ_t − Â_t)²."""

    name: Literal["npg"] = "npg"
    clip_norm: PositiveFloat = 1.0  # Bound B on ‖φ_t‖; longer scores are scaled down to it
    advantage: Advantage = Advantage()  # How the advantages Â_t are computed from rewards
    oracle: Oracle = Oracle(name="sufficient-statistics", target_bound=1.0)


class PGPE(Settings):
    """Parameter-exploring policy gradient (Sehnke et al. 2010) along public directions.

    Each round has d public, orthogonal directions of norm σ√d, drawn afresh. User u picks one and a
    sign at random, acts with θ ± it, and contributes ± clip((return − b)/c, ±1) in that one of d
    coordinates. The policy may be deterministic.
    """

    name: Literal["pgpe"] = "pgpe"
    clip_norm: PositiveFloat = 1.0  # L2 bound S on a user's contribution
    perturb: PositiveFloat = 0.1  # Scale σ of the perturbations, for each parameter
    center: float = 0.0
    spread: PositiveFloat = 1.0  # Unit c of returns: a return c above b, or more, contributes 1
    share: Annotated[float, Field(ge=0, lt=1)] = 0.3

    def draw(self, rng: np.random.Generator, dimension: int) -> Array:
        """Return a round's directions, ``[d, d]``; public."""
        basis, _ = np.linalg.qr(rng.normal(size=(dimension, dimension)))
        return np.asarray(self.perturb * math.sqrt(dimension) * basis.T)


class TrajectoryPrivacy(Settings):
    """The privacy budget, as :func:`dprlhf.privacy.plan.make_plan` takes it."""

    epsilon: Annotated[float, Field(gt=0)] = 3.0  # Privacy loss ε; inf for a non-private baseline
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    partition: Partition = "random-allocation"  # How users are assigned to rounds
    adjacency: Adjacency | None = None  # What makes two data sets neighbours; None takes zero-out


class ControlRecipe(Settings):
    """The settings of a run on a control task, one YAML file of ``recipes/control``."""

    environment: str  # Name of the task (:data:`papers.control.environments.ENVIRONMENTS`)
    users: PositiveInt = 1000  # Number N of users; a user is one trajectory
    rounds: PositiveInt = 100  # Number T of rounds
    privacy: TrajectoryPrivacy = TrajectoryPrivacy()
    policy: TrajectoryPolicySettings = TrajectoryPolicySettings()
    update: Annotated[TrajectoryPG | TrajectoryNPG | PGPE, Field(discriminator="name")] = (
        TrajectoryPG()
    )
    optimizer: Optimizer = Optimizer(name="sgd", learning_rate=1.0)
    evaluation_episodes: PositiveInt = 192

    @model_validator(mode="after")
    def _linear_has_no_scores(self) -> ControlRecipe:
        if self.policy.type == "linear" and self.update.name != "pgpe":
            raise ValueError("update.name must be pgpe for policy.type linear")
        return self

    @property
    def leak(self) -> str | None:
        """Why no ε holds for this recipe; None where one does."""
        if isinstance(self.update, PGPE):
            return None
        return LEAKS.get(self.update.advantage.baseline)


def load(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ControlRecipe:
    """Read a YAML recipe; ``overrides`` maps dotted keys to values that replace the file's."""
    return make(read_settings(Path(path)), overrides, str(path))


def make(
    settings: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    source: str = "recipe",
) -> ControlRecipe:
    """Check settings and return them as a recipe."""
    tree: Any = copy.deepcopy(dict(settings))
    for key, value in (overrides or {}).items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    try:
        return ControlRecipe.model_validate(tree)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"] if part not in ("pg", "npg", "pgpe"))
        message = problem["msg"].removeprefix("Value error, ")
        raise DprlhfError(f"{source}: {key or 'recipe'}: {message}") from None
