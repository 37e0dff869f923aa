"""Privacy curves on both sides, and what follows from them for a user replaced by another.

A curve is an upper bound on δ as a function of ε. The side ``remove`` compares the run with a user
to the run without it, ``add`` the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar

from dprlhf.privacy.random_allocation import Side

SIDES: tuple[Side, Side] = ("remove", "add")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curves:
    """Upper bounds on both sides' privacy curves, and their inverses."""

    delta: Callable[[float, Side, bool], float]  # of epsilon, side, rough
    epsilon: Callable[[float, Side], float]  # of delta, side


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
