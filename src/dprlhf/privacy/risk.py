"""Risk in words: what a guess about one person, or a few, can gain from all that runs released.

Everything follows from the privacy curves δ(ε) = H_{e^ε}(P‖Q), of which (ε, δ) is one point: the
curve of a test's largest true-positive rate is its conjugate, the best guess one value of it.
All figures are upper bounds (``docs/proofs/risk.md``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Mechanism, covering_noise
from dprlhf.privacy.gaussian import gaussian_deltas, gaussian_epsilon, noise_too_small
from dprlhf.privacy.partitions.base import round_noise
from dprlhf.privacy.random_allocation import SIDES, Floats, Side

FALSE_POSITIVES = (0.001, 0.01, 0.1)
"""The false-positive rates at which the largest true-positive rate is stated."""

_POINTS = 96  # of a curve, up to the ε at which it falls to δ
_PARTS = 4  # into which chords divide each step between them
_MOST_STEPS = 6000
_LARGEST_EPSILON = 300.0
_COMPOSED = 100  # people, of whom each takes a pass
_ROUNDING = 1e-9
_FLOAT_ERROR = 1e-12  # by which a Gaussian's curve may have been rounded up


@dataclass(frozen=True)
class Risk:
    """Upper bounds on what any test of the releases can gain about a person."""

    best_guess: float
    prior: float  # Probability that the person took part, as the guesser knows beforehand
    best_guess_at_prior: float  # The same as best_guess, at that prior
    tpr_at_fpr: dict[str, float]
    gdp_mu: float  # μ such that every true-positive rate is at most Φ(Φ⁻¹(fpr) + μ) + δ
    delta: float  # That δ
    people: int  # Number of people who all took part, or of whom none did


def risk(
    mechanisms: Sequence[Mechanism],
    delta: float,
    *,
    shared: Sequence[Sequence[bool]] | None = None,
    times: Sequence[int] | None = None,
    prior: float = 0.5,
    people: int = 1,
) -> Risk:
    """Return the risk of several runs together; of one run alone with one mechanism.

    >>> f"{risk([Mechanism(1.0, 1, 'fixed')], 1e-5).best_guess:.4f}"
    '0.6915'
    """
    if not 0 < delta < 1:
        raise DprlhfError(f"delta must be above 0 and below 1, not {delta}")
    if not 0 < prior < 1:
        raise DprlhfError(f"prior must be above 0 and below 1, not {prior}")
    if people < 1:
        raise DprlhfError(f"people must be a whole number of at least 1, not {people}")
    if any(m.noise_multiplier == 0 for m in mechanisms):
        raise DprlhfError("a run without noise promises nothing: there is no risk to bound")
    sets = [list(mechanisms)]
    if len(mechanisms) != 1 or sum(times or [1]) != 1:
        from dprlhf.privacy.composition import sets_of_runs

        sets = sets_of_runs(mechanisms, shared, times)
    risks = [_together(tuple(together), delta, prior, people) for together in sets]
    rates = {name: max(one.tpr_at_fpr[name] for one in risks) for name in risks[0].tpr_at_fpr}
    guess, at_prior, mu = (
        max(getattr(one, name) for one in risks)
        for name in ("best_guess", "best_guess_at_prior", "gdp_mu")
    )
    return Risk(guess, prior, at_prior, rates, mu, delta, people)


@functools.lru_cache(64)  # a run's opening, its card and its report ask for the same
def _together(runs: tuple[Mechanism, ...], delta: float, prior: float, people: int) -> Risk:
    """Return the risk of runs that may all contain the same person."""
    # Of more people, the Gaussian that covers all of them is taken for that of one.
    composed = people if people <= _COMPOSED else 1
    noise = covering_noise(runs) / (people / composed)
    if math.isinf(noise):
        none = {f"{rate:g}": rate for rate in FALSE_POSITIVES}
        return Risk(0.5, prior, max(prior, 1 - prior), none, 0.0, delta, people)
    reach, curve = _curve(runs, noise, delta, covered=composed < people)
    step = min(max(1.01 * reach, 1e-6), _LARGEST_EPSILON) / _POINTS / _PARTS
    at = np.arange(_POINTS + 1.0) * (step * _PARTS)
    own = {side: np.minimum(one, gaussian_deltas(noise, at)) for side, one in curve(at).items()}
    if runs[0].adjacency == "replace-one":  # either of the two may be the one who took part
        own = dict.fromkeys(SIDES, np.maximum(*own.values()))
    steps = min(composed * _POINTS * _PARTS, _MOST_STEPS, int(2 * _LARGEST_EPSILON / step))
    all_ = {a: _of_people(own[a], own[b], step, steps, noise, composed)
            for a, b in (SIDES, SIDES[::-1])}  # fmt: skip
    epsilons = step * np.arange(-steps, steps + 1)
    removed = all_["remove"]

    def guess(p: float) -> float:
        # p TPR + (1 - p)(1 - FPR) is largest where the curve's slope in FPR is (1 - p)/p; between
        # its points the curve lies below the chord in e^eps.
        odds = (1 - p) / p
        ratios, values = (np.append(*ends) for ends in ((0.0, np.exp(epsilons)), (1.0, removed)))
        value = float(np.interp(odds, ratios, values))
        return max(p, min(1.0, 1 - p + p * value + _ROUNDING))

    def rate(fpr: float) -> float:
        lines = (float((values + np.exp(epsilons) * fpr).min()) for values in all_.values())
        return min(1.0, max(lines) + _ROUNDING)

    worst = np.maximum(*(values[steps:] for values in all_.values()))
    mu = min(composed / noise, _gaussian_mu(worst, step, delta, composed / noise)) * (1 + _ROUNDING)
    rates = {f"{fpr:g}": rate(fpr) for fpr in FALSE_POSITIVES}
    return Risk(guess(0.5), prior, guess(prior), rates, mu, delta, people)


def _curve(
    runs: tuple[Mechanism, ...], noise: float, delta: float, *, covered: bool
) -> tuple[float, Callable[[Floats], dict[Side, Floats]]]:
    """Return about the ε at which both sides' curves have fallen to δ, and the curves.

    With ``covered`` they are those of the Gaussian of this noise.
    """
    replace = runs[0].adjacency == "replace-one"
    pairs = {m: m.spec.replaced if replace else m.spec.pair for m in runs}
    first, spec = runs[0], runs[0].spec
    if (
        covered
        or all(m.spec.disjoint for m in runs)
        or any(noise_too_small(round_noise(m), delta) for m in runs)
        or None in pairs.values()
        or gaussian_epsilon(noise, delta) == 0
    ):
        single = gaussian_epsilon(noise, delta)
        return single, lambda at: dict.fromkeys(SIDES, gaussian_deltas(noise, at))
    if len(runs) == 1 and first.bands > 1:
        from dprlhf.privacy import correlated_allocation as correlated

        terms = (first.noise_multiplier, first.rounds, first.bands)
        reach = correlated.likely_epsilon(*terms, delta)
        return reach, lambda at: correlated.curve(*terms, at, reach)
    pair = pairs[first]
    if len(runs) == 1 and pair and (spec.factors is None or spec.factors(first) == 1):
        return (
            max(pair.reach(first, delta, side) for side in SIDES),
            lambda at: {side: pair.curve(first, at, side) for side in SIDES},
        )
    if len(runs) == 1 and spec.losses is not None:  # ε has the same, and they take a second
        joint = spec.losses(first)
    else:
        from dprlhf.privacy.composition import joint_losses

        joint = joint_losses(runs, {m: pair for m, pair in pairs.items() if pair}, delta)
    high = gaussian_epsilon(noise, delta)
    return (
        max(losses.epsilon(delta, high) for losses in joint.values()),
        lambda at: {s: np.array([one.delta(e) for e in at.tolist()]) for s, one in joint.items()},
    )


def _of_people(
    curve: Floats, opposite: Floats, step: float, steps: int, noise: float, people: int
) -> Floats:
    """Return one side's curve for several people, at ε from -steps to steps, ``[2 steps + 1]``."""
    at = np.arange(steps + 1.0) * step
    growth = np.exp(at)

    def both_ways(positive: Floats, other: Floats) -> Floats:
        # H_{e^-t}(P||Q) = 1 - e^-t + e^-t H_{e^t}(Q||P).
        return np.append((1 - (1 - other) / growth)[:0:-1], positive)

    known = np.exp(step * _PARTS * np.arange(len(curve)))
    one = both_ways(*(np.interp(growth, known, values) for values in (curve, opposite)))
    deltas = one
    reach = min(steps, _PARTS * (len(curve) - 1))
    for count in range(2, people + 1):
        # One more person: H_{e^(a+b)} <= H_{e^a} + e^a H_{e^b}, at the best a.
        before = np.concatenate([np.ones(reach), deltas, np.full(reach, deltas[-1])])
        deltas = np.ones_like(one)
        for shift in range(-reach, reach + 1):
            later = before[reach - shift : reach - shift + len(one)]
            np.minimum(deltas, one[steps + shift] + math.exp(step * shift) * later, out=deltas)
        covering = gaussian_deltas(noise / count, at)
        deltas = np.minimum(deltas, both_ways(covering, covering))
    return deltas


def _gaussian_mu(curve: Floats, step: float, delta: float, high: float) -> float:
    """Return about the least μ whose Gaussian curve, with δ added, is nowhere below ``curve``."""
    if curve[-1] > delta:
        return math.inf
    ends = np.arange(1.0, len(curve)) * step  # a curve falls: its left end bounds each cell

    def above(mu: float) -> bool:
        return bool((gaussian_deltas(1 / mu, ends) - _FLOAT_ERROR + delta >= curve[:-1]).all())

    low = 0.0
    while high - low > 1e-5 * high and high > 1e-12:
        middle = (low + high) / 2
        low, high = (low, middle) if above(middle) else (middle, high)
    return high
