"""Several passes of random allocation: the privacy losses of k blocks, composed.

The curve of one block is that of :mod:`dprlhf.privacy.random_allocation`, or where a user is
replaced by another that of :mod:`dprlhf.privacy.replaced_allocation`.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from dprlhf.privacy import random_allocation as block
from dprlhf.privacy.losses import POINTS, Composed, loss_distribution, widening
from dprlhf.privacy.partitions.base import Mechanism
from dprlhf.privacy.random_allocation import SIDES, Side

_TAIL = 1e-20
"""Probability of losses beyond the grid, over all passes; they count as infinite."""


@functools.lru_cache(8)  # a run's ε and its risk ask for the same
def compose_blocks(z: float, slots: int, times: int, rough: bool) -> dict[Side, Composed]:
    """Return pessimistic loss distributions of ``times`` one-out-of-``slots`` allocations."""
    points = POINTS / 5 if rough else POINTS
    reach = {side: block.epsilon(z, slots, _TAIL / times, side) for side in SIDES}
    step = max(max(reach.values()), 1e-6) / points
    places = {side: widening(math.ceil(reach[side] / step)) for side in SIDES}
    curve = {
        side: np.array([block.delta(z, slots, i * step, side, block.MEDIUM) for i in at])
        for side, at in places.items()
    }
    most = max(places.values(), key=len)
    return {
        side: Composed(((loss_distribution(step, curve[side], curve[other], most), times),))
        for side, other in (SIDES, SIDES[::-1])
    }


@functools.lru_cache(8)
def replaced_blocks(terms: Mechanism, rough: bool) -> Composed:
    """Return a pessimistic loss distribution of the run for a user replaced by another."""
    pair = terms.spec.replaced
    assert pair is not None
    points = POINTS // 5 if rough else POINTS
    tail = _TAIL / terms.participations
    step = max(pair.reach(terms, tail, "remove"), 1e-6) / points
    places = widening(points)
    curve = pair.curve(terms, step * places, "remove")
    return Composed(((loss_distribution(step, curve, curve, places), terms.participations),))
