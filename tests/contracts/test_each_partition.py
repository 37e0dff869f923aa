"""What every partition must do: its draw is the one that was accounted for."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from dprlhf.privacy.partitions import all_partitions
from dprlhf.testing import check_partition

SHIPPED = all_partitions()


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_draw_and_accountant_agree(name: Any) -> None:
    report = check_partition(name)
    if not SHIPPED[name].disjoint:  # there a test that does not know the rounds gains less
        assert report.attained["zero-out"][0] > 0.9 * report.delta


@pytest.mark.slow
def test_several_participations() -> None:
    check_partition("random-allocation", participations=2)


FIXED, POISSON = SHIPPED["fixed"], SHIPPED["poisson"]
ALLOCATED = SHIPPED["random-allocation"]


def in_half_of_the_rounds(users: int, rounds: int, participations: int, stream: Any) -> Any:
    drawn = ALLOCATED.draw(users, rounds // 2, participations, stream)
    starts = np.append(drawn.starts, [users] * (rounds - rounds // 2))
    return dataclasses.replace(drawn, starts=starts)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "half of epsilon": (
        {"epsilon": lambda *terms: tuple(x / 2 for x in ALLOCATED.epsilon(*terms))},
        "'epsilon'.*states too little",
    ),
    "drawn as fixed batches": ({"draw": FIXED.draw}, "'independence'"),
    "drawn in order of arrival": ({"draw": SHIPPED["stream"].draw}, "'draw'.*another key"),
    "drawn as by Poisson": ({"draw": POISSON.draw}, "'epsilon'.*states too little"),
    "drawn among half of the rounds": (
        {"draw": in_half_of_the_rounds},
        "'epsilon'.*states too little",
    ),
    "audited as Poisson": ({"log_likelihood": POISSON.log_likelihood}, "'likelihood'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_partition_is_refused(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, message = BAD[bad]
    spec = dataclasses.replace(ALLOCATED, **changes)
    for module in ("testing.partition", "privacy.partitions.base", "privacy.partitions"):
        monkeypatch.setattr(f"dprlhf.{module}.partition_named", lambda name: spec)
    with pytest.raises(AssertionError, match=message):
        check_partition("random-allocation")
