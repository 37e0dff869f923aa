"""An oracle draws on its data as often as its plan charges for, neither more nor less."""

from typing import Any

import pytest
import torch

from dprlhf.updates.oracles import ImproperBatchSGD, ProjectedSGD, released_gradient


@pytest.mark.parametrize("kind", [ImproperBatchSGD, ProjectedSGD])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_solution_takes_the_planned_number_of_releases(kind: Any, steps: int) -> None:
    names = kind.__dataclass_fields__
    given = {"steps": steps, "feature_bound": 1.0, "target_bound": 1.0, "radius": 1.0}
    oracle = kind(**{name: value for name, value in given.items() if name in names})
    taken = 0

    def release(contributions: Any, bound: float) -> torch.Tensor:
        nonlocal taken
        taken += 1
        return torch.zeros(3, dtype=torch.float64)

    oracle.solve(release, 3)
    assert taken == oracle.releases


@pytest.mark.parametrize("dimension", [7, 257, 2304])
def test_a_contribution_does_not_depend_on_its_place(dimension: int) -> None:
    """Which place a user has depends on who else is there, and so must no bit of its answer."""
    random = torch.Generator().manual_seed(0)
    features = torch.randn(17, dimension, generator=random)
    targets = torch.randn(17, generator=random)
    w = torch.randn(dimension, generator=random, dtype=torch.float64)
    found: list[torch.Tensor] = []
    for places in (torch.arange(17), torch.arange(17).roll(3)):

        def release(contribution: Any, bound: float, places: Any = places) -> torch.Tensor:
            answers = contribution(features[places], targets[places])
            found.append(answers[places.argsort()])
            return torch.zeros(dimension, dtype=torch.float64)

        released_gradient(release, w, 1.0, 3.0)
    assert torch.equal(found[0], found[1])
