"""Walks through plans in small steps, to find where the cost of one jumps."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from dprlhf.privacy.accounting import Adjacency, Mechanism, Partition, epsilon, noise_multiplier

LIMIT = 0.05
"""Largest relative jump of a noise multiplier, or of an epsilon, that is no cliff."""


@dataclass(frozen=True)
class Point:
    """A plan. Its cost is the noise for ``epsilon``, or the epsilon of ``noise`` where it is given.

    Attributes:
        slots: Rounds for each participation.
    """

    partition: Partition = "random-allocation"
    adjacency: Adjacency = "zero-out"
    epsilon: float = 1.0
    noise: float | None = None
    delta: float = 1e-6
    slots: int = 64
    participations: int = 1
    bands: int = 1

    def cost(self) -> float:
        terms: dict[str, Any] = {
            "rounds": self.slots * self.participations, "partition": self.partition,
            "adjacency": self.adjacency, "participations": self.participations, "bands": self.bands,
        }  # fmt: skip
        if self.noise is None:
            return noise_multiplier(self.epsilon, self.delta, **terms)[0]
        return epsilon(Mechanism(self.noise, **terms), self.delta).epsilon


Axis = Literal["epsilon", "noise", "delta", "slots", "participations"]

RANGES: dict[Axis, tuple[float, float]] = {
    "epsilon": (0.02, 1000.0),
    "noise": (0.04, 20.0),
    "delta": (1e-15, 1e-3),
    "slots": (4, 4096),
    "participations": (1, 128),
}


def walk(
    start: Point, axis: Axis, count: int, low: float = 0.0, high: float = math.inf
) -> list[Point]:
    """Return plans that differ in one term, in about ``count`` geometric steps of its range."""
    ends = RANGES[axis]
    values = np.geomspace(max(low, ends[0]), min(high, ends[1]), count)
    whole = axis in ("slots", "participations")
    found = sorted({round(v) for v in values}) if whole else values.tolist()
    return [replace(start, **{axis: value}) for value in found]


def jumps(
    points: Sequence[Point], axis: Axis, costs: Sequence[float]
) -> Iterator[tuple[float, Point]]:
    """Yield by how much the cost of each plan leaves what its two neighbours lead to expect.

    The cost is interpolated between them on logarithmic scales; where it jumps between two plans,
    both are half of the jump away from it.
    """
    at = np.log([getattr(point, axis) for point in points])
    most = math.inf if points[0].noise is None else 500.0  # bounds on an ε beyond are coarse
    for i in range(1, len(points) - 1):
        near = costs[i - 1 : i + 2]
        if not all(1e-2 < cost < most for cost in near):  # an epsilon falls to 0 at once
            continue
        first, here, last = np.log(near)
        share = (at[i] - at[i - 1]) / (at[i + 1] - at[i - 1])
        yield 2 * abs(here - (first + share * (last - first))), points[i]


def largest(points: Sequence[Point], axis: Axis) -> tuple[float, Point]:
    """Return the largest jump on a walk, and where it is."""
    return max(jumps(points, axis, [p.cost() for p in points]), key=lambda jump: jump[0])
