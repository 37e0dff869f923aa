"""The least noise at which no guess about one person does better than a recipe allows."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import brentq

from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Mechanism, single_noise
from dprlhf.privacy.plan import Plan, make_plan
from dprlhf.privacy.risk import risk

_TOLERANCE = 1e-3  # of a noise multiplier, as a share
_WIDEST = 12.0  # how far below the Gaussian's a noise multiplier is looked for, in logarithms
_NEAR = np.array([0.0, 0.02, 0.05, 0.1, 0.2, 0.4])


def plan_within(max_guess: float, *, delta: float, **settings: Any) -> Plan:
    """Return the plan with about the least noise at which no guess at even odds does better."""
    draft = make_plan(delta=delta, noise_multiplier=0.0, **settings)
    z = noise_multiplier(draft.mechanism, max_guess, delta)
    return make_plan(delta=delta, noise_multiplier=z, **settings)


@functools.lru_cache(64)  # a run asks for its plan more than once
def noise_multiplier(mechanism: Mechanism, max_guess: float, delta: float) -> float:
    """Return about the least noise multiplier at which no guess at even odds does better.

    A cheap estimate finds where to look, and :func:`risk` has the last word: its bound is at most
    ``max_guess`` at what is returned, and nearly as large.

    >>> noise_multiplier(Mechanism(0.0, 8, "fixed"), 0.6915, 1e-5) < 1.002
    True
    """
    if not 0.5 + 1e-5 < max_guess < 1:
        raise DprlhfError(f"max_guess must be above 0.50001 and below 1, not {max_guess}")
    wanted = _log_quantile(max_guess)
    tolerance = _TOLERANCE * (3 if mechanism.bands > 1 else 1)  # that curve is drawn

    @functools.cache
    def estimate(log_noise: float) -> float:
        return _likely_quantile(mechanism.with_noise(math.exp(log_noise))) - wanted

    # One Gaussian of noise 1/(2q) has this risk, and a Gaussian covers every mechanism.
    most = best = -wanted - math.log(2 * single_noise(mechanism.with_noise(1.0))) + tolerance
    below, target = most - _WIDEST, -tolerance  # of the estimate
    while best - below > 2 * tolerance:
        x = _crossing(estimate, target, below, most, tolerance / 4)
        x = x if below < x <= best else (below + best) / 2
        least = risk([mechanism.with_noise(math.exp(x))], delta).best_guess
        excess = _log_quantile(least) - wanted
        below, best = (below, x) if excess <= 0 else (x, best)
        if -3 * tolerance <= excess <= 0:
            break
        target = estimate(x) - excess - tolerance
    return math.exp(best)


def _crossing(
    falling: Callable[[float], float], target: float, low: float, high: float, tolerance: float
) -> float:
    """Return where a function falls to a target, looked for from ``high`` downwards."""
    at = high
    while falling(at) < target and at > low:
        at -= 0.5
    if at == high or falling(at) <= target:
        return at
    return float(brentq(lambda x: falling(x) - target, at, at + 0.5, xtol=tolerance))


def _log_quantile(guess: float) -> float:
    """Return ln Φ⁻¹ of a probability above ½, cut off where nothing but rounding is left."""
    return math.log(statistics.NormalDist().inv_cdf(min(max(guess, 0.5 + 1e-9), 1 - 1e-9)))


def _likely_quantile(mechanism: Mechanism) -> float:
    """Return about ln Φ⁻¹ of the best guess at even odds; not a bound."""
    # The factors of a run are added up as if each were the Gaussian with its best guess.
    spec, replace = mechanism.spec, mechanism.adjacency == "replace-one"
    single, factors = -math.log(2 * single_noise(mechanism)), 1
    pair = spec.replaced if replace else spec.pair
    if spec.disjoint or pair is None:
        return single
    if mechanism.bands > 1:
        from dprlhf.privacy import correlated_allocation as correlated

        terms = (mechanism.noise_multiplier, mechanism.rounds, mechanism.bands)
        delta = correlated.likely_delta(*terms, 0.0, correlated.CURVE_PART)
    elif spec.independent_rounds:  # most rounds of a user are without it: no Gaussians
        delta = spec.delta(mechanism, 0.0, 1.0, True)
    else:  # the curve of replacements is sharp at zero where points beside it hold it
        delta = float(pair.curve(mechanism, _NEAR if replace else _NEAR[:1], "remove")[0])
        factors = 1 if spec.factors is None else spec.factors(mechanism)
    return min(single, _log_quantile((1 + delta) / 2) + math.log(factors) / 2)
