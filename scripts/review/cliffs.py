"""Ten thousand plans in small steps: where does the noise that one needs jump?

Writes rows to ``docs/results/review.json``. The walks are as in ``tests/privacy/test_cliffs.py``,
longer and from more places::

    python -m scripts.review.cliffs
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

from dprlhf.privacy.accounting import Adjacency, Partition
from dprlhf.runs.measurements import at_least, at_most, write_results
from helpers.cliffs import LIMIT, Axis, Point, largest, walk

OUT = Path(__file__).resolve().parents[2] / "docs" / "results" / "review.json"


def walks() -> Iterator[tuple[Point, Axis, int]]:
    """Yield where each walk starts, what it changes, and in how many steps, the slow ones first."""
    yield Point(noise=1.0, slots=16, bands=4), "delta", 20  # from the least that a plan may have
    for delta in (1e-5, 1e-12):
        yield Point("poisson", noise=1.0, delta=delta), "noise", 150
        yield Point("poisson", noise=1.0, delta=delta), "slots", 40
        yield Point("poisson", noise=1.0, delta=delta), "participations", 20
        yield Point(noise=1.0, delta=delta, participations=4), "noise", 150
        yield Point(noise=1.0, delta=delta, participations=4), "slots", 40
        yield Point(noise=1.0, delta=delta), "participations", 30
        yield Point(adjacency="replace-one", noise=1.0, delta=delta), "noise", 200
        yield Point(adjacency="replace-one", noise=1.0, delta=delta), "slots", 60
        yield Point(adjacency="replace-one", noise=2.0, participations=4), "noise", 60
    for noise in (0.7, 1.5):
        yield Point("poisson", noise=noise), "delta", 50
        yield Point(noise=noise, participations=4), "delta", 50
        yield Point(adjacency="replace-one", noise=noise), "delta", 60
    for delta, slots in itertools.product((1e-4, 1e-7, 1e-10, 1e-14), (8, 50, 500)):
        yield Point(delta=delta, slots=slots), "epsilon", 150
    for epsilon, slots in itertools.product((0.3, 1.0, 4.0, 16.0), (8, 50, 500)):
        yield Point(epsilon=epsilon, slots=slots), "delta", 80
    for epsilon, delta in itertools.product((0.3, 1.0, 4.0, 16.0), (1e-5, 1e-12)):
        yield Point(epsilon=epsilon, delta=delta), "slots", 80
    names: tuple[Partition, ...] = ("fixed", "stream")
    adjacencies: tuple[Adjacency, ...] = ("zero-out", "replace-one")
    for name, adjacency, bands in itertools.product(names, adjacencies, (1, 4)):
        for other in (1e-4, 1e-7, 1e-13):
            yield Point(name, adjacency, delta=other, bands=bands), "epsilon", 150
        for other in (0.1, 1.0, 10.0):
            yield Point(name, adjacency, epsilon=other, bands=bands), "delta", 80


def _walked(job: tuple[Point, Axis, int]) -> tuple[int, str, float, str]:
    start, axis, count = job
    points = walk(start, axis, count, 2.0**-40 if start.bands > 1 and axis == "delta" else 0.0)
    jump, place = largest(points, axis)
    cost = "a noise multiplier" if start.noise is None else "an epsilon"
    return len(points), cost, float(jump), f"{axis} of {place}"


def main() -> None:
    """Walk, the quick walks first, print each, and write the rows of those so far."""
    plans, most = 0, {"a noise multiplier": 0.0, "an epsilon": 0.0}
    with multiprocessing.Pool(2) as pool:
        for count, cost, jump, where in pool.imap_unordered(_walked, list(walks())[::-1]):
            print(f"{count} plans, {cost}: {jump:.4f} at {where}", flush=True)
            plans, most[cost] = plans + count, max(jump, most[cost])
            write_results(OUT, [at_least("cliffs: plans", plans, "plans", 10_000)])
            for name, value in most.items():
                shown = f"cliffs: largest jump of {name}, at epsilon up to 500"
                write_results(OUT, [at_most(shown, value, "1", LIMIT)])


if __name__ == "__main__":
    main()
