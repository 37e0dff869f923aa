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
    """Which policy acts, and how it sees observations (:mod:`dprlhf.papers.control.policies`).

    Attributes:
        type: ``tabular``, ``log-linear`` or ``mlp`` for one of n actions (softmax), ``gaussian``
            for a vector of numbers.
        hidden: Units of the hidden layer of ``mlp`` and ``gaussian``; 0 makes the mean of
            ``gaussian`` a linear function of the observation.
        scale: Public constants that observations are multiplied by, ``[size]``; ``tabular`` takes
            none. A 0 hides that number of the observation; ``log-linear`` then has no parameters
            for it.
        levels: Public numbers that order the actions of ``log-linear``, ``[actions]``, for example
            ``[-1, 0, 1]`` for three torques: π(a|s) ∝ exp(level_a θ · x), one θ for all actions.
        shift: Public constants subtracted from observations before they are scaled, ``[size]``;
            ``gaussian`` only.
        std: Standard deviation σ of ``gaussian`` before ``spread`` scales it (its start, if
            ``learn_std``). 0 makes the policy deterministic, which only ``pgpe`` can train.
        learn_std: Whether log σ is trained with the mean.
        spread: Factor from the network's output to the action, in units of the action.
        center: Action of ``gaussian`` where the network's output is 0.
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
        """Return the policy for an environment's observations and actions.

        Raises:
            DprlhfError: the policy cannot serve the action space.
        """
        size, actions = environment.size, environment.actions
        self._check(environment)
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

    def _check(self, environment: Environment) -> None:
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


class Advantage(Settings):
    """Advantage of step t: Â_t = Σ_k γ^{k−t} (r_k − ρ), and −γ^{L−t} ρ/(1−γ) for an end at step L.

    This is the discounted return, compared with a reward of ρ at every step for ever. For CartPole
    with ρ = 1 it is the blame −γ^{L−t}/(1−γ) for a fall, and 0 in an episode that the time limit
    cut. γ and ρ are public, so each advantage depends on one user alone.

    Attributes:
        discount: Discount factor γ.
        reference: Reference reward ρ, subtracted from the reward of every step.
        baseline: ``public`` subtracts nothing else; ``own`` subtracts the mean over the user's own
            steps. ``batch`` normalises over all users of a round, ``critic`` subtracts a linear
            value function fitted, without noise, to earlier rounds: both as in the papers' own
            runs, and both not private.
    """

    discount: Annotated[float, Field(ge=0, lt=1)] = 0.99
    reference: float = 0.0
    baseline: Literal["public", "own", "batch", "critic"] = "public"


class PG(Settings):
    """DP-PG on trajectories: a user contributes Σ_t Â_t ∇ log π(a_t|s_t), clipped to S.

    Attributes:
        clip_norm: L2 bound S on a user's contribution.
        advantage: How the advantages Â_t are computed from rewards.
        log_barrier: Strength λ of the log-barrier regularizer in He & Zhou's J_λ (equation 10), for
            ``tabular`` policies.
    """

    name: Literal["pg"] = "pg"
    clip_norm: PositiveFloat = 1.0
    advantage: Advantage = Advantage()
    log_barrier: Annotated[float, Field(ge=0)] = 0.0


class NPG(Settings):
    """DP-NPG on trajectories: regress Â_t on φ_t = ∇ log π(a_t|s_t), and step along the solution w.

    A user's loss is the mean over its steps of (w · φ_t − Â_t)², so that a user is one term of the
    sum however long its trajectory.

    Attributes:
        clip_norm: Bound B on ‖φ_t‖; longer scores are scaled down to it.
        advantage: How the advantages Â_t are computed from rewards.
        target_bound: Bound R on the targets; Â_t is clipped to [−R, R].
        radius: Bound W on ‖w‖.
        oracle: Private least squares: ``sufficient-statistics``, ``projected-sgd`` or
            ``improper-batch-sgd``.
        steps: Number J of noised gradients that the two gradient oracles release in a round.
        step_size: Step of the two gradient oracles, in units of 1/B².
        ridge: Regularization of ``sufficient-statistics``, in units of what its noise asks for.
        damping: Added to every eigenvalue by ``sufficient-statistics``, in units of B². A nearly
            deterministic policy has hardly any Fisher information left; without damping ‖w‖ stays
            large there, and the policy never settles.
        gain: Factor on a user's mean over its steps before it is clipped to the oracle's bound; the
            released mean is divided by it. A mean over many steps is far smaller than the worst
            case that bounds it, so a gain buys less noise for some clipping.
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
        clip_norm: L2 bound S on a user's contribution.
        perturb: Scale σ of the perturbations, for each parameter.
        directions: Number K of directions in a round; None takes the policy's dimension d.
        center: Baseline return b of the first round; later b follows the noised mean return.
        spread: Unit c of returns: a return c above b, or more, contributes 1.
        share: L2 bound of the extra coordinate that releases the mean return, as a share of S; 0
            leaves it out, and b stays at ``center``.
        momentum: Weight of the old b when a released mean return moves it.
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
    """The privacy budget, as :func:`dprlhf.privacy.plan.make_plan` takes it.

    Attributes:
        epsilon: Privacy loss ε; ``inf`` for a non-private baseline. Give this or
            ``noise_multiplier``.
        noise_multiplier: Noise multiplier z, the standard deviation of the noise over the clip
            norm.
        delta: Failure probability δ of the (ε, δ) guarantee.
        partition: How users are assigned to rounds.
        adjacency: What makes two data sets neighbours; None takes zero-out.
        participations: Number k of rounds that a user takes part in.
    """

    epsilon: Annotated[float, Field(gt=0)] | None = None
    noise_multiplier: Annotated[float, Field(ge=0)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    partition: Partition = "random-allocation"
    adjacency: Adjacency | None = None
    participations: PositiveInt = 1


class ControlRecipe(Settings):
    """The settings of a run on a control task, one YAML file of ``recipes/control``.

    Attributes:
        environment: Name of the task (:data:`dprlhf.papers.control.environments.ENVIRONMENTS`).
        users: Number N of users; a user is one trajectory.
        rounds: Number T of rounds.
        privacy: The privacy budget.
        policy: The policy that is trained.
        update: The algorithm: ``pg``, ``npg`` or ``pgpe``.
        optimizer: The server-side optimizer, which steps along what each round releases.
        evaluation_episodes: Fresh simulated trajectories that evaluate the final policy.
        curve_episodes: Fresh simulated trajectories for each point of the learning curve.
        curve_points: Number of points of the learning curve.
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
        """Why no ε holds for this recipe; None where one does."""
        advantage = getattr(self.update, "advantage", None)
        return LEAKS.get(advantage.baseline) if advantage is not None else None


def load(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ControlRecipe:
    """Read a YAML recipe; ``overrides`` maps dotted keys to values that replace the file's.

    Raises:
        DprlhfError: the file cannot be read, or a key or value is wrong.
    """
    try:
        settings = yaml.safe_load(Path(path).read_text("utf-8"))
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
    """Check settings and return them as a recipe.

    Args:
        settings: What the YAML file holds.
        overrides: Dotted keys and the values that replace those of ``settings``.
        source: What an error message names as its origin.

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
