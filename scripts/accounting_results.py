"""Measure the privacy accountant: error against independent methods, and time.

Writes ``docs/results/accounting.json``. Takes about two minutes on one core.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.special import ndtr

from dprlhf.privacy import random_allocation
from dprlhf.privacy.accounting import Mechanism, delta_of, epsilon, noise_multiplier
from dprlhf.runs.measurements import Result, at_least, at_most, write_results

OUT = Path(__file__).resolve().parents[1] / "docs" / "results" / "accounting.json"


def sampled_delta(
    z: float, rounds: int, eps: float, tilt: float, samples: int
) -> tuple[float, float]:
    """E[(S/T - e^eps)_+] and its standard error: tilted normals, largest X integrated out."""
    rng, s = np.random.default_rng(1), 1 / z
    values = []
    for _ in range(math.ceil(samples * rounds / 2e6)):
        g = rng.standard_normal((int(2e6 / rounds), rounds - 1)) + tilt
        weight = np.exp((rounds - 1) * tilt**2 / 2 - tilt * g.sum(1))
        x = np.exp(s * g - s * s / 2)
        missing = rounds * math.exp(eps) - x.sum(1)
        t = np.log(np.maximum(x.max(1), missing)) / s + s / 2
        values.append(weight * (ndtr(s - t) - missing * ndtr(-t)))
    v = np.concatenate(values)
    return float(v.mean()), float(v.std() / math.sqrt(len(v)))


def median_seconds(call: Callable[[], object], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        random_allocation.delta.cache_clear()  # what earlier calls have kept
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def against_sampling() -> list[Result]:
    rows = []
    for z, rounds, eps, tilt in [
        (1.301, 16, 1.0, 0.3),
        (1.0, 100, 0.62, 0.1),
        (0.951, 64, 1.0, 0.1),
        (0.399, 200, 8.0, 0.0),
        (0.8, 2000, 0.1, 0.02),
    ]:
        mean, error = sampled_delta(z, rounds, eps, tilt, 2_000_000 if rounds < 1000 else 300_000)
        found = delta_of(Mechanism(z, rounds), eps)
        name = f"delta against importance sampling, z={z}, T={rounds}, epsilon={eps:g}"
        rows += [
            Result(f"{name}: relative difference", found / mean - 1, "1",
                   "within 4 standard errors plus 0.1%",
                   abs(found - mean) <= 4 * error + 1e-3 * mean),
            Result(f"{name}: relative standard error", error / mean, "1"),
        ]  # fmt: skip
    return rows


def against_pld_accounting() -> list[Result]:
    warnings.simplefilter("ignore", ImportWarning)
    from PLD_accounting import gaussian_allocation_epsilon_range

    rows = []
    for z, rounds in [(1.301, 16), (1.0, 100)]:
        start = time.perf_counter()
        upper, lower = gaussian_allocation_epsilon_range(
            delta=1e-5, sigma=z, num_steps=rounds, epsilon_accuracy=0.05
        )
        seconds = time.perf_counter() - start
        cost = epsilon(Mechanism(z, rounds), 1e-5)
        inside = lower <= cost.epsilon_lower <= cost.epsilon <= upper
        name = f"z={z}, T={rounds}, delta=1e-5"
        rows += [
            Result(f"epsilon, {name}", cost.epsilon, "1", "inside pld-accounting's", inside),
            Result(f"epsilon, {name}: certified lower bound", cost.epsilon_lower, "1"),
            Result(f"epsilon by pld-accounting, {name}: upper", upper, "1"),
            Result(f"epsilon by pld-accounting, {name}: lower", lower, "1"),
            Result(f"time of pld-accounting, {name}", seconds, "s"),
        ]
    return rows


def widths(settings: int = 300) -> list[Result]:
    """How far upper and certified lower bound lie apart over the supported range."""
    rng, worst, count = np.random.default_rng(2), 0.0, 0
    while count < settings:
        mechanism = Mechanism(10 ** rng.uniform(-0.75, 1.6), round(10 ** rng.uniform(0, 4)))
        cost = epsilon(mechanism, 10 ** rng.uniform(-9, -3))
        if 0.05 <= cost.epsilon <= 20:
            worst, count = max(worst, cost.epsilon / cost.epsilon_lower - 1), count + 1
    name = f"largest upper / lower - 1 over {settings} random settings (epsilon 0.05 to 20)"
    return [Result(name, worst, "1", "at most 1%", worst <= 0.01)]


def calibration(settings: int = 200) -> list[Result]:
    rng, low, high = np.random.default_rng(3), math.inf, 0.0
    for _ in range(settings):
        asked, delta = 10 ** rng.uniform(-1.3, 1.3), 10 ** rng.uniform(-9, -3)
        rounds = round(10 ** rng.uniform(0, 4))
        z, _ = noise_multiplier(asked, delta, rounds=rounds)
        got = epsilon(Mechanism(z, rounds), delta).epsilon / asked
        low, high = min(low, got), max(high, got)
    name = f"epsilon after calibration / epsilon asked, {settings} random settings"
    return [
        at_most(f"{name}: largest", high, "1", 1),
        at_least(f"{name}: smallest", low, "1", 0.999),
    ]


def times() -> list[Result]:
    rows = []
    for rounds in (100, 1000, 10_000):
        for eps in (0.1, 1.0, 8.0):
            z, _ = noise_multiplier(eps, 1e-6, rounds=rounds)
            setting = f"T={rounds}, epsilon={eps:g}, delta=1e-6"
            for name, call in [
                ("noise_multiplier()", lambda e=eps, t=rounds: noise_multiplier(e, 1e-6, rounds=t)),
                ("epsilon()", lambda z=z, t=rounds: epsilon(Mechanism(z, t), 1e-6)),
            ]:
                seconds, row = median_seconds(call), f"median time of {name}, {setting}"
                rows.append(Result(row, seconds, "s", "below 1 s", seconds < 1))
    return rows


if __name__ == "__main__":
    for part in (against_sampling, against_pld_accounting, widths, calibration, times):
        write_results(OUT, part(), show=True)
