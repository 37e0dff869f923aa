"""What a whole run costs: epsilon from the noise multiplier, and the noise multiplier from epsilon.

A run is described as data by :class:`Mechanism`; :func:`epsilon`, :func:`noise_multiplier` and
:func:`delta_of` are plain functions of it. Every epsilon and delta is an upper bound.

===================  ================================  ==========================================
partition            adjacency                         accountant
===================  ================================  ==========================================
random-allocation    add-remove, zero-out              exact curves of random allocation
random-allocation    replace-one                       the smaller of one Gaussian with
                                                       sensitivity 2S and a two-step bound
fixed, stream        zero-out, replace-one             one Gaussian with sensitivity S or 2S
poisson              add-remove, zero-out              PLD of the Poisson-sampled Gaussian
===================  ================================  ==========================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from scipy.optimize import minimize_scalar

from dprlhf.errors import DprlhfError
from dprlhf.privacy import random_allocation
from dprlhf.privacy.gaussian import (
    find_root,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_noise_multiplier,
)
from dprlhf.privacy.random_allocation import Side
from dprlhf.privacy.relations import Adjacency, Partition

__all__ = [
    "Adjacency",
    "Epsilon",
    "Mechanism",
    "Partition",
    "delta_of",
    "epsilon",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_noise_multiplier",
    "noise_multiplier",
]


@dataclass(frozen=True)
class Mechanism:
    """What a whole run releases.

    Attributes:
        noise_multiplier: z, the noise standard deviation of the released sum divided by the clip
            norm S, under every adjacency (replace-one doubles the sensitivity, not z).
        rounds: T.
        partition: how users are spread over the rounds.
        adjacency: what a neighbouring dataset is.
        participations: k, the rounds of T that a user takes part in (poisson: on average).
        releases_per_round: J noisy sums per round over the same users, each with z.

    Raises:
        DprlhfError: a value is out of range, or the partition does not carry the adjacency.
    """

    noise_multiplier: float
    rounds: int
    partition: Partition = "random-allocation"
    adjacency: Adjacency = "add-remove"
    participations: int = 1
    releases_per_round: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be accounted for."""
        if not self.noise_multiplier > 0:
            raise DprlhfError(
                f"noise_multiplier must be above 0, not {self.noise_multiplier}: "
                "without noise there is no epsilon"
            )
        for name in ("rounds", "participations", "releases_per_round"):
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= 1):
                raise DprlhfError(f"{name} must be a whole number of at least 1, not {value}")
        if self.partition not in get_args(Partition):
            raise DprlhfError(
                f"partition {self.partition!r} is unknown: use one of {_names(Partition)}"
            )
        if self.adjacency not in get_args(Adjacency):
            raise DprlhfError(
                f"adjacency {self.adjacency!r} is unknown: use one of {_names(Adjacency)}"
            )
        if self.participations > self.rounds:
            raise DprlhfError(
                f"participations {self.participations} exceeds rounds {self.rounds}: "
                "a user takes part in a round at most once"
            )
        if self.partition in ("fixed", "stream"):
            if self.adjacency == "add-remove":
                raise DprlhfError(
                    f"partition {self.partition} does not carry adjacency add-remove, because "
                    "removing one user shifts every later batch: use adjacency zero-out or "
                    "replace-one, or partition random-allocation"
                )
            if self.participations != 1:
                raise DprlhfError(
                    f"participations must be 1 with partition {self.partition}, not "
                    f"{self.participations}: use partition random-allocation or poisson for "
                    "several passes"
                )
        if self.partition == "poisson" and self.adjacency == "replace-one":
            raise DprlhfError(
                "partition poisson does not carry adjacency replace-one: use adjacency "
                "add-remove, or partition random-allocation"
            )
        if self.partition == "random-allocation" and self.rounds % self.participations:
            raise DprlhfError(
                f"rounds {self.rounds} must be a multiple of participations "
                f"{self.participations} with partition random-allocation"
            )


@dataclass(frozen=True)
class Epsilon:
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

_POISSON_POINTS = 200_000
"""Of the grid of losses, at most; a fixed step would take minutes where there is little noise."""


def epsilon(mechanism: Mechanism, delta: float) -> Epsilon:
    """Return the cost of a run at ``delta``, as an upper bound with a certified lower bound.

    Raises:
        DprlhfError: ``delta`` is not inside (0, 1).

    >>> cost = epsilon(Mechanism(noise_multiplier=1.0, rounds=100), delta=1e-5)
    >>> f"{cost.epsilon:.3f}"
    '0.621'
    """
    _check_delta(delta)
    return _cost(mechanism, delta)


def delta_of(mechanism: Mechanism, epsilon: float) -> float:
    """Return an upper bound on delta at ``epsilon >= 0``.

    Raises:
        DprlhfError: ``epsilon`` is negative or not a number.
    """
    if not epsilon >= 0:
        raise DprlhfError(f"epsilon must be at least 0, not {epsilon}")
    if math.isinf(mechanism.noise_multiplier) or math.isinf(epsilon):
        return 0.0
    return _delta(mechanism, epsilon, rough=False)


def noise_multiplier(
    epsilon: float,
    delta: float,
    *,
    rounds: int,
    partition: Partition = "random-allocation",
    adjacency: Adjacency = "add-remove",
    participations: int = 1,
    releases_per_round: int = 1,
) -> tuple[float, Epsilon]:
    """Return the smallest noise multiplier found whose cost is at most ``epsilon``, and its cost.

    The answer is within about 1e-4 (relative) of the smallest; its cost is computed by
    :func:`epsilon` and never exceeds the ``epsilon`` that was asked for.

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
        return Mechanism(z, rounds, partition, adjacency, participations, releases_per_round)

    def rough(z: float) -> float:
        return _delta(with_noise(z), epsilon, rough=True)

    one = gaussian_noise_multiplier(epsilon, delta)
    high = one / single_noise(with_noise(1.0))
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


def _names(literal: Any) -> str:
    return ", ".join(get_args(literal))


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise DprlhfError(f"delta must be above 0 and below 1, not {delta}")


def _cost(mechanism: Mechanism, delta: float) -> Epsilon:
    upper, lower = _epsilon(mechanism, delta)
    accountant, assumption = _METHODS[mechanism.partition]
    sensitivity = "2S" if mechanism.adjacency == "replace-one" else "S"
    assumptions = (
        "each user's contribution to a round has L2 norm at most the clip norm S, so that one "
        f"user moves a released sum by at most {sensitivity} ({mechanism.adjacency})",
        assumption,
        "released sums are divided by a public constant, never by the realised batch size",
        "nothing computed from users leaves the run except through the noised sums",
    )
    return Epsilon(upper, min(lower, upper), delta, accountant, assumptions)


_METHODS: dict[Partition, tuple[str, str]] = {
    "random-allocation": (
        "random allocation of the Gaussian mechanism (arXiv 2502.08202, Theorem 3.1), rigorous "
        "bounds on both privacy curves",
        "each user draws its rounds uniformly and independently of all others, and the draw "
        "stays secret",
    ),
    "fixed": (
        "analytic Gaussian mechanism (Balle & Wang 2018), parallel composition over rounds",
        "batches are disjoint, and a user's slot does not depend on any other user's data",
    ),
    "stream": (
        "analytic Gaussian mechanism (Balle & Wang 2018), parallel composition over rounds",
        "batches are disjoint, and a user's place in the order does not depend on any other "
        "user's data",
    ),
    "poisson": (
        "privacy loss distribution of the Poisson-sampled Gaussian mechanism (dp-accounting)",
        "each user joins each round independently with probability participations / rounds, and "
        "membership stays secret",
    ),
}


def single_noise(mechanism: Mechanism) -> float:
    """Return the noise of one Gaussian that covers the run if batch membership were known."""
    taken = mechanism.rounds if mechanism.partition == "poisson" else mechanism.participations
    z = mechanism.noise_multiplier / math.sqrt(mechanism.releases_per_round * taken)
    return z / 2 if mechanism.adjacency == "replace-one" else z


def _epsilon(mechanism: Mechanism, delta: float) -> tuple[float, float]:
    """Upper and lower bound."""
    if math.isinf(mechanism.noise_multiplier):
        return 0.0, 0.0
    single = gaussian_epsilon(single_noise(mechanism), delta)
    if mechanism.partition in ("fixed", "stream"):
        return single, single * (1 - 1e-7)
    z = mechanism.noise_multiplier / math.sqrt(mechanism.releases_per_round)
    if mechanism.partition == "poisson":
        if noise_too_small(z, delta):
            return single, 0.0
        upper = float(poisson_distribution(mechanism).get_epsilon_for_delta(delta))
        lower = float(
            poisson_distribution(mechanism, pessimistic=False).get_epsilon_for_delta(delta)
        )
        return min(single, upper), lower
    rounds = mechanism.rounds // mechanism.participations
    curves = _allocation(z, rounds, mechanism.participations, delta, rough=False)
    upper = curves.epsilon(delta, "remove")
    if curves.delta(upper, "add", False) > delta:
        upper = max(upper, curves.epsilon(delta, "add"))
    # One participation, and one user against none, cost no more than the run does.
    once = random_allocation.epsilon(z, rounds, delta, "remove")
    lower = random_allocation.epsilon_lower(z, rounds, delta, once)
    if mechanism.adjacency == "replace-one":
        upper = replace_one_epsilon(curves, delta)
    return min(single, upper), lower


def _delta(mechanism: Mechanism, epsilon: float, rough: bool) -> float:
    single = gaussian_delta(single_noise(mechanism), epsilon)
    if mechanism.partition in ("fixed", "stream") or single < 1e-200:
        return single
    z = mechanism.noise_multiplier / math.sqrt(mechanism.releases_per_round)
    if mechanism.partition == "poisson":
        if noise_too_small(z, 1e-9):
            return single
        return min(
            single,
            float(poisson_distribution(mechanism, rough=rough).get_delta_for_epsilon(epsilon)),
        )
    rounds = mechanism.rounds // mechanism.participations
    curves = _allocation(z, rounds, mechanism.participations, None, rough)
    if mechanism.adjacency == "replace-one":
        return min(single, _replace_one_delta(curves, epsilon, rough))
    return min(
        single, max(curves.delta(epsilon, "remove", rough), curves.delta(epsilon, "add", rough))
    )


@dataclass(frozen=True)
class Curves:
    """Upper bounds on both sides' privacy curves, and their inverses."""

    delta: Callable[[float, Side, bool], float]  # of epsilon, side, rough
    epsilon: Callable[[float, Side], float]  # of delta, side


def _allocation(z: float, rounds: int, times: int, delta: float | None, rough: bool) -> Curves:
    """Curves of one-out-of-``rounds`` random allocation, composed ``times`` times."""
    if times == 1:
        precision = {False: random_allocation.FINE, True: random_allocation.ROUGH}
        return Curves(
            lambda e, side, rough: random_allocation.delta(z, rounds, e, side, precision[rough]),
            lambda d, side: random_allocation.epsilon(z, rounds, d, side),
        )
    single = z / math.sqrt(times)
    if noise_too_small(z, delta or 1e-9):
        return Curves(
            lambda e, side, rough: gaussian_delta(single, e),
            lambda d, side: gaussian_epsilon(single, d),
        )
    composed = _compose_allocation(z, rounds, times, rough)
    return Curves(
        lambda e, side, rough: float(composed[side].get_delta_for_epsilon(e)),
        lambda d, side: float(composed[side].get_epsilon_for_delta(d)),
    )


def noise_too_small(z: float, delta: float) -> bool:
    """Whether one round alone costs so much that no discretised accountant is of use."""
    return gaussian_epsilon(z, delta) > 200


def _compose_allocation(z: float, rounds: int, times: int, rough: bool) -> dict[Side, Any]:
    """Pessimistic loss distributions of ``times`` independent one-out-of-``rounds`` allocations."""
    import numpy as np

    sides: tuple[Side, Side] = ("remove", "add")
    points = 80 if rough else 400
    reach = {side: random_allocation.epsilon(z, rounds, 1e-12, side) for side in sides}
    step = max(max(reach.values()), 1e-6) / points
    last = {side: max(1, math.ceil(reach[side] / step)) for side in sides}
    curve = {
        side: np.array(
            [
                random_allocation.delta(z, rounds, i * step, side, random_allocation.MEDIUM)
                for i in range(last[side] + 1)
            ]
        )
        for side in sides
    }
    return {
        side: loss_distribution(step, curve[side], curve[other]).self_compose(times)
        for side, other in (sides, sides[::-1])
    }


def loss_distribution(step: float, curve: Any, opposite: Any) -> Any:
    """Return a pessimistic loss distribution of a mechanism whose privacy curve is known on a grid.

    The curve is joined by chords in e^epsilon, which lie above the convex true curve ("connect the
    dots", Doroshenko et al., arXiv 2207.04380).

    Args:
        step: of the grid 0, step, 2 step, ... of epsilons.
        curve: upper bounds on delta there, against the neighbour, ``[points]``.
        opposite: the same with the two neighbours exchanged, on a grid of its own length.
    """
    import numpy as np
    from dp_accounting.pld import pld_pmf

    # H_{e^-t}(P||Q) = 1 - e^-t + e^-t H_{e^t}(Q||P) gives the curve at negative epsilon.
    t = step * np.arange(len(opposite) - 1, 0, -1)
    negative = -np.expm1(-t) + np.exp(-t) * opposite[:0:-1]
    deltas = np.minimum(np.concatenate([negative, curve]), 1.0)
    rise, ratio = np.diff(deltas), math.expm1(step)
    masses = np.append(rise, 0.0) / ratio
    masses[1:] -= rise * (1 + 1 / ratio)
    masses[0] += 1 - deltas[0]
    # Rounding can leave masses of about -1e-16; raising them to zero only adds mass.
    return pld_pmf.DensePLDPmf(
        step, 1 - len(opposite), np.maximum(masses, 0.0), float(deltas[-1]), True
    )


def poisson_distribution(
    mechanism: Mechanism, *, pessimistic: bool = True, rough: bool = False
) -> Any:
    """Return the loss distribution of a run with Poisson-sampled rounds (of dp-accounting)."""
    from dp_accounting.pld import privacy_loss_distribution

    rate = mechanism.participations / mechanism.rounds
    z = mechanism.noise_multiplier / math.sqrt(mechanism.releases_per_round)
    z = min(z, 1e100)  # the library squares it; both bounds on epsilon are 0 from here on
    reach = (10 + 0.5 / z) / z  # the losses that the library keeps; a coarser grid rounds up more
    one = privacy_loss_distribution.from_gaussian_mechanism(
        z,
        sampling_prob=rate,
        pessimistic_estimate=pessimistic,
        use_connect_dots=pessimistic,  # the library has no optimistic connect-the-dots
        value_discretization_interval=max(1e-3 if rough else 1e-4, reach / _POISSON_POINTS),
    )
    return one.self_compose(mechanism.rounds)


def replace_one_epsilon(curves: Curves, delta: float) -> float:
    """Smallest e1 + e2 found with delta_remove(e1) + e^e1 delta_add(e2) <= delta."""
    best, share = math.inf, 0.5
    for _ in range(3):
        # The factor keeps the rounded sum of the two shares below delta.
        first = curves.epsilon(share * delta * (1 - 1e-12), "remove")
        rest = (1 - share) * delta * math.exp(-first) * (1 - 1e-12) if first < 500 else 0.0
        if rest < 1e-250:
            break
        second = curves.epsilon(rest, "add")
        best = min(best, first + second)
        # Where the log-curves have slopes a and b, the best odds are (1 + b) / a.
        odds = (1 + _slope(curves, second, "add")) / _slope(curves, first, "remove")
        share = min(max(odds / (1 + odds), 1e-3), 1 - 1e-3)
    return best


def _slope(curves: Curves, epsilon: float, side: Side) -> float:
    """How fast log delta falls with epsilon."""
    step = 1e-2 * epsilon + 1e-6
    near, far = (curves.delta(e, side, False) for e in (epsilon, epsilon + step))
    return max(math.log(max(near, 1e-290) / max(far, 1e-290)) / step, 1e-6)


def _replace_one_delta(curves: Curves, epsilon: float, rough: bool) -> float:
    """Smallest delta_remove(e1) + e^e1 delta_add(e2) found with e1 + e2 = epsilon."""

    def total(first: float, rough: bool) -> float:
        return curves.delta(first, "remove", rough) + math.exp(first) * curves.delta(
            epsilon - first, "add", rough
        )

    found = minimize_scalar(
        lambda share: math.log(max(total(share * epsilon, True), 1e-290)),
        bounds=(0.0, 1.0),
        method="bounded",
        options={"xatol": 3e-3},
    )
    return min(1.0, total(float(found.x) * epsilon, rough))
