"""The shipped contracts refuse what they are there to refuse: one bad update for each check."""

import re
from typing import Any

import numpy as np
import pytest

from dprlhf import recipe
from dprlhf.boundary import Private, open_private
from dprlhf.errors import DprlhfError
from dprlhf.rewards import Scores
from dprlhf.testing import check_partition, check_update, update
from dprlhf.updates import UPDATES, PrivateRound

pg = UPDATES["pg"]


def no_release(round_: PrivateRound, spec: Any) -> None:
    """Looks at the users and releases nothing, although one sum is charged."""


def scales_its_sum(round_: PrivateRound, spec: Any) -> None:
    weights = Private(np.ones(len(open_private(round_.responses).user)))
    clipped = round_.clipped_sum(weights, batch_size=spec.batch_size)
    clipped.bounded.total.mul_(30)
    round_.step(round_.release(clipped))


def mean_of_the_batch(round_: PrivateRound, spec: Any) -> None:
    scores = open_private(round_.scores)
    mean = scores.values.mean() if len(scores.values) else 0.0
    round_.scores = Private(Scores(scores.values * (1 + mean), scores.valid, {}))
    pg(round_, spec)


def mean_of_a_later_batch(round_: PrivateRound, spec: Any) -> None:
    (pg if round_.t == 1 else mean_of_the_batch)(round_, spec)


def failures_as_they_come(round_: PrivateRound, spec: Any) -> None:
    scores = open_private(round_.scores)
    round_.scores = Private(Scores(scores.values, np.ones_like(scores.valid), {}))
    pg(round_, spec)


def mean_of_a_micro_batch(round_: PrivateRound, spec: Any) -> None:
    scores = open_private(round_.scores)
    round_.scores = Private(Scores(scores.values / spec.batch_size, scores.valid, {}))
    pg(round_, spec)


def adds_a_constant_for_nobody(round_: PrivateRound, spec: Any) -> None:
    if open_private(round_.responses).users:
        pg(round_, spec)
        return
    clipped = round_.clipped_sum(Private(np.zeros(0)), batch_size=spec.batch_size)
    clipped.bounded.total.add_(1.0)
    round_.step(round_.release(clipped))


def steps_along_the_sum(round_: PrivateRound, spec: Any) -> None:
    weights = Private(np.ones(len(open_private(round_.responses).user)))
    raw = round_.clipped_sum(weights, batch_size=spec.batch_size).bounded.total
    pg(round_, spec)
    next(iter(round_.policy.parameters.values())).data += 0.01 * raw.sum()


def remembers(round_: PrivateRound, spec: Any) -> None:
    held = getattr(round_.policy, "held", 0.0)
    scores = open_private(round_.scores)
    if len(scores.values):
        round_.policy.held = float(np.nanmean(scores.values))  # type: ignore[attr-defined]
    round_.scores = Private(Scores(scores.values * (1 + abs(held)), scores.valid, {}))
    pg(round_, spec)


def steps_along_the_sum_a_round_later(round_: PrivateRound, spec: Any) -> None:
    scores = open_private(round_.scores)
    pg(round_, spec)
    next(iter(round_.policy.parameters.values())).data += getattr(round_.policy, "kept", 0.0)
    round_.policy.kept = float(np.nansum(scores.values))  # type: ignore[attr-defined]


BAD = {
    no_release: "'releases'",
    scales_its_sum: "'influence'.*more than S",
    mean_of_the_batch: "'influence'.*who else is in the round",
    mean_of_a_later_batch: "'influence'.*round 2.*who else is in the round",
    failures_as_they_come: "'failures'",
    mean_of_a_micro_batch: "'micro-batches'",
    adds_a_constant_for_nobody: "'empty round'.*not zero",
    steps_along_the_sum: "'leftovers'.*policy or optimizer differ",
    steps_along_the_sum_a_round_later: "'leftovers'.*policy or optimizer differ",
    remembers: "'leftovers'.*a round differs",
}


@pytest.mark.slow
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.__name__)
def test_a_bad_update_is_refused_by_the_check_that_is_there_for_it(bad, monkeypatch):
    there_for_it = re.sub("[- ]", "_", BAD[bad].split("'")[1])
    for check in ("influence", "failures", "micro_batches", "leftovers", "empty_round"):
        if there_for_it not in (check, "releases"):  # every round has that one
            monkeypatch.setattr(update, f"_check_{check}", lambda *given: 1.0)
    with pytest.raises(AssertionError, match=BAD[bad]):
        check_update(bad, recipe.PG())


def test_what_is_no_update_or_partition_is_named() -> None:
    with pytest.raises(DprlhfError, match=r"give the function of an update.*, not 'pg'$"):
        check_update("pg", recipe.PG())  # type: ignore[arg-type]
    with pytest.raises(DprlhfError, match=r"there is no partition 'nope': name one of random-al"):
        check_partition("nope")  # type: ignore[arg-type]
