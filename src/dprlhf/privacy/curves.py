"""Privacy curves on both sides, and what follows from them: replacements, loss distributions.

A curve is an upper bound on δ as a function of ε. The side ``remove`` compares the run with a user
to the run without it, ``add`` the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from dprlhf.privacy.random_allocation import Side

SIDES: tuple[Side, Side] = ("remove", "add")

FFT_ERROR = 1e-15
"""What the FFTs of dp-accounting may move a δ by, for each mechanism that is composed: a hundred
times the largest error found against exact Gaussians (``random_allocation_accounting.md``)."""


@dataclass(frozen=True)
class Curves:
    """Upper bounds on both sides' privacy curves, and their inverses."""

    delta: Callable[[float, Side, bool], float]  # of epsilon, side, rough
    epsilon: Callable[[float, Side], float]  # of delta, side


def loss_distribution(step: float, curve: Any, opposite: Any) -> Any:
    """Return a pessimistic loss distribution of a mechanism whose privacy curve is known on a grid.

    The curve is joined by chords in e^epsilon, which lie above the convex true curve ("connect the
    dots", Doroshenko et al., arXiv 2207.04380).

    Args:
        step: Spacing of the grid 0, step, 2 step, ... of epsilons.
        curve: upper bounds on delta there, against the neighbour, ``[points]``.
        opposite: the same with the two neighbours exchanged, on a grid of its own length.
    """
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


def composed(losses: Any, times: int) -> Any:
    """Return the pessimistic loss distribution of ``times`` equal mechanisms.

    What the library's FFTs round counts as probability of an infinite loss, so that no ε is stated
    for a δ that is smaller than their error.

    Args:
        losses: The pessimistic distribution of one, of dp-accounting.
        times: Number of mechanisms.
    """
    from dp_accounting.pld import pld_pmf

    found = losses.self_compose(times).to_dense_pmf()
    infinite = min(1.0, found._infinity_mass + times * FFT_ERROR)
    return pld_pmf.DensePLDPmf(
        found._discretization, found._lower_loss, found._probs, infinite, True
    )


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


def replace_one_delta(curves: Curves, epsilon: float, rough: bool) -> float:
    """Smallest delta_remove(e1) + e^e1 delta_add(e2) found with e1 + e2 = epsilon; at most 1."""
    if epsilon > 500:
        return 1.0

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
