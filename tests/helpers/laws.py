"""Tests of what random numbers should be distributed like."""

import math

import numpy as np
from numpy.typing import NDArray
from scipy import stats


def is_standard_normal(x: NDArray[np.float64]) -> bool:
    """Test law, mean, variance, skewness, kurtosis and both tails, each at level 1e-4."""
    n = len(x)
    low, high = stats.chi2.ppf([5e-5, 1 - 5e-5], n - 1)
    beyond = np.array([(x > 3).sum(), (x < -3).sum(), (np.abs(x) > 4).sum()])
    expected = np.array([stats.norm.sf(3), stats.norm.sf(3), 2 * stats.norm.sf(4)]) * n
    return bool(
        low < (n - 1) * x.var(ddof=1) < high
        and abs(x.mean()) * math.sqrt(n) < 3.9
        and np.all(np.abs(beyond - expected) < 3.9 * np.sqrt(expected))
        and stats.kstest(x, "norm").pvalue > 1e-4
        and abs(stats.skew(x)) < 3.9 * math.sqrt(6 / n)
        and abs(stats.kurtosis(x)) < 3.9 * math.sqrt(24 / n)
    )
