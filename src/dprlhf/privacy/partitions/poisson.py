"""Poisson sampling: each user joins each round independently with probability q = k/T.

The accountant is dp-accounting's privacy loss distribution (PLD) of the Poisson-subsampled Gaussian
mechanism, composed over the rounds.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dprlhf.errors import DprlhfError
from dprlhf.privacy.curves import FFT_ERROR, composed
from dprlhf.privacy.gaussian import gaussian_epsilon, noise_too_small
from dprlhf.privacy.partitions.base import (
    Allocation,
    Array,
    Pair,
    PartitionSpec,
    Stream,
    Terms,
    half_noise,
    round_noise,
    single_curve,
)
from dprlhf.privacy.random_allocation import Side

_POINTS = 200_000
"""Most points of the grid of losses; with little noise a fixed step would take minutes."""

_LEAST_LOWER_DELTA = 1e-11
"""Below it, the rounding of the library's sums is as large as δ, and no lower bound is stated."""
_DRAWS_AT_ONCE = 2**16


def _check(terms: Terms) -> None:
    if terms.adjacency == "replace-one":
        raise DprlhfError(
            "partition poisson does not carry adjacency replace-one: use adjacency "
            "zero-out, or partition random-allocation"
        )


def _draw(users: int, rounds: int, participations: int, stream: Stream) -> Allocation:
    """Draw each (round, user) pair independently with probability q = k/T.

    Only the joins are drawn, about kN of them, not all T·N pairs: between two joins lie a
    geometric number of pairs left out, ⌊ln U / ln(1 − q)⌋ with U uniform. U has 64 bits, so that
    a pair's probability, whatever came before it, is q to about 2⁻⁵², as it would be if a uniform
    number were compared with q.
    """
    probability = participations / rounds
    rate = -math.log1p(-probability) if probability < 1 else math.inf
    pairs, last = rounds * users, -1
    at_once = min(_DRAWS_AT_ONCE, pairs + 1)  # each takes a pair or more
    joins: list[NDArray[np.int64]] = []
    while last < pairs:
        draws = stream(len(joins), count=at_once)
        gaps = -np.log((draws.astype(np.float64) + 0.5) * 2.0**-64) / rate
        # A gap beyond all pairs is cut there, so that no sum leaves int64.
        found = last + np.cumsum(np.minimum(gaps, pairs).astype(np.int64) + 1)
        last = int(found[-1])
        joins.append(found[: np.searchsorted(found, pairs)])
    taken = np.concatenate(joins)
    starts = np.searchsorted(taken, users * np.arange(rounds + 1))
    return Allocation(taken % users, starts)


def loss_distribution(terms: Terms, *, pessimistic: bool = True, rough: bool = False) -> Any:
    """Return the privacy loss distribution of a whole run, of dp-accounting.

    Args:
        terms: The run.
        pessimistic: True rounds losses up, for an upper bound on ε; False rounds them down.
        rough: Use a grid ten times as coarse.
    """
    z = round_noise(terms)
    z = min(z, 1e100)  # the library squares it; both bounds on epsilon are 0 from here on
    rate = terms.participations / terms.rounds
    return _composed(z, rate, terms.rounds, pessimistic, 1e-3 if rough else 1e-4)


@functools.lru_cache(maxsize=2)  # one is a second's work, and a run asks for its two several times
def _composed(z: float, rate: float, rounds: int, pessimistic: bool, interval: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution

    reach = (10 + 0.5 / z) / z  # the losses that the library keeps; a coarser grid rounds up more
    one = privacy_loss_distribution.from_gaussian_mechanism(
        z,
        sampling_prob=rate,
        pessimistic_estimate=pessimistic,
        use_connect_dots=pessimistic,  # the library has no optimistic connect-the-dots
        value_discretization_interval=max(interval, reach / _POINTS),
    )
    if not pessimistic:
        return one.self_compose(rounds)
    sides = (composed(side, rounds) for side in (one._pmf_remove, one._pmf_add))
    return privacy_loss_distribution.PrivacyLossDistribution(*sides)


def _epsilon(terms: Terms, delta: float, single: float) -> tuple[float, float]:
    if noise_too_small(round_noise(terms), delta):
        return single, 0.0
    upper = float(loss_distribution(terms).get_epsilon_for_delta(delta))
    if delta < _LEAST_LOWER_DELTA:
        return upper, 0.0
    more = delta + terms.rounds * FFT_ERROR
    lower = float(loss_distribution(terms, pessimistic=False).get_epsilon_for_delta(more))
    return upper, lower


def _delta(terms: Terms, epsilon: float, single: float, rough: bool) -> float:
    if noise_too_small(round_noise(terms), 1e-9):
        return single
    return float(loss_distribution(terms, rough=rough).get_delta_for_epsilon(epsilon))


def _curve(terms: Terms, epsilons: Any, side: Side) -> Array:
    """Return the larger δ of both sides: the library's distribution covers both."""
    single = single_curve(half_noise(terms, terms.rounds), epsilons)
    sampled = loss_distribution(terms).get_delta_for_epsilon(list(epsilons))
    lower: Array = np.minimum(single, sampled)
    return lower


def _reach(terms: Terms, tail: float, side: Side) -> float:
    single = gaussian_epsilon(half_noise(terms, terms.rounds), tail)
    # Less than what FFTs may round is no loss's probability; what lies beyond is counted as it is.
    tail = max(tail, 2 * terms.rounds * FFT_ERROR)
    return min(single, float(loss_distribution(terms).get_epsilon_for_delta(tail)))


def _log_likelihood(of_round: Array, participations: int) -> Array:
    q = participations / of_round.shape[1]
    joined = np.logaddexp(math.log(q) + of_round, np.log1p(-q) if q < 1 else -np.inf)
    total: Array = joined.sum(1)
    return total


POISSON = PartitionSpec(
    accountant="privacy loss distribution of the Poisson-sampled Gaussian mechanism "
    "(dp-accounting)",
    assumption="each user joins each round independently with probability participations / rounds, "
    "and membership stays secret",
    check=_check,
    draw=_draw,
    epsilon=_epsilon,
    delta=_delta,
    pair=Pair(_curve, _reach),
    log_likelihood=_log_likelihood,
    independent_rounds=True,
)
"""Each user joins each round independently, k rounds on average."""
