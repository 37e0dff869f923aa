"""Which users belong to which round.

The partition is drawn from the run's secret key: under random allocation and Poisson sampling the
stated ε holds only as long as nobody learns who was in which round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dprlhf.boundary import Private
from dprlhf.privacy.plan import Plan
from dprlhf.privacy.randomness import uint64_stream

_DRAWS_AT_ONCE = 2**16


@dataclass(frozen=True)
class Allocation:
    """Users in the order of their rounds: memory linear in users × participations.

    Attributes:
        order: user indices sorted by round, ``[users × participations]``.
        starts: where round t begins in ``order``, ``[rounds + 1]`` (round t is entry t − 1).
    """

    order: NDArray[np.int64]
    starts: NDArray[np.int64]

    def round(self, round_: int) -> NDArray[np.int64]:
        """Return the users of round t = 1..T."""
        return self.order[self.starts[round_ - 1] : self.starts[round_]]


def allocate(plan: Plan, key: bytes) -> Private[Allocation]:
    """Draw the partition of ``plan.users`` users into ``plan.rounds`` rounds.

    - ``random-allocation``: each user draws its round uniformly from 1..T, independently of all
      others; with k participations, one round from each of k blocks of T/k rounds.
    - ``fixed``: a random permutation cut into rounds of exactly m users; the rest stay out.
    - ``stream``: in order of arrival, every m users make a round; the rest stay out.
    - ``poisson``: each user joins each round independently with probability k/T.
    """
    return Private(_DRAW[plan.partition](plan, key))


def _random_allocation(plan: Plan, key: bytes) -> Allocation:
    blocks = plan.participations
    size = plan.rounds // blocks
    draws = uint64_stream(key, "allocation", count=plan.users * blocks).reshape(blocks, plan.users)
    # The remainder's bias is below T/2⁶⁴.
    rounds = (draws % np.uint64(size)).astype(np.int64) + size * np.arange(blocks)[:, None]
    users = np.broadcast_to(np.arange(plan.users), rounds.shape)
    return _sorted_by_round(rounds.ravel(), users.ravel(), plan.rounds)


def _fixed(plan: Plan, key: bytes) -> Allocation:
    permutation = np.argsort(uint64_stream(key, "allocation", count=plan.users), kind="stable")
    return _cut(permutation, plan)


def _stream(plan: Plan, key: bytes) -> Allocation:
    return _cut(np.arange(plan.users), plan)


def _poisson(plan: Plan, key: bytes) -> Allocation:
    """Draw each (round, user) pair independently with probability q = k/T.

    Only the joins are drawn, about kN of them, not all T·N pairs: between two joins lie a
    geometric number of pairs left out, ⌊ln U / ln(1 − q)⌋ with U uniform. U has 64 bits, so that
    a pair's probability, whatever came before it, is q to about 2⁻⁵², as it would be if a uniform
    number were compared with q.
    """
    probability = plan.participations / plan.rounds
    rate = -math.log1p(-probability) if probability < 1 else math.inf
    pairs, last = plan.rounds * plan.users, -1
    joins: list[NDArray[np.int64]] = []
    while last < pairs:
        draws = uint64_stream(key, "allocation", len(joins), count=_DRAWS_AT_ONCE)
        gaps = -np.log((draws.astype(np.float64) + 0.5) * 2.0**-64) / rate
        # A gap beyond all pairs is cut there, so that no sum leaves int64.
        found = last + np.cumsum(np.minimum(gaps, pairs).astype(np.int64) + 1)
        last = int(found[-1])
        joins.append(found[: np.searchsorted(found, pairs)])
    taken = np.concatenate(joins)
    starts = np.searchsorted(taken, plan.users * np.arange(plan.rounds + 1))
    return Allocation(taken % plan.users, starts)


def _cut(order: NDArray[np.int64], plan: Plan) -> Allocation:
    size = plan.users // plan.rounds
    starts = size * np.arange(plan.rounds + 1)
    return Allocation(order[: starts[-1]].astype(np.int64), starts)


def _sorted_by_round(rounds: NDArray[np.int64], users: NDArray[np.int64], count: int) -> Allocation:
    order = np.argsort(rounds, kind="stable")
    starts = np.searchsorted(rounds[order], np.arange(count + 1))
    return Allocation(users[order], starts)


_DRAW = {
    "random-allocation": _random_allocation,
    "fixed": _fixed,
    "stream": _stream,
    "poisson": _poisson,
}
