"""Distributions of privacy losses: pessimistic ones from privacy curves, and their sums."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import fft
from scipy.optimize import brentq

from dprlhf.privacy.gaussian import find_root
from dprlhf.privacy.random_allocation import Floats, power

Places = npt.NDArray[np.int64]

POINTS = 700
"""Number of steps between zero and the largest privacy loss of one factor of a run."""
_GROWTH = 0.01  # how much wider each cell of a widening grid is, relative to its place


@dataclass(frozen=True)
class Losses:
    """A pessimistic distribution of privacy losses, on multiples of a step."""

    step: float  # Step of the grid
    places: Places  # Losses in steps, increasing, [points]
    masses: Floats  # Their probabilities, [points]
    infinite: float  # Probability of an infinite loss

    def log_moment(self, power: float) -> float:
        """Return ln of the mean of e^(power · loss) over the finite losses."""
        return _log_sum(self._log_masses + power * self.step * self.places)

    @functools.cached_property
    def _log_masses(self) -> Floats:
        with np.errstate(divide="ignore"):
            return np.log(self.masses)

    def tilted(self, tilt: float) -> Floats:
        """Return the masses in proportion to e^(tilt · loss), which add up to 1."""
        logs = self._log_masses + tilt * self.step * self.places
        weights: Floats = np.exp(logs - _log_sum(logs))
        return weights


def _log_sum(logs: Floats) -> float:
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum()))


def widening(last: int, stride: int = 1) -> Places:
    """Return places from 0 up to ``last`` or just past it, a stride apart and then ever wider."""
    near = np.arange(math.ceil(1 / _GROWTH))
    count = max(0, math.ceil(math.log(max(last / stride, 1) / len(near)) / _GROWTH)) + 2
    far = np.rint(len(near) * np.exp(_GROWTH * np.arange(count))).astype(np.int64)
    places = stride * np.unique(np.concatenate([near, far]))
    return places[: max(1, int(np.searchsorted(places, last))) + 1]


def loss_distribution(step: float, curve: Floats, opposite: Floats, places: Places) -> Losses:
    """Return a pessimistic loss distribution of a mechanism with a curve known on a grid."""
    # `curve` and `opposite` (the neighbours exchanged) are upper bounds on δ at `places`, in steps.
    # Chords in e^epsilon lie above the convex true curve ("connect the dots", Doroshenko et al.,
    # arXiv 2207.04380).
    # H_{e^-t}(P||Q) = 1 - e^-t + e^-t H_{e^t}(Q||P) gives the curve at negative epsilon.
    back = places[len(opposite) - 1 : 0 : -1]
    negative = -np.expm1(-step * back) + np.exp(-step * back) * opposite[:0:-1]
    deltas = np.minimum(np.concatenate([negative, curve]), 1.0)
    at = np.concatenate([-back, places[: len(curve)]])
    rise, ratio = np.diff(deltas), np.expm1(step * np.diff(at))
    masses = np.append(rise / ratio, 0.0)
    masses[1:] -= rise * (1 + 1 / ratio)
    masses[0] += 1 - deltas[0]
    # Rounding can leave masses of about -1e-16; raising them to zero only adds mass.
    return Losses(step, at, np.maximum(masses, 0.0), float(deltas[-1]))


_CUT = 25.0  # losses are summed up to where their exponential weight has fallen to e^-25
_SPREAD = 7.0  # standard deviations of the tilted sum that the window keeps
_LEAST_TILT = 1e-3
_UNIT = 2.0**-53
_WEIGHT_ERROR = 1e-12  # relative error of a tilted mass, beyond that of the mass


@dataclass(frozen=True)
class Composed:
    """The sum of independent privacy losses of several mechanisms, all on one grid.

    δ is from an FFT of exponentially tilted masses: its error is small beside δ (proof note, step
    10).
    """

    parts: tuple[tuple[Losses, int], ...]  # Loss distributions, and how often each occurs

    @property
    def infinite(self) -> float:
        """Upper bound on the probability of an infinite loss."""
        return min(1.0, sum(times * one.infinite for one, times in self.parts))

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on δ at any ``epsilon``."""
        step = self.parts[0][0].step
        last = sum(times * int(one.places[-1]) for one, times in self.parts)
        if epsilon >= last * step:
            return self.infinite
        theta = self._tilt(epsilon)
        tilted = [one.tilted(theta) for one, _ in self.parts]
        mean = variance = log_front = 0.0
        for (one, times), weights in zip(self.parts, tilted, strict=True):
            at = step * one.places
            own = float(weights @ at)
            mean += times * own
            variance += times * float(weights @ (at - own) ** 2)
            log_front += times * one.log_moment(theta)
        log_front -= theta * epsilon
        if log_front > 600:
            return 1.0
        below, above = (_SPREAD * math.sqrt(variance) + side * (mean - epsilon) for side in (-1, 1))
        reach = _CUT / theta
        # Tilted or not, hardly anything is below its own mean less some deviations.
        below = max(0.0, min(below, epsilon + self._below))
        window = max(reach + below, above)
        size = 2 ** min(max(math.ceil(math.log2(window / step)), 10), 20)
        first = math.floor(epsilon / step) + 1
        places = np.arange(first, min(first + math.ceil(reach / step), last + 1, first + size))
        spectrum: npt.NDArray[np.complex128] = np.ones(size // 2 + 1, np.complex128)
        per_fft, error = 8 * _UNIT * math.log2(size), 0.0
        for (one, times), weights in zip(self.parts, tilted, strict=True):
            folded = np.bincount(one.places % size, weights=weights, minlength=size)
            spectrum *= power(fft.rfft(folded), times)
            norm = math.sqrt(float(folded @ folded))
            error += (1.01 * times * (per_fft + 10 * _UNIT) + per_fft) * norm
        total = fft.irfft(spectrum, size)
        excess = step * places - epsilon
        payoff = np.exp(-theta * excess) * -np.expm1(-excess)
        value = max(float(total[places % size] @ payoff), 0.0)
        rounding = error * math.sqrt(float(payoff @ payoff)) + 16 * _UNIT
        beyond = math.exp(-theta * float(excess[-1])) if places[-1] < last else 0.0
        count = sum(times for _, times in self.parts)
        slack = math.exp(min(2 * count * _WEIGHT_ERROR, 1.0))
        return min(1.0, math.exp(log_front) * slack * (value + rounding + beyond) + self.infinite)

    def epsilon(self, delta: float, high: float) -> float:
        """Return an ε of at most ``high``, which is known to hold, whose δ is at most ``delta``."""
        if self.infinite >= delta or high == 0:
            return high
        if self.delta(0.0) <= delta:
            return 0.0
        return find_root(self.delta, 0.0, high, delta)

    @functools.cached_property
    def _below(self) -> float:
        """Return how far below zero the sum hardly ever is."""
        mean = variance = 0.0
        for one, times in self.parts:
            at = one.step * one.places
            own = float(one.masses @ at)
            mean += times * own
            variance += times * float(one.masses @ np.minimum(at - own, 0.0) ** 2)
        return _SPREAD * math.sqrt(2 * variance) - mean

    def _tilt(self, epsilon: float) -> float:
        """Choose a tilt with which the sum is near ε; any is valid."""
        step = self.parts[0][0].step

        def slope(log_theta: float) -> float:
            theta = math.exp(log_theta)
            mean = sum(t * float(one.tilted(theta) @ one.places) for one, t in self.parts)
            return step * mean - epsilon - 2 / theta

        low, high = math.log(_LEAST_TILT), math.log(1e6)
        if slope(low) >= 0:
            return _LEAST_TILT
        if slope(high) <= 0:
            return 1e6
        return math.exp(brentq(slope, low, high, xtol=1e-2, rtol=1e-3))
