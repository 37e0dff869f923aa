"""Paired figures of a comparison: value, price, share kept, break-even ε, reward at equal KL.

Arrays are by seed, ``[seeds]``; entry s of two arrays is of the same seed, which draws the
adapter's start, the users and the evaluation. Errors are over seeds. Intervals are percentile
intervals of :func:`scipy.stats.bootstrap` over the seeds, too narrow where these are few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Values = NDArray[np.float64]
RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimated:
    """A figure over seeds.

    Attributes:
        value: The figure.
        low: Lower end of its 95% interval; NaN for a single seed.
        high: Upper end of its 95% interval.
    """

    value: float
    low: float = math.nan
    high: float = math.nan


def standard_error(values: Values) -> float:
    """Return the standard error of a mean over seeds; NaN for a single seed."""
    return float(stats.sem(values)) if len(values) > 1 else math.nan


def share(private: Values, plain: Values) -> Estimated:
    """Return the share of the non-private gain that the private run keeps, a ratio of means.

    Args:
        private: Gain of each private run, ``[seeds]``.
        plain: Gain of the non-private run of the same seed, ``[seeds]``.
    """
    return _estimated(lambda kept, of: float(np.mean(kept) / np.mean(of)), [private, plain])


def break_even(values: Mapping[float, Values]) -> Estimated:
    """Return the ε at which private prompts are worth as much as public ones, with an interval.

    The value is taken as linear in log ε between the measured ones. Where it crosses zero more than
    once, the largest such ε counts: above it, every measured value is positive.

    Args:
        values: Value J(ε) − J(public-only) of each seed by ε, ``[seeds]``.

    Returns:
        ε in nats; 0 where the value is positive at the smallest ε and above it, infinity where it
        is negative at the largest. Ends of the interval likewise.
    """
    epsilons = sorted(values)
    logs = np.log(epsilons)
    found = _estimated(
        lambda *rows: _crossing(logs, [float(np.mean(row)) for row in rows]),
        [values[epsilon] for epsilon in epsilons],
    )

    def unclipped(log: float) -> float:
        if math.isnan(log):
            return log
        return 0.0 if log < logs[0] else math.inf if log > logs[-1] else math.exp(log)

    return Estimated(unclipped(found.value), unclipped(found.low), unclipped(found.high))


def _crossing(logs: Values, means: Sequence[float]) -> float:
    """Return where a line through points last rises above zero; beside the grid if nowhere."""
    negative = [i for i, mean in enumerate(means) if mean <= 0]
    if not negative:
        return float(logs[0]) - 1.0
    i = negative[-1]
    if i == len(means) - 1:
        return float(logs[-1]) + 1.0
    return float(np.interp(0.0, [means[i], means[i + 1]], [logs[i], logs[i + 1]]))


def _estimated(statistic: Callable[..., float], rows: Sequence[Values]) -> Estimated:
    value = statistic(*rows)
    if len(rows[0]) < 2:
        return Estimated(value)
    interval = stats.bootstrap(
        tuple(rows),
        statistic,
        n_resamples=RESAMPLES,
        paired=True,
        vectorized=False,
        method="percentile",
        confidence_level=CONFIDENCE,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Estimated(value, float(interval.low), float(interval.high))


def agreement(proxy: Mapping[str, Values], gold: Mapping[str, Values]) -> tuple[float, float]:
    """Return how a judge agrees with the reward over the runs of a table.

    Args:
        proxy: Gains of the reward by run, ``[seeds]``.
        gold: Gains of the judge by run, ``[seeds]``.

    Returns:
        The share of runs whose mean gains have the same sign, and Spearman's rank correlation of
        the mean gains; NaN where all are equal.
    """
    one, other = (np.array([np.mean(found[name]) for name in proxy]) for found in (proxy, gold))
    constant = len(set(one)) == 1 or len(set(other)) == 1
    ranks = math.nan if constant else float(stats.spearmanr(one, other).statistic)
    # Of five runs a correlation of 0.9 comes out as 0.8999999999999998, below a goal of 0.9.
    return float(np.mean(np.sign(one) == np.sign(other))), round(ranks, 12)


Curve = Sequence[tuple[float, float]]
"""The way of one run: (√KL to the base model, gain over it) at each evaluation."""


def equal_kl(curves: Mapping[str, Sequence[Curve]]) -> tuple[float, dict[str, Values]]:
    """Return the gain of each method at the same distance from the base model.

    Gao et al. (arXiv 2210.10760, section 3.3) compare policies by reward against √KL: the end of a
    run says how long it went on, the frontier how well it spends its distance. The distance is the
    largest that every run of every method reached; the gain there is interpolated linearly in √KL.

    Args:
        curves: The runs by method, one for each seed, in nats and units of the reward.

    Returns:
        √KL in √nats, and the gains by method, ``[seeds]``.
    """
    ways = {name: [_sorted(curve) for curve in runs] for name, runs in curves.items() if runs}
    reach = min(float(way[-1, 0]) for runs in ways.values() for way in runs)
    gains = {
        name: np.array([np.interp(reach, way[:, 0], way[:, 1]) for way in runs])
        for name, runs in ways.items()
    }
    return reach, gains


def _sorted(curve: Curve) -> Values:
    """Return a run's points from the base model, (0, 0), by rising √KL, ``[points, 2]``."""
    return np.array(sorted([(0.0, 0.0), *curve]), dtype=np.float64)
