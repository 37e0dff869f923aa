"""The likelihood ratio of "this user took part" against "it did not", from released values."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dprlhf.privacy.plan import Plan

Array = NDArray[np.float64]


def log_likelihood_ratio(
    observed: Array, plan: Plan, known_round: NDArray[np.int64] | None = None
) -> Array:
    """Return log P(observed | took part) − log P(observed | did not), ``[users]``.

    Under replace-one, "did not" is "another one with the opposite vector did".

    Args:
        observed: the released sum along the user's direction in units of S, the mean over a round's
            releases: normal around 0, or around 1 in a round that the user takes part in, with
            standard deviation z/√J; ``[users, rounds]``.
        plan: the partition, z and J.
        known_round: the user's round from 0, where the adversary knows it; −1 where it has no
            round; ``[users]``. None: it only knows how rounds are drawn.
    """
    noise = noise_of(plan)
    return _took_part(observed, noise, plan, known_round) - (
        _took_part(-observed, noise, plan, known_round) if plan.adjacency == "replace-one" else 0.0
    )


def noise_of(plan: Plan) -> float:
    """Return z/√J, the noise of the mean of a round's releases; a baseline's is nearly nothing."""
    return (plan.noise_multiplier or 1e-3) / math.sqrt(plan.releases_per_round)


def _took_part(
    observed: Array, noise: float, plan: Plan, known_round: NDArray[np.int64] | None
) -> Array:
    """Return log P(observed | took part) − log P(observed | noise alone), ``[users]``."""
    of_round = (observed - 0.5) / noise**2
    if known_round is not None and (known_round >= 0).any():
        mine = of_round[np.arange(len(of_round)), known_round]
        return np.where(known_round >= 0, mine, 0.0)
    return plan.mechanism.spec.log_likelihood(of_round, plan.participations)
