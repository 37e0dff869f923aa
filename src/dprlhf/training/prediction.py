"""A prediction of the reward from a plan's figures, which ranks plans.

A run of T rounds moves the policy by steps of length η_t, of which the share cos_t points along the
mean gradient (:mod:`dprlhf.training.choices`) and the rest is sampling error and noise. With the
distance D = Σ η_t cos_t along the gradient and W = Σ η_t²(1 − cos_t²) across it, the rise is

    A (1 − exp(−uD)) − ½ u² W

with the most A that can be gained and the rate u: A = R − (the mean reward at the start), and
u = ‖∇J‖ / A from the mean gradient on public prompts, so that the first steps gain η cos ‖∇J‖. The
curvature across the gradient is taken to be that along it. How far the prediction was from finished
runs is in ``docs/planning.md``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dprlhf.policies.optimizers import learning_rate
from dprlhf.privacy.plan import Plan
from dprlhf.recipe import Optimizer
from dprlhf.recipe.sections import BETAS
from dprlhf.training.choices import Signal, averaged_norms, cosines

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Travel:
    """How far a run moves the policy, after each round."""

    cosines: Array  # Expected cosine between each step and the mean gradient, [rounds]
    along: Array  # D, the distance along the mean gradient, [rounds]
    across: Array  # W, the sum of squared distances across it, [rounds]


def travel(plan: Plan, signal: Signal, optimizer: Optimizer, clip_norm: float) -> Travel:
    """Return how far a run is expected to move the policy.

    A step of ``normalized-sgd`` is η long. One of ``sgd`` is η times the averaged release's norm,
    over 1 − μ. One of Adam is taken to be η√d times the averaged release's norm over that of a
    single one, with the number d of trained parameters: exact where each coordinate keeps its
    variance, as it does under noise, in a subspace for as long as its directions stay.
    """
    momentum = BETAS[0] if optimizer.name.startswith("adam") else optimizer.momentum
    cos, norms = cosines(plan, signal, momentum), averaged_norms(plan, signal, momentum)
    rates = np.array([learning_rate(optimizer, t + 1, plan.rounds) for t in range(plan.rounds)])
    if optimizer.name == "sgd":
        rates = (
            rates
            * clip_norm
            / signal.scale
            * norms
            * (1 - momentum ** np.arange(1, plan.rounds + 1))
        )
        rates = rates / (1 - momentum)
    elif optimizer.name != "normalized-sgd":
        moved = signal.trained or signal.dimension
        rates = rates * moved**0.5 * norms / averaged_norms(plan, signal)
    return Travel(cos, np.cumsum(rates * cos), np.cumsum(rates**2 * (1 - cos**2)))


@dataclass(frozen=True)
class RewardModel:
    """The constants of the prediction."""

    most: float  # A, the most that the mean reward can rise
    rate: float  # u, per unit of distance along the gradient

    def rise(self, moved: Travel) -> Array:
        """Return the predicted rise of the mean reward after each round, ``[rounds]``."""
        gained = self.most * -np.expm1(-self.rate * moved.along)
        rise: Array = gained - 0.5 * self.rate**2 * moved.across
        return rise


def reward_model(signal: Signal, start: float, reward_range: float) -> RewardModel | None:
    """Return the constants of the prediction; None without a mean gradient, or with zero."""
    most = reward_range - start
    if not signal.gradient or most <= 0:
        return None
    return RewardModel(most, signal.gradient / most)
