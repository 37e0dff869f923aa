"""Which users belong to which round.

The partition is drawn from the run's secret key: under random allocation and Poisson sampling the
stated ε holds only as long as nobody learns who was in which round.
"""

from __future__ import annotations

from functools import partial

from dprlhf.boundary import Private
from dprlhf.privacy.partitions.base import Allocation
from dprlhf.privacy.plan import Plan
from dprlhf.privacy.randomness import uint64_stream

__all__ = ["Allocation", "allocate"]


def allocate(plan: Plan, key: bytes) -> Private[Allocation]:
    """Draw the partition of ``plan.users`` users into ``plan.rounds`` rounds.

    - ``random-allocation``: each user draws its round uniformly from 1..T, independently of all
      others; with k participations, one round from each of k blocks of T/k rounds.
    - ``fixed``: a random permutation cut into rounds of exactly m users; the rest stay out.
    - ``stream``: in order of arrival, every m users make a round; the rest stay out.
    - ``poisson``: each user joins each round independently with probability k/T.
    """
    stream = partial(uint64_stream, key, "allocation")
    draw = plan.mechanism.spec.draw
    return Private(draw(plan.users, plan.rounds, plan.participations, stream))
