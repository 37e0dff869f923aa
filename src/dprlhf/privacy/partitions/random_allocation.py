"""Random allocation: each user draws its own secret round, uniformly and independently.

With k participations, the rounds are k blocks of T/k, and a user draws one round from each. The
curve of one block is that of :mod:`dprlhf.privacy.random_allocation`; several are composed by
:mod:`dprlhf.privacy.composed_allocation`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dprlhf.errors import DprlhfError
from dprlhf.privacy import random_allocation as block
from dprlhf.privacy.gaussian import gaussian_delta, gaussian_epsilon, noise_too_small
from dprlhf.privacy.partitions.base import (
    Allocation,
    Array,
    Mechanism,
    Pair,
    PartitionSpec,
    Stream,
    one_round_each,
    round_noise,
)
from dprlhf.privacy.random_allocation import SIDES, Curves, Side

if TYPE_CHECKING:
    from dprlhf.privacy.losses import Composed


def check(terms: Mechanism) -> None:
    """Refuse rounds that are no multiple of the participations."""
    if terms.rounds % terms.participations:
        raise DprlhfError(
            f"rounds {terms.rounds} must be a multiple of participations "
            f"{terms.participations} with partition random-allocation"
        )


def draw(users: int, rounds: int, participations: int, stream: Stream) -> Allocation:
    """Draw each user's rounds, one from each block, independently of all other users."""
    size = rounds // participations
    draws = stream(count=users * participations)
    draws = draws.reshape(participations, users)
    # The remainder's bias is below T/2⁶⁴.
    blocks = np.arange(participations)[:, None]
    chosen = (draws % np.uint64(size)).astype(np.int64) + size * blocks
    owners = np.broadcast_to(np.arange(users), chosen.shape)
    order = np.argsort(chosen, axis=None, kind="stable")
    starts = np.searchsorted(chosen.ravel()[order], np.arange(rounds + 1))
    return Allocation(owners.ravel()[order], starts)


def _epsilon(terms: Mechanism, delta: float, single: float) -> tuple[float, float]:
    z, slots = round_noise(terms), _slots(terms)
    curves = _curves(terms, delta, rough=False)
    upper = curves.epsilon(delta, "remove")
    if curves.delta(upper, "add", False) > delta:
        upper = max(upper, curves.epsilon(delta, "add"))
    # One participation, and one user against none, cost no more than the run does.
    once = block.epsilon(z, slots, delta, "remove")
    lower = block.epsilon_lower(z, slots, delta, once)
    if terms.adjacency == "replace-one":
        from dprlhf.privacy import composed_allocation as composed
        from dprlhf.privacy import replaced_allocation as replaced

        zero_out, upper = upper, replaced.replace_one_epsilon(curves, delta)
        if terms.participations == 1:
            upper = replaced.epsilon(z, slots, delta, zero_out, upper)
        elif not noise_too_small(z, delta):
            upper = min(upper, composed.replaced_blocks(terms, rough=False).epsilon(delta, single))
    return upper, lower


def _delta(terms: Mechanism, epsilon: float, single: float, rough: bool) -> float:
    if terms.adjacency == "replace-one":
        from dprlhf.privacy import composed_allocation as composed
        from dprlhf.privacy import replaced_allocation as replaced

        z, direct = round_noise(terms), 1.0
        if terms.participations == 1:
            direct = replaced.delta(z, _slots(terms), epsilon, rough)
        elif not noise_too_small(z, 1e-9):
            direct = composed.replaced_blocks(terms, rough).delta(epsilon)
        if rough and direct < 1:
            return direct
        return min(direct, replaced.replace_one_delta(_curves(terms, None, rough), epsilon, rough))
    curves = _curves(terms, None, rough)
    return max(curves.delta(epsilon, "remove", rough), curves.delta(epsilon, "add", rough))


def _slots(terms: Mechanism) -> int:
    """Return the number of rounds in a block."""
    return terms.rounds // terms.participations


def _curves(terms: Mechanism, delta: float | None, rough: bool) -> Curves:
    """Return both sides' curves of the run: k one-out-of-T/k allocations, composed."""
    z, slots, times = round_noise(terms), _slots(terms), terms.participations
    if times == 1:
        precision = {False: block.FINE, True: block.ROUGH}
        return Curves(
            lambda e, side, rough: block.delta(z, slots, e, side, precision[rough]),
            lambda d, side: block.epsilon(z, slots, d, side),
        )
    single = z / math.sqrt(times)
    if noise_too_small(z, delta or 1e-9):
        return Curves(
            lambda e, side, rough: gaussian_delta(single, e),
            lambda d, side: gaussian_epsilon(single, d),
        )
    from dprlhf.privacy.composed_allocation import compose_blocks

    losses = compose_blocks(z, slots, times, rough)
    return Curves(
        lambda e, side, rough: losses[side].delta(e),
        lambda d, side: losses[side].epsilon(d, gaussian_epsilon(single, d)),
    )


def _losses(terms: Mechanism) -> dict[Side, Composed]:
    from dprlhf.privacy import composed_allocation as composed

    if terms.adjacency == "replace-one":
        return dict.fromkeys(SIDES, composed.replaced_blocks(terms, rough=False))
    z, slots = round_noise(terms), _slots(terms)
    return composed.compose_blocks(z, slots, terms.participations, rough=False)


def _replaced_curve(terms: Mechanism, epsilons: Any, side: Side) -> Array:
    from dprlhf.privacy import replaced_allocation as replaced

    return replaced.curve(round_noise(terms), _slots(terms), epsilons)


def _replaced_reach(terms: Mechanism, tail: float, side: Side) -> float:
    from dprlhf.privacy import replaced_allocation as replaced

    z = round_noise(terms)
    known = min(gaussian_epsilon(z / 2, tail), 300.0)  # a loss beyond counts as infinite
    return replaced.epsilon(z, _slots(terms), tail, 0.0, known, rough=True)


def _curve(terms: Mechanism, epsilons: Any, side: Side) -> Array:
    z, slots = round_noise(terms), _slots(terms)
    return np.array([block.delta(z, slots, e, side, block.MEDIUM) for e in epsilons])


def _reach(terms: Mechanism, tail: float, side: Side) -> float:
    return block.epsilon(round_noise(terms), _slots(terms), tail, side)


ASSUMPTION = (
    "each user draws its rounds uniformly and independently of all others, and the draw "
    "stays secret"
)

RANDOM_ALLOCATION = PartitionSpec(
    accountant="random allocation of the Gaussian mechanism (arXiv 2502.08202, Theorem 3.1), "
    "rigorous bounds on both privacy curves",
    assumption=ASSUMPTION,
    check=check,
    draw=draw,
    epsilon=_epsilon,
    delta=_delta,
    pair=Pair(_curve, _reach),
    replaced=Pair(_replaced_curve, _replaced_reach),
    log_likelihood=one_round_each,
    factors=lambda terms: terms.participations,
    losses=_losses,
)
"""Each user draws its round uniformly from 1..T; k participations, one in each block."""
