"""The likelihood ratio of "this user took part" against "it did not", from released values."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dprlhf.privacy.correlated_noise import noise_matrix
from dprlhf.privacy.plan import Plan

Array = NDArray[np.float64]


def log_likelihood_ratio(
    observed: Array,  # [users, rounds]
    plan: Plan,
    known_round: NDArray[np.int64] | None = None,  # [users]
    noise: float | Array | None = None,  # a number, or [users, 1]
) -> Array:
    """Return log P(observed | took part) − log P(observed | did not), ``[users]``."""
    # Under replace-one, "did not": a user with the opposite vector took part instead.
    noise = noise_of(plan) if noise is None else noise
    return _took_part(observed, noise, plan, known_round) - (
        _took_part(-observed, noise, plan, known_round) if plan.adjacency == "replace-one" else 0.0
    )


def matched(observed: Array, plan: Plan) -> Array:
    """Return what one round's user moved in all releases together, ``[users, rounds]``."""
    # Releases r with noise C⁻¹ξ become Cᵀ C r: in the user's own round normal with deviation z and
    # mean 1, as with independent noise, because the columns of C have norm 1.
    if plan.bands == 1:
        return observed
    matrix = noise_matrix(plan.rounds, plan.bands)
    scores: Array = observed @ matrix.T @ matrix
    return scores


def noise_of(plan: Plan) -> float:
    """Return z/√J, the noise of the mean of a round's releases; 1e-3/√J for a baseline, z = 0."""
    return (plan.noise_multiplier or 1e-3) / math.sqrt(plan.releases_per_round)


def _took_part(
    observed: Array, noise: float | Array, plan: Plan, known_round: NDArray[np.int64] | None
) -> Array:
    """Return log P(observed | took part) − log P(observed | noise alone), ``[users]``."""
    of_round = (observed - 0.5) / noise**2
    if known_round is not None and (known_round >= 0).any():
        mine = of_round[np.arange(len(of_round)), known_round]
        return np.where(known_round >= 0, mine, 0.0)
    return plan.mechanism.spec.log_likelihood(of_round, plan.participations)
