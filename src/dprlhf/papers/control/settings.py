"""The recipe of a control task: strict, typed settings, read from YAML or with overrides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import yaml
from pydantic import Field, ValidationError, model_validator

from dprlhf.errors import DprlhfError, one_line
from dprlhf.papers.control.environments import Environment
from dprlhf.papers.control.policies import (
    Array,
    GaussianMLP,
    LogLinearSoftmax,
    MLPSoftmax,
    TabularSoftmax,
    TrajectoryPolicy,
)
from dprlhf.privacy.accounting import Adjacency, Partition
from dprlhf.recipe import Optimizer, PositiveFloat, PositiveInt, Settings

LEAKS = {
    "batch": "advantages normalised over the batch couple all users of a round",
    "critic": "an un-noised critic carries earlier users into later rounds",
}
"""Baselines of the papers' own runs, and why no ε holds with them."""


class Policy(Settings):
    """The policy; see :mod:`dprlhf.papers.control.policies`.

    Attributes:
        type: ``tabular``, ``log-linear`` or ``mlp`` (softmax), or ``gaussian``.
        hidden: units of ``mlp`` and ``gaussian``; 0: linear.
        scale: public constants that observations are multiplied with; not of ``tabular``. With
            ``log-linear``, numbers whose scale is 0 are not read and have no parameters.
        levels: of ``log-linear``: public numbers of actions that have an order, ``[-1, 0, 1]``.
        shift: of ``gaussian``: public constants taken off before that.
        std: of ``gaussian``.
        learn_std: of ``gaussian``.
        spread: of ``gaussian``.
        center: of ``gaussian``.
    """

    type: Literal["tabular", "log-linear", "mlp", "gaussian"] = "log-linear"
    hidden: Annotated[int, Field(ge=0)] = 64
    scale: tuple[float, ...] | None = None
    levels: tuple[float, ...] | None = None
    shift: tuple[float, ...] | None = None
    std: Annotated[float, Field(ge=0)] = 0.5
    learn_std: bool = False
    spread: PositiveFloat = 1.0
    center: float = 0.0

    def build(self, environment: Environment) -> TrajectoryPolicy:
        """Return the policy for an environment.

        Raises:
            DprlhfError: the policy cannot serve the action space.
        """
        size, actions = environment.size, environment.actions
        for name, constants in (("scale", self.scale), ("shift", self.shift)):
            if constants is not None and len(constants) != size:
                raise DprlhfError(f"policy.{name} has {len(constants)} numbers, not {size}")
        if self.levels is not None and self.type != "log-linear":
            raise DprlhfError(f"policy.levels is for log-linear, not {self.type}")
        if self.scale is not None and self.type == "tabular":
            raise DprlhfError("policy.scale is not for tabular, which observes no numbers")
        if self.scale is not None and not any(self.scale):
            raise DprlhfError("policy.scale is 0 everywhere: the policy would read nothing")
        if self.levels is not None and len(self.levels) != actions:
            raise DprlhfError(f"policy.levels has {len(self.levels)} numbers, not {actions}")
        if (self.type == "gaussian") != environment.continuous:
            kind = f"{actions} numbers" if environment.continuous else f"one of {actions}"
            wanted = "gaussian" if environment.continuous else "log-linear, mlp or tabular"
            raise DprlhfError(
                f"policy.type {self.type} cannot serve actions that are {kind}: use {wanted}"
            )
        if self.type == "gaussian":
            return GaussianMLP(
                size, actions, self.hidden, self.std, self.learn_std, self.scale, self.shift,
                self.spread, self.center,
            )  # fmt: skip
        if self.type == "mlp":
            return MLPSoftmax(size, actions, self.hidden, self.scale)
        if self.type == "tabular":
            return TabularSoftmax(size, actions)
        return LogLinearSoftmax(size, actions, self.scale, self.levels)


class Advantage(Settings):
    """Â_t = Σ_k γ^{k−t} (r_k − ρ), and −γ^{L−t} ρ/(1−γ) more where the episode ended at L.

    That is the discounted return against the reward ρ for ever: for CartPole with ρ = 1 the blame
    −γ^{L−t}/(1−γ) of a fall and nothing for an episode that the time limit cut. γ and ρ are public,
    so each advantage depends on one user alone.

    Attributes:
        discount: γ.
        reference: ρ.
        baseline: ``public`` takes nothing more off; ``own`` the mean over the user's own steps.
            ``batch`` normalises over all users of a round and ``critic`` takes off a linear value
            function fitted, without noise, on earlier rounds: as in the papers' own runs, and
            not private.
    """

    discount: Annotated[float, Field(ge=0, lt=1)] = 0.99
    reference: float = 0.0
    baseline: Literal["public", "own", "batch", "critic"] = "public"


class PG(Settings):
    """DP-PG: g_u = Σ_t Â_t ∇ log π(a_t|s_t), clipped to S.

    Attributes:
        clip_norm: S.
        advantage: Â.
        log_barrier: λ of He & Zhou's J_λ, for ``tabular`` policies.
    """

    name: Literal["pg"] = "pg"
    clip_norm: PositiveFloat = 1.0
    advantage: Advantage = Advantage()
    log_barrier: Annotated[float, Field(ge=0)] = 0.0


class NPG(Settings):
    """DP-NPG: w ≈ argmin E (Â − w·φ)², φ = ∇ log π(a_t|s_t), by a PrivLS oracle; θ ← θ + η w.

    A user's loss is the mean over its steps, so that a user is one term of the sum.

    Attributes:
        clip_norm: B, the bound on ‖φ‖.
        advantage: Â.
        target_bound: Â is clipped to ± this.
        radius: W; ‖w‖ ≤ W.
        oracle: ``sufficient-statistics``, ``projected-sgd`` or ``improper-batch-sgd``.
        steps: J of the last two.
        step_size: of the last two.
        ridge: of ``sufficient-statistics``.
        damping: of ``sufficient-statistics``. A nearly deterministic policy has hardly any Fisher
            information left; without damping w keeps its length there, and the policy its unrest.
        gain: a user's contribution is so many times larger before it is clipped to what the oracle
            allows: a mean over many steps is far smaller than the worst case that bounds it.
    """

    name: Literal["npg"] = "npg"
    clip_norm: PositiveFloat = 1.0
    advantage: Advantage = Advantage()
    target_bound: PositiveFloat = 1.0
    radius: PositiveFloat = 1.0
    oracle: Literal["sufficient-statistics", "projected-sgd", "improper-batch-sgd"] = (
        "sufficient-statistics"
    )
    steps: PositiveInt = 1
    step_size: PositiveFloat = 1.0
    ridge: PositiveFloat = 1.0
    damping: Annotated[float, Field(ge=0)] = 0.0
    gain: PositiveFloat = 1.0


class PGPE(Settings):
    """Parameter-exploring policy gradient (Sehnke et al. 2010) along public directions.

    Each round has K public, orthogonal directions of norm σ√d, drawn afresh. User u picks one and a
    sign at random, acts with θ ± it, and contributes ± clip((return − b)/c, ±1) in that one of K
    coordinates. The noise is that of K dimensions, not of d; the policy may be deterministic.

    Attributes:
        clip_norm: S.
        perturb: σ.
        directions: K; None takes d.
        center: the first b; later b follows the noised mean return.
        spread: c.
        share: the norm of the coordinate that releases the mean return, in units of S.
        momentum: of the running mean b.
    """

    name: Literal["pgpe"] = "pgpe"
    clip_norm: PositiveFloat = 1.0
    perturb: PositiveFloat = 0.1
    directions: PositiveInt | None = None
    center: float = 0.0
    spread: PositiveFloat = 1.0
    share: Annotated[float, Field(ge=0, lt=1)] = 0.3
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5

    def draw(self, rng: np.random.Generator, dimension: int) -> Array:
        """Return a round's directions, ``[K, d]``; public."""
        count = min(self.directions or dimension, dimension)
        basis, _ = np.linalg.qr(rng.normal(size=(dimension, count)))
        return np.asarray(self.perturb * math.sqrt(dimension) * basis.T)


class Privacy(Settings):
    """The budget; see :func:`dprlhf.privacy.plan.make_plan`.

    Attributes:
        epsilon: ε; ``inf`` for a non-private baseline. Or give ``noise_multiplier``.
        noise_multiplier: z.
        delta: δ.
        partition: how users are spread over rounds.
        adjacency: None takes the partition's own.
        participations: k.
    """

    epsilon: Annotated[float, Field(gt=0)] | None = None
    noise_multiplier: Annotated[float, Field(ge=0)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    partition: Partition = "random-allocation"
    adjacency: Adjacency | None = None
    participations: PositiveInt = 1


class ControlRecipe(Settings):
    """A control task.

    Attributes:
        environment: its name (:data:`dprlhf.papers.control.environments.ENVIRONMENTS`).
        users: N; a user is one trajectory.
        rounds: T.
        privacy: the budget.
        policy: what is trained.
        update: by what.
        optimizer: of what is released.
        evaluation_episodes: fresh simulated trajectories of the final policy.
        curve_episodes: the same, of the policies on the way.
        curve_points: how many of those.
    """

    environment: str
    users: PositiveInt = 1000
    rounds: PositiveInt = 100
    privacy: Privacy = Privacy(epsilon=3.0)
    policy: Policy = Policy()
    update: Annotated[PG | NPG | PGPE, Field(discriminator="name")] = PG()
    optimizer: Optimizer = Optimizer(name="sgd", learning_rate=1.0)
    evaluation_episodes: PositiveInt = 192
    curve_episodes: PositiveInt = 64
    curve_points: Annotated[int, Field(ge=0)] = 8

    @model_validator(mode="after")
    def _barrier_is_tabular(self) -> ControlRecipe:
        barrier = isinstance(self.update, PG) and self.update.log_barrier
        if barrier and self.policy.type != "tabular":
            raise ValueError("update.log_barrier is for policy.type tabular")
        return self

    @property
    def leak(self) -> str | None:
        """Why no ε holds for this recipe, if so."""
        advantage = getattr(self.update, "advantage", None)
        return LEAKS.get(advantage.baseline) if advantage is not None else None


def load(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ControlRecipe:
    """Read a YAML recipe; ``overrides`` maps dotted keys to values.

    Raises:
        DprlhfError: the file cannot be read, or a key or value is wrong.
    """
    try:
        settings = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise DprlhfError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise DprlhfError(f"{path}: not valid YAML: {one_line(error, None)}") from None
    return make(settings, overrides, str(path))


def make(
    settings: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    source: str = "recipe",
) -> ControlRecipe:
    """Validate settings.

    Raises:
        DprlhfError: a key or value is wrong.
    """
    tree: Any = _copy(settings)
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


def _copy(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _copy(value) for key, value in tree.items()}
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        return list(tree)
    return tree
