"""A budget for plans that are chosen in view of earlier results: a privacy filter."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Mechanism, covering_noise, single_noise
from dprlhf.privacy.composition import CUT, factors_of, losses_of
from dprlhf.privacy.curves import SIDES
from dprlhf.privacy.gaussian import gaussian_noise_multiplier, noise_too_small
from dprlhf.privacy.losses import POINTS, Losses
from dprlhf.privacy.partitions.base import round_noise
from dprlhf.privacy.random_allocation import Side

_ORDERS = (1.2, 1.5, 2.0)
"""Orders of a budget's Rényi filters, less 1, in units of ln(1/δ)/ε. One Gaussian has its best
order at 2, and many amplified runs too; a single one, whose divergence rises steeply, below it."""
_GAUSSIAN_PART = 0.5
"""Share of a budget's δ for the filter of Gaussian releases; the orders divide the rest equally."""
_CUT_PART = 0.01
"""Share of a budget's δ that is set aside for losses beyond the grids, of a thousand runs."""
_LARGEST_EPSILON = 1e6
"""Above it the orders are next to 1, and a budget has the filter of Gaussian releases alone."""
_MOMENT_ERROR = 1e-9
"""Allowance for rounding in the logarithm of a moment: masses are differences of a curve's values,
with errors of 1e-16 of them over the square of the grid's step."""


def filter_share(times: Mapping[Mechanism, int], epsilon: float, delta: float) -> float:
    """Return how much of the budget (ε, δ) some runs take up, where plans may follow from results.

    This is a privacy filter: while the share of all runs is at most 1, all of them together are (ε,
    δ)-private, however each plan was chosen in view of earlier results
    (docs/proofs/composition.md). ε and δ must be fixed before the first run. A share below 1 states
    no smaller ε.
    """
    # The smallest share of several filters, among which δ is divided beforehand: z⁻² of the
    # Gaussian releases that cover the runs (Smith & Thakurta, arXiv 2210.17520), and Rényi
    # divergences, each at one order (Feldman & Zrnic, arXiv 2008.11193).
    if not times:
        return 0.0
    if len({mechanism.adjacency == "replace-one" for mechanism in times}) > 1:
        raise DprlhfError(
            "the runs protect against different neighbours, so there is no one statement for them"
            " together: give all the same privacy.adjacency"
        )
    noise = covering_noise([m for m, n in times.items() for _ in range(n)])
    ratio = gaussian_noise_multiplier(epsilon, _GAUSSIAN_PART * delta) / noise
    shares = [ratio * ratio]
    tails = {m: _tailed(m, CUT * delta) for m in times}
    cut = max(sum(n * tails[m][side][1] for m, n in times.items()) for side in SIDES)
    if cut <= _CUT_PART * delta and epsilon <= _LARGEST_EPSILON:
        part = (1 - _GAUSSIAN_PART - _CUT_PART) / len(_ORDERS) * delta
        for scale in _ORDERS:
            order = 1 - scale * math.log(part) / epsilon
            # E L^a = e^((a-1) D_a) and (L - e^eps)_+ <= L^a e^(-eps (a-1)) (1 - 1/a)^(a-1) / a.
            most = epsilon - math.log1p(-1 / order) + math.log(part * order) / (order - 1)
            spent = [sum(n * _renyi(m, order, tails[m][side][0]) for m, n in times.items())
                     for side in SIDES]  # fmt: skip
            shares.append(max(spent) / most)
    return min(shares)


@functools.lru_cache(256)
def _tailed(mechanism: Mechanism, tail: float) -> dict[Side, tuple[Losses | None, float]]:
    """Return one factor's losses by side, if known, and the δ of a run's infinite losses."""
    spec, factors = mechanism.spec, factors_of(mechanism)
    pair = spec.replaced if mechanism.adjacency == "replace-one" else spec.pair
    if spec.disjoint or pair is None or noise_too_small(round_noise(mechanism), tail / factors):
        return dict.fromkeys(SIDES, (None, 0.0))
    reach = {side: pair.reach(mechanism, tail / factors, side) for side in SIDES}
    own = None if spec.step is None else spec.step(mechanism)
    losses = losses_of(mechanism, pair, own or max(*reach.values(), 1e-6) / POINTS, reach)
    return {side: (one, factors * one.infinite) for side, one in losses.items()}


def _renyi(mechanism: Mechanism, order: float, losses: Losses | None) -> float:
    """Return an upper bound on the Rényi divergence of a run's finite losses at an order > 1."""
    # losses: those of one factor on one side; None takes the Gaussian that covers the run.
    noise = single_noise(mechanism)
    single = order / 2 / noise / noise
    if losses is None:
        return single
    log_moment = losses.log_moment(order - 1) + _MOMENT_ERROR
    return min(single, factors_of(mechanism) * max(log_moment, 0.0) / (order - 1))
