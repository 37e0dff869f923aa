"""Privacy cost of a run whose rounds are (ε₀, δ₀)-DP mechanisms other than the Gaussian.

The exponential mechanism is pure (δ₀ = 0); ISSP is (ε₀, δ₀)-DP. Each user takes part in one of T
rounds.
Every (ε₀, δ₀)-DP round is a post-processing of leaky randomised response, so the run is bounded by
random allocation of that, whose privacy curve is a finite sum: no grid, no FFT. Every ε and δ is an
upper bound. The proof is in ``docs/proofs/pure_allocation.md``.

===================  ================================  ==========================================
partition            adjacency                         accountant
===================  ================================  ==========================================
random-allocation    zero-out, add-remove              random allocation of randomised response
random-allocation    replace-one                       the smaller of two steps through the run
                                                       without the user, and both in one round
fixed, stream        zero-out, replace-one             randomised response, parallel composition
===================  ================================  ==========================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom

from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Adjacency, Epsilon, Partition
from dprlhf.privacy.gaussian import find_root
from dprlhf.privacy.random_allocation import Side
from dprlhf.privacy.relations import DEFAULT_ADJACENCY, check_adjacency

_ROUNDING = 1e-9
"""Relative margin added to every δ; the binomial weights are exact to about 1e-12."""

_LARGEST = 500.0
"""Largest ε₀ of a round; exp of it is a double, and its square is not from 355 on."""

_TAIL = 1e-40
"""Bound on the probability of more leaks than the sum enumerates; added to δ."""

_SIDES: tuple[Side, Side] = ("remove", "add")


@dataclass(frozen=True)
class Mechanism:
    """A run of T rounds, each (ε₀, δ₀)-DP for the users who take part in it.

    Attributes:
        epsilon: Cost ε₀ of one round to a user who takes part in it. With random allocation it
            holds when the user is added or removed; with fixed or stream, under ``adjacency``.
        rounds: Number T of rounds; each user takes part in one.
        partition: Assignment of users to rounds; any except ``poisson``.
        adjacency: Neighbouring relation between datasets.
        delta: Failure probability δ₀ of one round; 0 for a pure mechanism.

    Raises:
        DprlhfError: a value is out of range, or the partition does not carry the adjacency.
    """

    epsilon: float
    rounds: int
    partition: Partition = "random-allocation"
    adjacency: Adjacency = DEFAULT_ADJACENCY
    delta: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values and combinations that have no accountant."""
        if not 0 < self.epsilon <= _LARGEST:
            raise DprlhfError(
                f"epsilon of a round must be above 0 and at most {_LARGEST:g}, not {self.epsilon}"
            )
        if not (isinstance(self.rounds, int) and self.rounds >= 1):
            raise DprlhfError(f"rounds must be a whole number of at least 1, not {self.rounds}")
        if not 0 <= self.delta < 1:
            raise DprlhfError(f"delta of a round must be in [0, 1), not {self.delta}")
        if self.partition not in ("random-allocation", "fixed", "stream"):
            raise DprlhfError(
                f"partition {self.partition} has no accountant for pure mechanisms: use"
                " random-allocation, fixed or stream"
            )
        check_adjacency(self.adjacency)
        if self.partition != "random-allocation" and self.adjacency == "add-remove":
            raise DprlhfError(
                f"partition {self.partition} does not carry adjacency add-remove: use zero-out or"
                " replace-one, or partition random-allocation"
            )


def delta_of(mechanism: Mechanism, epsilon: float) -> float:
    """Return an upper bound on the run's δ at ``epsilon >= 0``.

    >>> delta_of(Mechanism(epsilon=1.0, rounds=1), 1.0)
    0.0

    Raises:
        DprlhfError: ``epsilon`` is negative or not a number.
    """
    if not epsilon >= 0:
        raise DprlhfError(f"epsilon must be at least 0, not {epsilon}")
    m = mechanism
    if m.partition != "random-allocation":
        return max(_allocation(m.epsilon, m.delta, 1, epsilon, side) for side in _SIDES)
    if m.adjacency != "replace-one":
        return max(_allocation(m.epsilon, m.delta, m.rounds, epsilon, side) for side in _SIDES)
    group = min(1.0, m.delta * (1 + math.exp(m.epsilon)))
    best = _both_in_one_round(m.epsilon, group, epsilon)
    for first in np.linspace(0, min(epsilon, m.epsilon), 101):  # any split is a bound
        removed = _allocation(m.epsilon, m.delta, m.rounds, first, "remove")
        added = _allocation(m.epsilon, m.delta, m.rounds, epsilon - first, "add")
        best = min(best, (removed + math.exp(first) * added) * (1 + _ROUNDING))
    return best


def epsilon(mechanism: Mechanism, delta: float) -> Epsilon:
    """Return an upper bound on the run's ε at ``delta``.

    For a pure mechanism ``delta`` may be 0; the run is then pure ε-DP as well.

    Raises:
        DprlhfError: ``delta`` is not in [0, 1), or is below the δ that δ₀ already spends.

    >>> epsilon(Mechanism(epsilon=1.0, rounds=16), delta=0.0).epsilon
    1.0
    >>> f"{epsilon(Mechanism(epsilon=1.0, rounds=100), delta=1e-5).epsilon:.3f}"
    '0.408'
    """
    if not 0 <= delta < 1:
        raise DprlhfError(f"delta must be in [0, 1), not {delta}")
    high = mechanism.epsilon
    if mechanism.partition == "random-allocation" and mechanism.adjacency == "replace-one":
        high *= 2
    floor = delta_of(mechanism, high)
    if delta < floor:
        raise DprlhfError(
            f"delta {delta} is below {floor:.3g}, which the delta of a single round already spends"
            f" (delta of a round: {mechanism.delta})"
        )
    if delta_of(mechanism, 0.0) <= delta:
        upper = 0.0
    elif delta == 0.0:
        upper = high
    else:
        upper = find_root(lambda e: delta_of(mechanism, e), 0.0, high, delta)
    sampled = mechanism.partition == "random-allocation"
    return Epsilon(
        upper,
        0.0,
        delta,
        "random allocation of randomised response, which dominates every such round"
        if sampled
        else "randomised response, which dominates every such round; parallel composition",
        (
            f"one round is ({mechanism.epsilon:g}, {mechanism.delta:g})-DP for a user who takes"
            " part in it",
            "each user draws its round uniformly and independently of all others, and the draw"
            " stays secret"
            if sampled
            else "batches are disjoint, and a user's slot does not depend on any other user's data",
            "nothing computed from users leaves the run except through these releases",
        ),
    )


def round_epsilon(
    epsilon_: float,
    delta: float,
    *,
    rounds: int,
    partition: Partition = "random-allocation",
    adjacency: Adjacency = DEFAULT_ADJACENCY,
    round_delta: float = 0.0,
) -> tuple[float, Epsilon]:
    """Return the largest ε₀ of a round (to 1e-6 relative) that keeps the run within ``epsilon_``.

    Args:
        epsilon_: Total ε of the run, above 0.
        delta: Total δ of the run, in [0, 1).
        rounds: Number T of rounds.
        partition: Assignment of users to rounds.
        adjacency: Neighbouring relation between datasets.
        round_delta: Failure probability δ₀ of one round.

    Returns:
        ε₀ and the cost of the run, computed by :func:`epsilon` and never above ``epsilon_``.

    Raises:
        DprlhfError: a value is out of range, or no ε₀ meets the target.

    >>> e0, cost = round_epsilon(1.0, 1e-5, rounds=100)
    >>> f"{e0:.2f}", cost.epsilon <= 1.0
    ('1.74', True)
    """
    if not (epsilon_ > 0 and math.isfinite(epsilon_)):
        raise DprlhfError(f"epsilon must be a positive number, not {epsilon_}")

    def affordable(e0: float) -> bool:
        return delta_of(Mechanism(e0, rounds, partition, adjacency, round_delta), epsilon_) <= delta

    low, high = 1e-6 * min(epsilon_, _LARGEST), min(epsilon_, _LARGEST)
    if not affordable(low):
        raise DprlhfError(
            f"no epsilon of a round gives epsilon {epsilon_} at delta {delta} when each round has"
            f" delta {round_delta}: raise delta, or lower the delta of a round"
        )
    while high < _LARGEST and affordable(high):
        low, high = high, min(2 * high, _LARGEST)
    while high - low > 1e-6 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if affordable(middle) else (low, middle)
    cost = epsilon(Mechanism(low, rounds, partition, adjacency, round_delta), delta)
    # The root finder may end a hair above epsilon_, where delta was evaluated too, and held.
    upper = min(cost.epsilon, epsilon_)
    return low, Epsilon(upper, 0.0, delta, cost.accountant, cost.assumptions)


def _both_in_one_round(e0: float, group: float, epsilon_: float) -> float:
    """Return δ of randomised response at 2ε₀, rounded up; its exponents alone may overflow.

    It is δ + (e^2ε₀ − e^ε)/(1 + e^2ε₀), and the quotient at most 1 − e^(ε − 2ε₀).
    """
    if epsilon_ >= 2 * e0:
        return group
    value = -math.expm1(epsilon_ - 2 * e0) / (1 + math.exp(-2 * e0))
    return min(1.0, group + (1 - group) * value * (1 + _ROUNDING))


def _allocation(e0: float, d0: float, rounds: int, epsilon_: float, side: Side) -> float:
    """Return δ of one-out-of-``rounds`` allocation of leaky randomised response, rounded up.

    Under Q (without the user) a round's likelihood ratio is 0 with probability δ₀, and otherwise
    e^ε₀ with probability 1/(1 + e^ε₀), else e^−ε₀; the run's ratio S is their mean. Under P the
    user's round reveals it with probability δ₀.
    """
    if epsilon_ >= e0:
        return d0  # given the user's round, the run is (ε₀, δ₀)-DP; mixing rounds keeps that
    up, down = math.exp(e0), math.exp(-e0)
    value = 0.0
    for zero in range(min(rounds, int(binom.isf(_TAIL, rounds, d0)) + 1 if d0 else 0) + 1):
        high = np.arange(rounds - zero + 1)
        ratio = (high * up + (rounds - zero - high) * down) / rounds
        if side == "remove":
            payoff = np.maximum(ratio - math.exp(epsilon_), 0.0)
        else:
            with np.errstate(over="ignore"):  # infinity, from a sum of 709 on: no payoff
                payoff = np.maximum(1 - math.exp(epsilon_) * ratio, 0.0)
        weight = binom.pmf(high, rounds - zero, down / (1 + down)) * binom.pmf(zero, rounds, d0)
        value += float(weight @ payoff)
    revealed = d0 if side == "remove" else 0.0
    return min(1.0, revealed + value * (1 + _ROUNDING) + (_TAIL if d0 else 0.0))
