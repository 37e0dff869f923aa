"""Plans in small steps: what one costs nowhere jumps where its terms hardly change."""

import math

import pytest

from helpers.cliffs import LIMIT, Axis, Point, jumps, largest, walk

ALLOCATED = Point()


@pytest.mark.parametrize("partition", ["fixed", "stream"])
@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
@pytest.mark.parametrize("axis", ["epsilon", "delta", "slots"])
def test_one_gaussian_has_no_cliff(partition: str, adjacency: str, axis: Axis) -> None:
    start = Point(partition, adjacency)  # type: ignore[arg-type]
    assert largest(walk(start, axis, 100), axis)[0] < LIMIT


@pytest.mark.parametrize(
    ("axis", "count"), [("epsilon", 50), ("delta", 30), ("slots", 16)], ids=str
)
def test_random_allocation_has_no_cliff(axis: Axis, count: int) -> None:
    jump, place = largest(walk(ALLOCATED, axis, count), axis)
    assert jump < LIMIT, place


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        Point("poisson", noise=1.0, participations=3),
        Point(noise=1.0, participations=3),
        Point(adjacency="replace-one", noise=1.0),
        Point(adjacency="replace-one", noise=2.0, participations=2),
    ],
    ids=str,
)
def test_composed_losses_have_no_cliff(start: Point) -> None:
    """In steps as wide as scripts/review/cliffs.py takes from 4 slots to 4,096."""
    jump, place = largest(walk(start, "slots", 3, low=26, high=93), "slots")
    assert jump < LIMIT, place


def test_a_cliff_is_seen() -> None:
    """The control: a cost that rises by a tenth between two plans, and one that bends."""
    points = walk(ALLOCATED, "delta", 30)
    smooth = [math.log(1 / point.delta) ** 0.5 for point in points]
    assert max(jump for jump, _ in jumps(points, "delta", smooth)) < 0.02
    torn = [cost * (1.1 if i > 12 else 1) for i, cost in enumerate(smooth)]
    assert max(jump for jump, _ in jumps(points, "delta", torn)) > LIMIT
