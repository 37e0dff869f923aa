"""How long the total of 200 runs takes, by what the runs have in common.

Writes rows to ``docs/results/soundness.json``. About 5 minutes, most of them for runs that all
share users and all differ.

    python -m scripts.soundness.totals
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dprlhf.privacy.accounting import Mechanism
from dprlhf.privacy.composition import total_epsilon
from dprlhf.runs.measurements import Result, write_results

OUT = Path(__file__).resolve().parents[2] / "docs" / "results" / "soundness.json"
RUNS = 200
DELTA = 1e-5
GOAL = 1.0


def runs(kinds: int, partition: str) -> list[Mechanism]:
    """Return ``RUNS`` runs of as many kinds, spread over rounds and noise."""
    random = np.random.default_rng(0)
    made = [
        Mechanism(
            rounds=int(random.integers(8, 128)),
            partition=partition,  # type: ignore[arg-type]
            adjacency="zero-out",
            noise_multiplier=round(float(random.uniform(4, 12)), 3),
        )
        for _ in range(kinds)
    ]
    return [made[i % kinds] for i in range(RUNS)]


def row(name: str, mechanisms: Sequence[Mechanism], disjoint: bool, repeats: int) -> Result:
    """Time the total of some runs, once more than needed: the first call loads libraries."""
    shared = [[i == j for j in range(RUNS)] for i in range(RUNS)] if disjoint else None
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        total_epsilon(mechanisms, DELTA, shared)
        taken.append(time.perf_counter() - start)
    seconds = statistics.median(taken)
    return Result(
        f"total of 200 runs: {name}", seconds, "s", f"below {GOAL:g}", bool(seconds < GOAL)
    )


def main() -> None:
    """Measure and write."""
    total_epsilon(runs(1, "fixed")[:2], DELTA)
    for name, kinds, partition, disjoint, repeats in (
        ("fixed, shared users, all different", RUNS, "fixed", False, 3),
        ("random-allocation, shared users, all alike", 1, "random-allocation", False, 3),
        ("random-allocation, shared users, of 4 kinds", 4, "random-allocation", False, 3),
        ("random-allocation, shared users, all different", RUNS, "random-allocation", False, 1),
        ("random-allocation, no shared user, of 4 kinds", 4, "random-allocation", True, 3),
    ):
        result = row(name, runs(kinds, partition), disjoint, repeats)
        write_results(OUT, [result])
        print(f"{result.name}: {result.value:.3g} s", flush=True)


if __name__ == "__main__":
    main()
