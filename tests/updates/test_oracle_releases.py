"""An oracle draws on its data as often as its plan charges for, neither more nor less."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dprlhf.updates.privls.improper_batch_sgd import ImproperBatchSGD
from dprlhf.updates.privls.projected_sgd import ProjectedSGD


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
