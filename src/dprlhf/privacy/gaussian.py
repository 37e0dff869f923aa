"""Exact (ε, δ) of the Gaussian mechanism, and the root finder that the accountants share."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import ROUND_CEILING, Context, Decimal

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import log_ndtr

_UNIT = 2.0**-53


def log_gaussian_delta(noise: float, epsilon: float) -> float:
    """Return ln of :func:`gaussian_delta`, rounded up; finite where δ itself underflows."""
    if math.isinf(noise):
        return -math.inf
    middle, half = epsilon * noise, 0.5 / noise
    if math.isinf(half):
        return 0.0
    first, second = float(log_ndtr(half - middle)), float(log_ndtr(-half - middle))
    if first == -math.inf:  # epsilon so large that the first term alone is below all floats
        return -math.inf
    error = 8 * _UNIT * (1 + abs(first) + abs(second) + epsilon)
    # Phi(a) - e^eps Phi(b) = Phi(a) (1 - exp(x)); x < 0 is lowered by its rounding error.
    x = min(epsilon + second - first, 0.0) - error
    return min(first + error + math.log(-math.expm1(x)), 0.0)


def gaussian_delta(noise: float, epsilon: float) -> float:
    """Return δ of one Gaussian release, rounded up (Balle & Wang 2018, Theorem 8).

    >>> f"{gaussian_delta(1.0, 1.0):.6f}"
    '0.126937'
    """
    return math.exp(log_gaussian_delta(noise, epsilon))


def gaussian_deltas(noise: float, epsilons: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return :func:`gaussian_delta` at many ε, of the same shape."""
    middle, half = epsilons * noise, 0.5 / noise
    if math.isinf(half) or math.isinf(noise):
        return np.full(epsilons.shape, float(math.isinf(half)))
    first, second = log_ndtr(half - middle), log_ndtr(-half - middle)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = 8 * _UNIT * (1 + np.abs(first) + np.abs(second) + epsilons)
        x = np.minimum(epsilons + second - first, 0.0) - error
        values = np.exp(np.minimum(first + error + np.log(-np.expm1(x)), 0.0))
    deltas: npt.NDArray[np.float64] = np.where(np.isfinite(first), values, 0.0)
    return deltas


def gaussian_epsilon(noise: float, delta: float) -> float:
    """Return ε of one Gaussian release at ``delta``, rounded up by at most 1e-8 relative.

    >>> f"{gaussian_epsilon(1.0, 1e-5):.4f}"
    '4.3772'
    """
    if gaussian_delta(noise, 0.0) <= delta:
        return 0.0
    if noise < 1e-150:
        return math.inf
    # By the tail bound Phi(-x) <= exp(-x²/2) this is enough, but for rounding.
    high = (0.5 / noise + math.sqrt(-2 * math.log(delta))) / noise
    while gaussian_delta(noise, high) > delta:
        high *= 2
    return find_root(lambda e: gaussian_delta(noise, e), 0.0, high, delta, tolerance=3e-9)


def gaussian_noise_multiplier(epsilon: float, delta: float) -> float:
    """Return the smallest noise multiplier with which one Gaussian release is (ε, δ)-DP.

    It is rounded up by at most 1e-8 relative.

    >>> f"{gaussian_noise_multiplier(1.0, 1e-5):.4f}"
    '3.7306'
    """
    low = high = 1.0
    while gaussian_delta(high, epsilon) > delta:
        high *= 2
    while gaussian_delta(low, epsilon) <= delta:
        low /= 2
    return find_root(lambda z: gaussian_delta(z, epsilon), low, high, delta, tolerance=3e-9)


def noise_too_small(z: float, delta: float) -> bool:
    """Return whether one round costs ε > 200, too much for the discretised accountants."""
    return gaussian_epsilon(z, delta) > 200


def upwards(value: float, digits: int) -> str:
    """Format an upper bound with ``digits`` significant digits, rounded up so that it stays one.

    >>> upwards(0.62141, 4), upwards(4.0, 4), upwards(1e-5, 3)
    ('0.6215', '4', '1e-05')
    """
    text = f"{value:.{digits}g}"
    if float(text) >= value:
        return text
    exact = Decimal(value)
    step = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    return f"{exact.quantize(step, ROUND_CEILING, Context(prec=400)):.{digits}g}"


def downwards(value: float, digits: int) -> str:
    """Format a lower bound with ``digits`` significant digits, rounded down, at least 0.

    >>> downwards(3.998904377, 4), downwards(4.0, 4)
    ('3.998', '4')
    """
    return upwards(-value, digits).removeprefix("-")


def find_root(
    value: Callable[[float], float],  # Function of x with values in [0, 1], such as δ(ε)
    low: float,
    high: float,
    target: float,
    *,
    rough: Callable[[float], float] | None = None,
    tolerance: float = 1e-5,
) -> float:
    """Return nearly the smallest x in [low, high] where decreasing ``value(x) <= target``."""
    # What is returned was evaluated and satisfies the bound, but for `high`, which is known to.
    goal = math.sqrt(-2 * math.log(target))

    def score(v: float) -> float:
        # Nearly linear in x where the loss is nearly Gaussian, so few steps are needed.
        return math.sqrt(-2 * math.log(min(max(v, 1e-300), 1.0))) - goal

    first = rough or value
    at_low, at_high = score(first(low)), score(first(high))
    if at_low >= 0:
        x = low
    elif at_high <= 0:
        x = high
    else:
        x = brentq(lambda x: score(first(x)), low, high, xtol=1e-300, rtol=max(tolerance, 1e-4))
    step = 1e-4 * x
    slope = (score(first(x + step)) - score(first(x))) / step if step else 0.0
    if slope <= 0:
        slope = (at_high - at_low) / (high - low)
    best, below = high, low
    for _ in range(40):
        here = score(value(x))
        if here >= 0:
            best = min(best, x)
            if here <= 2 * tolerance * slope * x:
                break
        else:
            below = max(below, x)
        if best - below <= 2 * tolerance * best:
            break
        guess = x - here / slope + 0.7 * tolerance * x
        inside = below < guess < best
        x = guess if inside else 0.5 * (below + best)
    return best
