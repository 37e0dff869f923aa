"""Statistical bounds on ε from the successes of an attack, and on an attack from ε."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from dprlhf.errors import DprlhfError

_LARGEST = 100.0


def epsilon_lower_bound(m: int, r: int, v: int, delta: float, confidence: float = 0.95) -> float:
    """Return a lower bound on ε from one run (Steinke et al. 2023, arXiv 2305.08846, Theorem 5.2).

    Each of m canaries was included with probability 1/2, independently. An attack on the run's
    releases guessed for r of them whether they were included; v guesses were right. Under
    (ε, δ)-differential privacy, with q = 1/(1 + e^{-ε}), that many right guesses have probability
    at most p(ε) = P[Bin(r, q) ≥ v] + 2mδ max_{1≤i≤v} P[v > Bin(r, q) ≥ v − i] / i. The bound is
    the largest ε with p(ε) below 1 − confidence. The guesses may depend on all that was released;
    their number r must not depend on which canaries were included.

    >>> round(epsilon_lower_bound(1000, 100, 75, 1e-4), 3)
    0.673
    """
    check_confidence(confidence)
    low, high = 0.0, _LARGEST
    if chance_of_right(m, r, v, low, delta) >= 1 - confidence:
        return 0.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        likely = chance_of_right(m, r, v, middle, delta) >= 1 - confidence
        low, high = (low, middle) if likely else (middle, high)
    return low


def chance_of_right(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Return p(ε) of :func:`epsilon_lower_bound`: a bound on the chance of v right guesses.

    >>> round(chance_of_right(1000, 100, 75, 0.673, 1e-4), 3)
    0.05
    """
    if not 0 <= v <= r <= m:
        raise ValueError(f"{v} right of {r} guesses on {m} canaries")
    q = 1 / (1 + math.exp(-epsilon))
    below = binom.pmf(np.arange(v - 1, -1, -1), r, q).cumsum()  # P[v > Bin >= v - i]
    slack = float((below / np.arange(1, v + 1)).max(initial=0.0))
    return float(binom.sf(v - 1, r, q) + 2 * m * delta * slack)


def largest_tpr(fpr: NDArray[np.float64], epsilon: float, delta: float) -> NDArray[np.float64]:
    """Return the largest true-positive rate that (ε, δ) allows at false-positive rates."""
    # min(e^ε FPR + δ, 1 − e^{-ε} (1 − δ − FPR)) (Kairouz et al. 2015, arXiv 1311.0776).
    if math.isinf(epsilon):
        return np.ones_like(fpr)
    steep, flat = math.exp(epsilon) * fpr + delta, 1 - math.exp(-epsilon) * (1 - delta - fpr)
    return np.clip(np.minimum(steep, flat), 0.0, 1.0)


def check_confidence(confidence: object) -> None:
    """Refuse a confidence that is no probability, or at which nothing could be refuted."""
    if not (isinstance(confidence, int | float | np.floating) and 0 < confidence < 1):
        raise DprlhfError(
            f"confidence must be above 0 and below 1, such as 0.95, not {confidence!r}"
        )
