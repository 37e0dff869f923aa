"""What a whole run costs: epsilon from the noise multiplier, and the noise multiplier from epsilon.

A run is described as data by :class:`Mechanism`; :func:`epsilon`, :func:`noise_multiplier` and
:func:`delta_of` are plain functions of it. Every epsilon and delta is an upper bound. Each
partition's own accounting is in its file in :mod:`dprlhf.privacy.partitions`.

===================  ================================  ==========================================
partition            adjacency                         accountant
===================  ================================  ==========================================
random-allocation    zero-out, add-remove              exact curves of random allocation
random-allocation    replace-one                       exact curve of a replacement, composed
                                                       over the passes
fixed, stream        zero-out, replace-one             one Gaussian with sensitivity S or 2S
poisson              zero-out, add-remove              PLD of the Poisson-sampled Gaussian
===================  ================================  ==========================================

A run publishes its number of users and is therefore planned under zero-out or replace-one;
add-remove is for calculations (:func:`dprlhf.privacy.plan.check_promise`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dprlhf.errors import DprlhfError
from dprlhf.privacy.gaussian import (
    find_root,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_noise_multiplier,
)
from dprlhf.privacy.partitions import Partition
from dprlhf.privacy.partitions.base import Mechanism, without_noise
from dprlhf.privacy.relations import DEFAULT_ADJACENCY, Adjacency

__all__ = [
    "Adjacency",
    "Mechanism",
    "Partition",
    "PrivacyCost",
    "delta_of",
    "epsilon",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_noise_multiplier",
    "noise_multiplier",
]

_ROUNDING = 1e-6


def equal_but_for_rounding(one: Any, other: Any) -> bool:
    """Return whether two values are equal, floats up to a millionth of their size.

    The accountant's last digits differ between processors and between versions of NumPy.
    """
    numbers = all(isinstance(value, int | float) for value in (one, other))
    if numbers and float in (type(one), type(other)):
        return math.isclose(one, other, rel_tol=_ROUNDING)
    return bool(one == other)


@dataclass(frozen=True)
class PrivacyCost:
    """A privacy cost.

    Attributes:
        epsilon: an upper bound; 0 where delta alone covers the loss, infinite where it overflows.
        epsilon_lower: no smaller epsilon than this can be claimed by a tighter analysis.
        delta: the delta that it was computed at.
        accountant: the method, in words.
        assumptions: what must hold for the number to mean anything.
    """

    epsilon: float
    epsilon_lower: float
    delta: float
    accountant: str
    assumptions: tuple[str, ...]


_LARGEST = 1e6
"""The largest epsilon that noise is searched for: far past any privacy, and within all floats."""


def epsilon(mechanism: Mechanism, delta: float) -> PrivacyCost:
    """Return the cost of a run at ``delta``: an upper bound on ε with a certified lower bound.

    Raises:
        DprlhfError: ``delta`` is not inside (0, 1), or there is no noise.

    >>> cost = epsilon(Mechanism(noise_multiplier=1.0, rounds=100), delta=1e-5)
    >>> f"{cost.epsilon:.3f}"
    '0.621'
    """
    _check_delta(delta)
    _check_noise(mechanism)
    return _cost(mechanism, delta)


def delta_of(mechanism: Mechanism, epsilon: float) -> float:
    """Return an upper bound on delta at ``epsilon >= 0``.

    Raises:
        DprlhfError: ``epsilon`` is negative or not a number, or there is no noise.
    """
    if not epsilon >= 0:
        raise DprlhfError(f"epsilon must be at least 0, not {epsilon}")
    _check_noise(mechanism)
    if math.isinf(mechanism.noise_multiplier) or math.isinf(epsilon):
        return 0.0
    return _delta(mechanism, epsilon, rough=False)


def noise_multiplier(
    epsilon: float,
    delta: float,
    *,
    rounds: int,
    partition: Partition = "random-allocation",
    adjacency: Adjacency = DEFAULT_ADJACENCY,
    participations: int = 1,
    releases_per_round: int = 1,
    bands: int = 1,
) -> tuple[float, PrivacyCost]:
    """Return the smallest noise multiplier found whose cost is at most ``epsilon``, and its cost.

    At ordinary ε and δ the answer is within about 1e-4 (relative) of the smallest; its cost is
    computed by :func:`epsilon` and never exceeds the ``epsilon`` that was asked for.

    Raises:
        DprlhfError: a value is out of range, or the partition does not carry the adjacency.

    >>> z, cost = noise_multiplier(1.0, 1e-5, rounds=100)
    >>> f"{z:.3f}", cost.epsilon <= 1.0
    ('0.873', True)
    """
    if not 0 < epsilon <= _LARGEST:
        raise DprlhfError(f"epsilon must be a positive number up to {_LARGEST:g}, not {epsilon}")
    _check_delta(delta)

    def with_noise(z: float) -> Mechanism:
        return Mechanism(z, rounds, partition, adjacency, participations, releases_per_round, bands)

    def rough(z: float) -> float:
        return _delta(with_noise(z), epsilon, rough=True)

    one = gaussian_noise_multiplier(epsilon, delta)
    high = one / single_noise(with_noise(1.0))
    propose = with_noise(1.0).spec.noise
    if propose is not None:
        z = propose(with_noise(1.0), epsilon, delta, high)
    else:
        low = high / 2
        # Enough noise makes even epsilon 0 cost less than delta, so `low` exists only above zero.
        while low > 1e-3 * one and rough(low) <= delta:
            low, high = low / 2, low
        z = find_root(
            lambda z: _delta(with_noise(z), epsilon, rough=False), low, high, delta, rough=rough
        )
    for _ in range(50):
        cost = _cost(with_noise(z), delta)
        if cost.epsilon <= epsilon:
            return z, cost
        z *= 1 + 1e-5 + 0.5 * (cost.epsilon / epsilon - 1)
    raise DprlhfError(f"no noise multiplier was found for epsilon {epsilon} at delta {delta}")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise DprlhfError(f"delta must be above 0 and below 1, not {delta}")


def _check_noise(mechanism: Mechanism) -> None:
    if mechanism.noise_multiplier == 0:
        raise without_noise(mechanism.noise_multiplier)


def _cost(mechanism: Mechanism, delta: float) -> PrivacyCost:
    upper, lower = _epsilon(mechanism, delta)
    sensitivity = "2S" if mechanism.adjacency == "replace-one" else "S"
    assumptions = (
        "each user's contribution to a round has L2 norm at most the clip norm S, so that one "
        f"user moves a released sum by at most {sensitivity} ({mechanism.adjacency})",
        mechanism.spec.assumption,
        "released sums are divided by a public constant, never by the realised batch size",
        "nothing computed from users leaves the run except through the noised sums",
    )
    return PrivacyCost(upper, min(lower, upper), delta, mechanism.spec.accountant, assumptions)


def single_noise(mechanism: Mechanism) -> float:
    """Return the noise of one Gaussian that covers the run if batch membership were known."""
    everywhere = mechanism.spec.independent_rounds  # a user may be in every round
    taken = mechanism.rounds if everywhere else mechanism.participations
    z = mechanism.noise_multiplier / math.sqrt(mechanism.releases_per_round * taken)
    return z / 2 if mechanism.adjacency == "replace-one" else z


def covering_noise(mechanisms: Sequence[Mechanism]) -> float:
    """Return the noise multiplier of the Gaussian release that costs as much as all these runs.

    Each run is bounded by one Gaussian release; z⁻² of the composition is the sum of theirs.
    """
    noises = [single_noise(m) for m in mechanisms]
    least = min(noises)  # divided out: the square of a tiny noise is no floating-point number
    if math.isinf(least):
        return math.inf
    return least / math.sqrt(sum((least / z) ** 2 for z in noises))


def _epsilon(mechanism: Mechanism, delta: float) -> tuple[float, float]:
    """Return an upper and a lower bound on ε."""
    if math.isinf(mechanism.noise_multiplier):
        return 0.0, 0.0
    single = gaussian_epsilon(single_noise(mechanism), delta)
    upper, lower = mechanism.spec.epsilon(mechanism, delta, single)
    return min(single, upper), lower


def _delta(mechanism: Mechanism, epsilon: float, rough: bool) -> float:
    single = gaussian_delta(single_noise(mechanism), epsilon)
    if single < 1e-200:
        return single
    return min(single, mechanism.spec.delta(mechanism, epsilon, single, rough))
