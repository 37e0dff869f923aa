"""The gate's noise: its cost and its law, and what a restored run folder shows.

    python -m scripts.soundness.noise

The cost is the processor time of one thread.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from fractions import Fraction
from pathlib import Path
from unittest import mock

import mpmath
import numpy as np
import torch
from scipy import stats

from dprlhf.boundary import BoundedSum, open_released
from dprlhf.privacy import rounded_gaussian as module
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import Ledger
from dprlhf.privacy.plan import make_plan
from dprlhf.privacy.randomness import new_key
from dprlhf.privacy.rounded_gaussian import grid_of, rounded_gaussian
from dprlhf.runs.measurements import Result, at_least, at_most, write_results

OUT = Path(__file__).resolve().parents[2] / "docs" / "results" / "soundness.json"
PLAN = make_plan(users=1000, rounds=10, delta=1e-5, epsilon=1.0)
KEY = bytes(range(32))


def main() -> None:
    torch.set_num_threads(1)
    for part in (law, rollback, cost):
        write_results(OUT, part(), show=True)


def cost(dimension: int = 2**22, repeats: int = 9) -> list[Result]:
    """Return nanoseconds a coordinate on one core, by itself and in the gate; medians."""
    std = grid_of(PLAN.noise_multiplier, PLAN.clip_norm, dimension).std
    rounded_gaussian(KEY, "warm", std=std, count=1)
    total = torch.zeros(dimension, dtype=torch.float64)
    seconds: dict[str, list[float]] = {"draw": [], "gate": []}
    for repeat in range(repeats):
        for name, spent in seconds.items():
            with tempfile.TemporaryDirectory() as folder:
                ledger = Ledger(Path(folder) / "ledger.jsonl", PLAN.terms())
                gate = Gate(PLAN, ledger, KEY)
                started = time.process_time()
                if name == "draw":
                    rounded_gaussian(KEY, "cost", repeat, std=std, count=dimension)
                else:
                    gate.release(1, BoundedSum(total, PLAN.clip_norm))
                spent.append((time.process_time() - started) / dimension * 1e9)
                ledger.close()
    draw, release = map(statistics.median, seconds.values())
    return [
        at_most("noise: draw, ns a coordinate on one core", draw, "ns", 100),
        Result("noise: release of the gate, ns a coordinate on one core", release, "ns"),
    ]


def law() -> list[Result]:
    """Return p-values of chi-squared tests against exact probabilities."""
    found = []
    count = 2_000_000
    for std in (Fraction(7, 10), Fraction(33, 10), Fraction(20)):
        draws = rounded_gaussian(KEY, "law", std=std, count=count).numpy()
        reach = int(4 * std)
        edges = [mpmath.mpf(k) - 0.5 for k in range(-reach, reach + 2)]
        below = [float(mpmath.ncdf(e * std.denominator / std.numerator)) for e in edges]
        share = np.diff(np.concatenate([[0.0], below, [1.0]]))
        seen = np.histogram(draws, [-np.inf, *map(float, edges), np.inf])[0]
        value = float(stats.chisquare(seen, share / share.sum() * count).pvalue)
        name = f"noise: chi-squared p-value, {count} draws at standard deviation {float(std):g}"
        found.append(at_least(name, value, "1", 1e-3))
    std = grid_of(PLAN.noise_multiplier, PLAN.clip_norm, count).std
    with mock.patch.object(module, "_settle", wraps=module._settle) as settle:
        x = rounded_gaussian(KEY, "law", std=std, count=count).numpy() / float(std)
    value = float(stats.kstest(x, "norm").pvalue)
    found.append(at_least("noise: KS p-value at full size", value, "1", 1e-3))
    share = settle.call_count / count
    found.append(Result("noise: share of draws in multiple precision", share, "1"))
    return found


def rollback() -> list[Result]:
    """Return how well two releases after a restore tell a difference of the sums, in units of S."""
    with mock.patch("dprlhf.privacy.ledger.new_nonce", return_value="constant"):
        before = _restored()
    after = _restored()
    goal = PLAN.noise_multiplier  # √2 z is expected
    return [
        Result("rollback: error of the difference shown, nonces all the same", before, "S"),
        Result("rollback: error of the difference shown, fresh nonces", after, "S",
               f"at least z = {goal:.3g}", after >= goal),
    ]  # fmt: skip


def _restored() -> float:
    """Return the root mean square error of two releases' difference as a guess of the sums'."""
    key, count = new_key(), 10_000
    one = torch.zeros(count, dtype=torch.float64)
    other = one.clone()
    other[3] = -0.4 * PLAN.clip_norm
    released = []
    with tempfile.TemporaryDirectory() as folder:
        path, backup = Path(folder) / "ledger.jsonl", Path(folder) / "backup.jsonl"
        ledger = Ledger(path, PLAN.terms())
        Gate(PLAN, ledger, key).release(1, BoundedSum(one.clone(), PLAN.clip_norm))
        ledger.close()
        shutil.copy(path, backup)
        for place, total in ((path, one), (backup, other)):
            ledger = Ledger(place, PLAN.terms())
            gate = Gate(PLAN, ledger, key)
            given = BoundedSum(total.clone(), PLAN.clip_norm)
            released.append(open_released(gate.release(2, given), "the measurement"))
            ledger.close()
    shown = (released[0] - released[1]) * PLAN.expected_batch_size
    return float((shown - (one - other)).square().mean().sqrt()) / PLAN.clip_norm


if __name__ == "__main__":
    main()
