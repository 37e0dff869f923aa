"""The likelihood ratio of "this user took part" against "it did not", from released values."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dprlhf.privacy.plan import Plan

Array = NDArray[np.float64]


def log_likelihood_ratio(
    observed: Array,
    plan: Plan,
    known_round: NDArray[np.int64] | None = None,
    noise: float | None = None,
) -> Array:
    """Return log P(observed | took part) − log P(observed | did not), ``[users]``.

    Under replace-one, "did not" means that a user with the opposite vector took part instead.

    Args:
        observed: Released sum along the user's direction, in units of S and averaged over the
            round's J releases, ``[users, rounds]``: normal with standard deviation z/√J and mean
            1 in the user's rounds, 0 in the others.
        plan: Plan with the partition, z and J.
        known_round: Each user's round, from 0, ``[users]``; −1 for a user without one. None: the
            adversary only knows how rounds are drawn.
        noise: Standard deviation in place of z/√J, where a user moves a release by less than S.
    """
    noise = noise_of(plan) if noise is None else noise
    return _took_part(observed, noise, plan, known_round) - (
        _took_part(-observed, noise, plan, known_round) if plan.adjacency == "replace-one" else 0.0
    )


def noise_of(plan: Plan) -> float:
    """Return z/√J, the noise of the mean of a round's releases; 1e-3/√J for a baseline, z = 0."""
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
