"""A prediction of the reward from a plan's figures, in a formula with two or three constants.

A run of T rounds moves the policy by steps of length η_t, of which the share cos_t points along the
mean gradient (:mod:`dprlhf.training.choices`) and the rest is sampling error and noise. With the
distance D = Σ η_t cos_t along the gradient and W = Σ η_t²(1 − cos_t²) across it, the rise is

    A (1 − exp(−(uD)^q)) − ½ c u² W

with the most A that can be gained, the rate u, and the curvature c across the gradient in units of
that along it. Before anything is fitted, A = R − (the mean reward at the start), u = ‖∇J‖ / A from
the mean gradient on public prompts (so that the first steps gain η cos ‖∇J‖), and q = c = 1.
:func:`fit` replaces the constants by those of stand-in runs on public prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from dprlhf.errors import DprlhfError
from dprlhf.policies.optimizers import learning_rate
from dprlhf.privacy.plan import Plan
from dprlhf.recipe import Optimizer
from dprlhf.training.choices import Signal, averaged_norms, cosines

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Travel:
    """How far a run moves the policy, after each round.

    Attributes:
        cosines: Expected cosine between each step and the mean gradient, ``[rounds]``.
        along: D, the distance along the mean gradient, ``[rounds]``.
        across: W, the sum of squared distances across it, ``[rounds]``.
    """

    cosines: Array
    along: Array
    across: Array


def travel(plan: Plan, signal: Signal, optimizer: Optimizer, clip_norm: float) -> Travel:
    """Return how far a run is expected to move the policy.

    A step of ``normalized-sgd`` is η long. One of ``sgd`` is η times the averaged release's norm,
    over 1 − μ. One of Adam is taken to be η√d times the averaged release's norm over that of a
    single one: exact where all coordinates have the same variance, as they have under noise.

    Args:
        plan: The run's plan.
        signal: The users' contributions.
        optimizer: The server-side optimizer.
        clip_norm: The clip norm S, which ``sgd`` steps are proportional to.
    """
    momentum = optimizer.betas[0] if optimizer.name.startswith("adam") else optimizer.momentum
    cos, norms = cosines(plan, signal, momentum), averaged_norms(plan, signal, momentum)
    rates = np.array([learning_rate(optimizer, t + 1, plan.rounds) for t in range(plan.rounds)])
    if optimizer.name == "sgd":
        rates = rates * clip_norm * norms * (1 - momentum ** np.arange(1, plan.rounds + 1))
        rates = rates / (1 - momentum)
    elif optimizer.name != "normalized-sgd":
        rates = rates * signal.dimension**0.5 * norms / averaged_norms(plan, signal)
    return Travel(cos, np.cumsum(rates * cos), np.cumsum(rates**2 * (1 - cos**2)))


@dataclass(frozen=True)
class RewardModel:
    """The constants of the prediction.

    Attributes:
        most: A, the most that the mean reward can rise.
        rate: u, per unit of distance along the gradient.
        power: q; above 1 where a run gains speed before it saturates.
        curvature: c, the curvature across the gradient.
    """

    most: float
    rate: float
    power: float = 1.0
    curvature: float = 1.0

    def rise(self, moved: Travel) -> Array:
        """Return the predicted rise of the mean reward after each round, ``[rounds]``."""
        gained = self.most * -np.expm1(-((self.rate * moved.along) ** self.power))
        found: Array = gained - 0.5 * self.curvature * self.rate**2 * moved.across
        return found


def before_fitting(signal: Signal, start: float, reward_range: float) -> RewardModel | None:
    """Return the constants without a fit; None where the mean gradient is not known, or is zero.

    Args:
        signal: The public users' contributions.
        start: Mean reward at the start, on public prompts.
        reward_range: The bound R on rewards.
    """
    most = reward_range - start
    if not signal.gradient or most <= 0:
        return None
    return RewardModel(most, signal.gradient / most)


@dataclass(frozen=True)
class Observation:
    """What a finished run on public prompts showed.

    Attributes:
        moved: How far it was expected to move the policy.
        rounds: Rounds after which the reward was measured, from 1, ``[points]``.
        rises: The rise of the mean reward after these rounds, ``[points]``.
    """

    moved: Travel
    rounds: Sequence[int]
    rises: Sequence[float]


_ERROR = 0.1  # the rise of a run differs from run to run by about this share of it


def fit(observations: Sequence[Observation], guess: RewardModel) -> RewardModel:
    """Return the constants that fit finished runs best, by least squares of relative errors.

    Errors are taken relative to the rise, but to no less than a quarter of the largest. Power and
    curvature are held near 1 where the runs do not say otherwise, by a prior of width 1.

    Args:
        observations: The runs, on public prompts.
        guess: Where the search starts.

    Raises:
        DprlhfError: There are fewer observations than constants, or in none the reward rose.
    """
    seen = [np.asarray(o.rises, dtype=float) for o in observations]
    at = [np.asarray(o.rounds) - 1 for o in observations]
    largest = max((float(rises.max()) for rises in seen if len(rises)), default=0.0)
    if largest <= 0 or sum(map(len, seen)) < 4:
        raise DprlhfError("pilot runs: the public reward did not rise, so nothing can be predicted")
    scales = [_ERROR * np.maximum(rises, largest / 4) for rises in seen]

    def model_of(values: Array) -> RewardModel:
        most, rate, power, curvature = values
        return RewardModel(math.exp(most), math.exp(rate), power, curvature)

    def errors(values: Array) -> Array:
        model = model_of(values)
        parts = [
            (model.rise(o.moved)[rounds] - rises) / scale
            for o, rounds, rises, scale in zip(observations, at, seen, scales, strict=True)
        ]
        prior = [values[2] - 1, values[3] - 1]
        return np.concatenate([*parts, prior])

    distance = max(float(o.moved.along[-1]) for o in observations)
    start = [math.log(1.2 * largest), math.log(1 / distance), 1.0, 1.0]
    if guess.rate > 0:
        start[1] = max(start[1] - 3, min(start[1] + 3, math.log(guess.rate)))
    bounds = [math.log(largest / 2), start[1] - 6, 0.5, 0.0], [
        math.log(10 * largest), start[1] + 6, 4.0, 10.0,
    ]  # fmt: skip
    found = least_squares(errors, start, bounds=bounds)
    return model_of(found.x)
