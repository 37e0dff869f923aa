"""Poisson sampling: each user joins each round independently with probability q = k/T.

The accountant composes the exact privacy curve of one round, a Poisson-subsampled Gaussian, over
the rounds by its privacy loss distribution (PLD). Lower bounds are dp-accounting's.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from dprlhf.errors import DprlhfError
from dprlhf.privacy.gaussian import (
    find_root,
    gaussian_delta,
    gaussian_deltas,
    gaussian_epsilon,
    noise_too_small,
)
from dprlhf.privacy.losses import Composed, loss_distribution, widening
from dprlhf.privacy.partitions.base import (
    Allocation,
    Array,
    Mechanism,
    Pair,
    PartitionSpec,
    Stream,
    round_noise,
)
from dprlhf.privacy.random_allocation import SIDES, Side

_POINTS = 2**20
"""Most points of the window in which the sum of all rounds' losses lies."""
_LEAST_STEP = 2e-5
"""Least step: with little δ and many rounds, a finer one would take seconds."""
_TAIL = 1e-20
"""Probability of losses beyond the grid, over all rounds; they count as infinite."""
_ROUNDING = 1e-14
"""Allowance for rounding in one round's curve, where ε is moved before the Gaussian's is read."""

_LIBRARY_POINTS = 200_000
_FFT_ERROR = 1e-15
"""What dp-accounting's FFTs may move a δ by, for each round: a hundred times the largest error that
was found against exact Gaussians. It is allowed for in lower bounds."""
_LEAST_LOWER_DELTA = 1e-11
"""Below it, the rounding of the library's sums is as large as δ, and no lower bound is stated."""
_DRAWS_AT_ONCE = 2**16


def _check(terms: Mechanism) -> None:
    if terms.adjacency == "replace-one":
        raise DprlhfError(
            "partition poisson does not carry adjacency replace-one: use adjacency "
            "zero-out, or partition random-allocation"
        )


def _draw(users: int, rounds: int, participations: int, stream: Stream) -> Allocation:
    """Draw each (round, user) pair independently with probability q = k/T."""
    # Between two joins lie ⌊ln U / ln(1 − q)⌋ pairs left out, U uniform with 64 bits: a pair's
    # probability, whatever came before it, is q to about 2⁻⁵².
    probability = participations / rounds
    rate = -math.log1p(-probability) if probability < 1 else math.inf
    pairs, last = rounds * users, -1
    at_once = min(_DRAWS_AT_ONCE, pairs + 1)  # each takes a pair or more
    joins: list[NDArray[np.int64]] = []
    while last < pairs:
        draws = stream(len(joins), count=at_once)
        gaps = -np.log((draws.astype(np.float64) + 0.5) * 2.0**-64) / rate
        # A gap beyond all pairs is cut there, so that no sum leaves int64.
        positions = last + np.cumsum(np.minimum(gaps, pairs).astype(np.int64) + 1)
        last = int(positions[-1])
        joins.append(positions[: np.searchsorted(positions, pairs)])
    taken = np.concatenate(joins)
    starts = np.searchsorted(taken, users * np.arange(rounds + 1))
    return Allocation(taken % users, starts)


def _curve(terms: Mechanism, epsilons: Any, side: Side) -> Array:
    """Return the exact δ of one round at each ε ≥ 0, from the curve of the Gaussian."""
    # With c = e^ε and X the Gaussian's likelihood ratio under Q, the round's ratio is 1 − q + qX,
    # so E(1 − q + qX − c)₊ = q E(X − (c − 1 + q)/q)₊ and E(1 − c(1 − q + qX))₊ = a E(1 − cq X/a)₊
    # with a = 1 − c(1 − q).
    z, q, at = round_noise(terms), _rate(terms), np.asarray(epsilons, dtype=np.float64)
    if side == "remove":
        deltas: Array = q * gaussian_deltas(z, np.log1p(np.expm1(at) / q)) * (1 + _ROUNDING)
        return deltas
    a = q * np.exp(at) - np.expm1(at)
    with np.errstate(divide="ignore", invalid="ignore"):
        moved = np.where(a > 0, at + np.log(q / a), np.inf)
    values = gaussian_deltas(z, np.minimum(np.maximum(moved, 0.0), 1e6))
    deltas = np.where(a > 0, np.maximum(a, 0.0) * values, 0.0) * (1 + _ROUNDING)
    return deltas


def _rate(terms: Mechanism) -> float:
    return terms.participations / terms.rounds if terms.rate is None else terms.rate


def _reach(terms: Mechanism, tail: float, side: Side) -> float:
    """Return ε of one round at ``tail``."""
    z, q = round_noise(terms), _rate(terms)
    if tail >= q:
        return 0.0
    # The remove side's curve, inverted; the add side's is nowhere larger (and at most -ln(1 - q)).
    return math.log1p(q * math.expm1(gaussian_epsilon(z, tail / q)))


def _step(terms: Mechanism) -> float:
    """Return a step that is small beside one round's loss, if all rounds' sum then has a window."""
    z, q = round_noise(terms), _rate(terms)
    deviation = min(q * math.sqrt(math.expm1(min(z**-2, 700.0))), 1 / z)
    return max(_LEAST_STEP, deviation * max(0.02, 25 * math.sqrt(terms.rounds) / _POINTS))


@functools.lru_cache(8)  # a run's ε and its risk ask for the same
def losses(terms: Mechanism, rough: bool = False) -> dict[Side, Composed]:
    """Return the pessimistic privacy losses of a whole run, by side."""
    step = _step(terms) * (4 if rough else 1)
    places = widening(math.ceil(_reach(terms, _TAIL / terms.rounds, "remove") / step))
    curve = {side: _curve(terms, step * places, side) for side in SIDES}
    return {
        side: Composed(
            ((loss_distribution(step, curve[side], curve[other], places), terms.rounds),)
        )
        for side, other in (SIDES, SIDES[::-1])
    }


def _too_little_noise(terms: Mechanism) -> bool:
    return noise_too_small(round_noise(terms), 1e-5)  # whatever δ is: the grid does not follow it


def _of_known_joins(terms: Mechanism, epsilon: float) -> float:
    """Return a bound on δ that holds even if it is public which rounds a user joins."""
    # Given these, the run is one Gaussian release, and δ of a mixture is at most the mean. With so
    # little noise hardly anything is lost.
    rounds, q = terms.rounds, _rate(terms)
    least, most = max(1, int(binom.ppf(_TAIL, rounds, q))), int(binom.isf(_TAIL, rounds, q))
    joins = np.arange(least, max(least, most) + 1)
    shares = binom.pmf(joins, rounds, q)
    shares[0] = binom.cdf(least, rounds, q)  # fewer cost less
    each = [gaussian_delta(round_noise(terms) / math.sqrt(j), epsilon) for j in joins.tolist()]
    beyond = float(binom.sf(joins[-1], rounds, q))
    return min(1.0, (float(shares @ each) + beyond) * (1 + 1e-9))


def _epsilon(terms: Mechanism, delta: float, single: float) -> tuple[float, float]:
    if _too_little_noise(terms):
        if math.isinf(single):
            return single, 0.0
        return find_root(functools.partial(_of_known_joins, terms), 0.0, single, delta), 0.0
    loss = losses(terms)
    upper = loss["remove"].epsilon(delta, single)
    if loss["add"].delta(upper) > delta:
        upper = loss["add"].epsilon(delta, single)
    if delta < _LEAST_LOWER_DELTA:
        return upper, 0.0
    more = delta + terms.rounds * _FFT_ERROR
    z = min(round_noise(terms), 1e100)  # the library squares it; both bounds are 0 from here on
    return upper, float(_optimistic(z, _rate(terms), terms.rounds).get_epsilon_for_delta(more))


@functools.lru_cache(maxsize=2)  # one is a second's work, and a run asks for its two several times
def _optimistic(z: float, rate: float, rounds: int) -> Any:
    """Return dp-accounting's loss distribution of a run, rounded down."""
    from dp_accounting.pld import privacy_loss_distribution

    reach = (10 + 0.5 / z) / z  # the losses that the library keeps; a coarser grid rounds more
    one = privacy_loss_distribution.from_gaussian_mechanism(
        z,
        sampling_prob=rate,
        pessimistic_estimate=False,
        use_connect_dots=False,  # the library has no optimistic connect-the-dots
        value_discretization_interval=max(1e-4, reach / _LIBRARY_POINTS),
    )
    return one.self_compose(rounds)


def _delta(terms: Mechanism, epsilon: float, single: float, rough: bool) -> float:
    if _too_little_noise(terms):
        return min(single, _of_known_joins(terms, epsilon))
    return max(side.delta(epsilon) for side in losses(terms, rough).values())


def _log_likelihood(of_round: Array, participations: int) -> Array:
    q = participations / of_round.shape[1]
    joined = np.logaddexp(math.log(q) + of_round, np.log1p(-q) if q < 1 else -np.inf)
    total: Array = joined.sum(1)
    return total


POISSON = PartitionSpec(
    accountant="privacy loss distribution of the Poisson-sampled Gaussian mechanism",
    assumption="each user joins each round independently with probability participations / rounds, "
    "and membership stays secret",
    check=_check,
    draw=_draw,
    epsilon=_epsilon,
    delta=_delta,
    pair=Pair(_curve, _reach),
    factors=lambda terms: terms.rounds,
    step=_step,
    losses=losses,
    log_likelihood=_log_likelihood,
    independent_rounds=True,
)
"""Each user joins each round independently, k rounds on average."""
