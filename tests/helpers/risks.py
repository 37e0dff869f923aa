"""Risk by simulation: the likelihood ratio of a plan's dominating pair, drawn."""

import math
from typing import Any

import numpy as np
from scipy.special import logsumexp

from dprlhf.privacy.accounting import Mechanism
from dprlhf.privacy.correlated_noise import noise_matrix
from dprlhf.privacy.risk import FALSE_POSITIVES

Floats = np.ndarray[Any, np.dtype[np.float64]]


def ratios(plan: Mechanism, draws: int, random: np.random.Generator) -> tuple[Floats, Floats]:
    """Return log-likelihood ratios of the dominating pair with the user, and without."""
    z = plan.noise_multiplier / math.sqrt(plan.releases_per_round)
    replaced, poisson = plan.adjacency == "replace-one", plan.partition == "poisson"
    size = plan.rounds // plan.participations
    shape = (draws, 1, plan.rounds) if poisson else (draws, plan.participations, size)
    columns = noise_matrix(size, plan.bands) if plan.bands > 1 else np.eye(size)
    half = (columns**2).sum(0) / 2

    def log_ratio(seen: Floats) -> Floats:
        if poisson:
            q = plan.participations / plan.rounds
            joined = math.log(q) + (seen - 0.5) / z**2
            return np.asarray(np.logaddexp(joined, math.log1p(-q)).sum((1, 2)))
        along = seen @ columns
        up = logsumexp((along - half) / z**2, axis=2)
        less = logsumexp((-along - half) / z**2, axis=2) if replaced else math.log(size)
        return np.asarray((up - less).sum(1))

    def moved() -> Floats:
        if poisson:
            return (random.random(shape) < plan.participations / plan.rounds).astype(float)
        return np.asarray(columns.T[random.integers(size, size=shape[:2])])

    with_ = random.normal(0, z, shape) + moved()
    without = random.normal(0, z, shape) - (moved() if replaced else 0)
    return log_ratio(with_), log_ratio(without)


def simulated(plan: Mechanism, draws: int, seed: int) -> list[tuple[float, float]]:
    """Return the best guess and the hit rates in simulation, each with its standard error."""
    inside, outside = ratios(plan, draws, np.random.default_rng(seed))
    right = np.concatenate([inside > 0, outside <= 0])
    found = [(float(right.mean()), 0.5 / math.sqrt(len(right)))]
    for fpr in FALSE_POSITIVES:
        both = []
        for hit, miss in ((inside, outside), (-outside, -inside)):
            cut = np.quantile(miss, 1 - fpr)
            # TPR = δ + ratio · FPR at the best threshold; the mean of δ varies least.
            values = np.maximum(-np.expm1(cut - hit), 0.0)
            own = float(values.mean()) + math.exp(cut) * fpr
            both.append((own, float(values.std()) / math.sqrt(draws)))
        found.append(max(both))
    return found
