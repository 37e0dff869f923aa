"""Tests of the gate's noise itself: its variance, its independence, and its repetitions.

The auditor knows each sum before the gate and each value after it, hence the noise, which the plan
says must be independent normal draws of standard deviation zS. No spread is estimated: a gate that
draws all its noise too small would hide behind its own estimate. Tests are one-sided: noise that is
larger than planned refutes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2, halfnorm, norm, poisson, t

from dprlhf.privacy.correlated_noise import square_root
from dprlhf.privacy.plan import Plan

Array = NDArray[np.float64]

_NEAR = 1e-6  # far above a grid that noise may be rounded to, far below the distance of two draws

SHARES = {
    "variance": 0.40,
    "release": 0.05,
    "coordinate": 0.05,
    "spread": 0.05,
    "between releases": 0.05,
    "within releases": 0.05,
    "repetitions": 0.05,
}
"""Share of the audit's error probability that each test of the noise may use; the attack has the
rest, so that all tests together keep the confidence (Bonferroni)."""

SENTENCES = {
    "variance": "the noise is smaller than planned",
    "release": "a release has less noise than planned",
    "coordinate": "a coordinate has less noise than planned",
    "spread": "too much of the noise is near zero",
    "between releases": "the noise of two releases is correlated",
    "within releases": "the noise of neighbouring coordinates or successive releases is correlated",
    "repetitions": "values of the noise are repeated",
}
"""What it means that a test fails, for reports."""


def in_units(noise: Sequence[Sequence[Array]], plan: Plan) -> list[Array]:
    """Return each release's noise as what must be independent standard normal draws."""
    # Noise that is correlated between rounds by design is multiplied by its matrix C.
    std = plan.noise_multiplier * plan.clip_norm  # what ε was computed for, not what was drawn
    if plan.bands == 1:
        return [release / std for round_ in noise for release in round_]
    root = square_root(plan.rounds, plan.bands)
    single = [round_[0] / std for round_ in noise]
    back = range(root.shape[1])
    return [
        np.sum([root[t, k] * single[t - k] for k in back if k <= t], axis=0)
        for t in range(len(single))
    ]


def noise_tests(draws: Sequence[Array]) -> dict[str, float]:
    """Return a p-value for each test in :data:`SHARES`."""
    length = min(len(release) for release in draws)
    table = np.stack([release[:length] for release in draws])  # [releases, coordinates]
    every = np.concatenate(draws)
    squares = [float(release @ release) for release in draws]
    of_release = [chi2.cdf(s, len(release)) for s, release in zip(squares, draws, strict=True)]
    return {
        "variance": float(chi2.cdf(sum(squares), len(every))),
        "release": _any(min(of_release), len(draws)),
        "coordinate": _any(float(chi2.cdf((table**2).sum(0).min(), len(table))), length),
        "spread": _spread(np.abs(every)),
        "between releases": _between(table),
        "within releases": _neighbours(table),
        "repetitions": _repetitions(every),
    }


def smallest_shortfall(count: int, level: float, probability: float) -> float:
    """Return by how much the noise must be too small for the variance test to see it.

    With noise of f times the planned standard deviation, the sum of n squares over f² is
    chi-squared with n degrees of freedom; this is 1 − f for the f at which the test fails with
    ``probability``.

    >>> round(smallest_shortfall(8000, 0.02, 0.95), 3)
    0.029
    """
    return float(1 - math.sqrt(chi2.ppf(level, count) / chi2.ppf(probability, count)))


def _any(smallest: float, count: int) -> float:
    """Return the p-value of the smallest of so many p-values (Bonferroni)."""
    return min(1.0, float(smallest) * count)


def _spread(sizes: Array) -> float:
    """Return the p-value of too many small values (Dvoretzky, Kiefer, Wolfowitz; Massart 1990)."""
    ordered = np.sort(sizes)
    above = np.arange(1, len(ordered) + 1) / len(ordered) - halfnorm.cdf(ordered)
    return float(math.exp(-2 * len(ordered) * max(0.0, float(above.max())) ** 2))


def _between(table: Array) -> float:
    """Return the p-value of the largest correlation of two releases, whatever their scale."""
    # r √((n − 1)/(1 − r²)) has Student's t distribution with n − 1 degrees of freedom.
    releases, count = table.shape
    if releases < 2 or count < 3:
        return 1.0
    lengths = np.linalg.norm(table, axis=1)
    unit = table / np.maximum(lengths, 1e-300)[:, None]
    cosines = np.abs(np.triu(unit @ unit.T, 1))
    r = min(float(cosines.max()), 1 - 1e-15)
    value = r * math.sqrt((count - 1) / (1 - r * r))
    return _any(2 * float(t.sf(value, count - 1)), releases * (releases - 1) // 2)


def _neighbours(table: Array) -> float:
    """Return the p-value of the correlation of neighbours: in a release, or of successive ones."""
    pairs = [(table[:, :-1], table[:, 1:]), (table[:-1], table[1:])]
    near = []
    for first, second in pairs:
        scale = math.sqrt(float((first**2).sum() * (second**2).sum()))
        if first.size >= 100 and scale > 0:
            r = float((first * second).sum()) / scale
            near.append(2 * float(norm.sf(abs(r) * math.sqrt(first.size))))
    return _any(min(near, default=1.0), 2)


def _repetitions(every: Array) -> float:
    """Return the p-value of the number of values that equal another one but for rounding."""
    # Two normal draws are within c with probability about c/√π; pairs among n are nearly Poisson.
    count = len(every)
    expected = count * (count - 1) / 2 * _NEAR / math.sqrt(math.pi)
    near = int((np.diff(np.sort(every)) <= _NEAR).sum())
    return float(poisson.sf(near - 1, expected)) if near else 1.0
