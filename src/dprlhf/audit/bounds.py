"""Lower bounds on ε from how often an attack was right, each with a confidence."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.special import ndtri
from scipy.stats import beta, binom

from dprlhf.privacy.gaussian import gaussian_epsilon

_LARGEST = 100.0


def epsilon_lower_bound(m: int, r: int, v: int, delta: float, confidence: float = 0.95) -> float:
    """Return what one run shows of ε (Steinke et al. 2023, arXiv 2305.08846, Theorem 5.2).

    m canaries were each included with probability 1/2, independently. An attack that saw what the
    run released guessed for r of them whether they were; v guesses were right. Under
    (ε, δ)-differential privacy, with q = 1/(1 + e^{-ε}), that many right guesses have probability
    at most p(ε) = P[Bin(r, q) ≥ v] + 2mδ max_{1≤i≤v} P[v > Bin(r, q) ≥ v − i] / i. The bound is
    the largest ε with p(ε) below 1 − confidence. The guesses may depend on all that was released;
    their number r must not depend on which canaries were included.

    >>> round(epsilon_lower_bound(1000, 100, 75, 1e-4), 3)
    0.673

    Args:
        m: canaries.
        r: guesses, at most m.
        v: right guesses, at most r.
        delta: δ of the claim.
        confidence: the bound is above the true ε with probability at most 1 − this.
    """
    if not 0 <= v <= r <= m:
        raise ValueError(f"{v} right of {r} guesses on {m} canaries")

    def likely(epsilon: float) -> bool:
        q = 1 / (1 + math.exp(-epsilon))
        below = binom.pmf(np.arange(v - 1, -1, -1), r, q).cumsum()  # P[v > Bin >= v - i]
        slack = float((below / np.arange(1, v + 1)).max(initial=0.0))
        return bool(binom.sf(v - 1, r, q) + 2 * m * delta * slack >= 1 - confidence)

    return _largest_refuted(likely)


def epsilon_from_errors(
    false_positives: int,
    false_negatives: int,
    runs: int,
    delta: float,
    confidence: float = 0.95,
) -> float:
    """Return what the errors of a distinguishing game show of ε, whatever the mechanism.

    Any attack on an (ε, δ)-private mechanism has FNR ≥ 1 − δ − e^ε FPR, and the same with the two
    exchanged (Kairouz et al. 2015, arXiv 1311.0776). Both rates are replaced by their upper
    Clopper-Pearson bounds, each at half of what the confidence leaves.

    Args:
        false_positives: How many of ``runs`` runs without the user were called positive.
        false_negatives: How many of ``runs`` runs with the user were called negative.
        runs: Number of runs with the user, and again as many without.
        delta: δ of the claim.
        confidence: as in :func:`epsilon_lower_bound`.
    """
    fpr, fnr = (_upper(n, runs, (1 + confidence) / 2) for n in (false_positives, false_negatives))
    gains = [math.log(max(1 - delta - a, 1e-300) / b) for a, b in ((fnr, fpr), (fpr, fnr))]
    return max(0.0, *gains)


def gaussian_epsilon_from_errors(
    false_positives: int,
    false_negatives: int,
    runs: int,
    delta: float,
    confidence: float = 0.95,
) -> float:
    """Return what the errors show of ε if the mechanism is a Gaussian (Nasr et al. 2023).

    arXiv 2302.07956, section 4: a μ-GDP mechanism has Φ⁻¹(1 − FPR) − Φ⁻¹(FNR) ≤ μ for every attack.
    With the upper Clopper-Pearson bounds that gives a lower bound on μ, and μ-GDP is exactly
    (ε, δ) with ε = gaussian_epsilon(1/μ, δ). Much tighter than :func:`epsilon_from_errors`, which
    has to see events as rare as δ; it says nothing of a mechanism that is not GDP.
    """
    fpr, fnr = (_upper(n, runs, (1 + confidence) / 2) for n in (false_positives, false_negatives))
    mu = float(ndtri(1 - fpr) - ndtri(fnr))
    return gaussian_epsilon(1 / mu, delta) if mu > 0 else 0.0


def _upper(count: int, trials: int, confidence: float) -> float:
    """Return the one-sided upper Clopper-Pearson bound on a rate."""
    return 1.0 if count == trials else float(beta.ppf(confidence, count + 1, trials - count))


def _largest_refuted(likely: Callable[[float], bool]) -> float:
    """Return the largest ε that is not likely, or 0; likely ε lie above all others."""
    low, high = 0.0, _LARGEST
    if likely(low):
        return 0.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (low, middle) if likely(middle) else (middle, high)
    return low
