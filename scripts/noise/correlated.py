"""Noise of the whole run under independent and correlated noise, by partition, at the same ε.

κ is the standard deviation of the noise of the final sum Σ_t of all rounds, in units of the clip
norm S, where users take part once; "path" is its root mean square over the sums up to each round.
Both for the certified noise multiplier at δ = 1e-5, so that the stated ε holds. Writes rows to
``docs/results/noise.json``, each as soon as it is known, and skips those that are there already
(``--again`` measures them anew). About 10 minutes of one core for all, most of it for 64 rounds.

    python scripts/noise/correlated.py [--rounds 4 16] [--again]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from dprlhf.privacy.accounting import Partition, noise_multiplier
from dprlhf.privacy.correlated_noise import noise_matrix
from dprlhf.runs.measurements import Result, write_results

OUT = Path(__file__).resolve().parents[2] / "docs" / "results" / "noise.json"
DELTA = 1e-5
GOALS = {(16, 1.0): 4.0, (16, 4.0): 1.3}
"""Goals for κ on random allocation with as many bands as rounds, by rounds and ε."""


def kinds(rounds: int) -> list[tuple[Partition, int]]:
    """Return the partitions and bands that are compared."""
    bands = sorted({1, 2, 4, rounds} & set(range(1, rounds + 1)))
    return [("fixed", b) for b in (1, rounds)] + [("random-allocation", b) for b in bands]


def gains(rounds: int, bands: int) -> tuple[float, float]:
    """Return the noise of the final sum, and of the path, in units of z."""
    undone = np.linalg.inv(noise_matrix(rounds, bands))
    sums = np.cumsum(undone, axis=0)
    final = float(np.linalg.norm(sums[-1]))
    return final, float(np.sqrt((sums**2).sum(1).mean()))


def measured(partition: Partition, bands: int, rounds: int, target: float) -> list[Result]:
    """Return the rows of one kind of noise at one ε."""
    start = time.process_time()
    z, cost = noise_multiplier(target, DELTA, rounds=rounds, partition=partition, bands=bands)
    seconds = time.process_time() - start
    final, path = (z * gain for gain in gains(rounds, bands))
    noise = "independent noise" if bands == 1 else f"{bands} bands"
    name = f"{partition}, {noise}, T = {rounds}, epsilon = {target:g}"
    goal = (
        GOALS.get((rounds, target)) if (partition, bands) == ("random-allocation", rounds) else None
    )
    print(
        f"{name}: kappa {final:.3f}, path {path:.3f}, epsilon {cost.epsilon:.4f}, {seconds:.1f} s"
    )
    rows = [
        Result(
            f"kappa: {name}",
            round(final, 4),
            "S",
            "" if goal is None else f"at most {goal:g}",
            None if goal is None else bool(final <= goal and cost.epsilon <= target),
        ),
        Result(f"path: {name}", round(path, 4), "S"),
    ]
    if goal is not None:
        within = "at most 10 s"
        rows.append(
            Result(f"CPU seconds to plan: {name}", round(seconds, 1), "s", within, seconds <= 10)
        )
    return rows


def main() -> None:
    """Measure what is not known yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, nargs="+", default=[16, 4, 8, 32, 64])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 4.0, 0.3])
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args()
    for rounds in asked.rounds:
        for target in asked.epsilons:
            for partition, bands in kinds(rounds):
                known = {r["name"] for r in json.loads(OUT.read_text())} if OUT.exists() else set()
                noise = "independent noise" if bands == 1 else f"{bands} bands"
                name = f"kappa: {partition}, {noise}, T = {rounds}, epsilon = {target:g}"
                if name not in known or asked.again:
                    write_results(OUT, measured(partition, bands, rounds, target))


if __name__ == "__main__":
    main()
