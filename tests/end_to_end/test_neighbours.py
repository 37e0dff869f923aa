"""Neighbouring datasets, for every update: what a user adds to each sum, and what a round leaves.

One user's part of every released sum is its own, at most S long, whoever else is there. And of a
round nothing but its released values reaches the next one.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from dprlhf.boundary import Private, Released, open_private
from dprlhf.gradients.clipping import micro_batches
from dprlhf.rewards import Scores
from dprlhf.updates import UPDATES, PrivateRound
from helpers.each_update import SPECS, TIGHT, WIDE, K, data, fresh, run, single
from helpers.rounds import some_users


@pytest.mark.parametrize("clip_norm", [TIGHT, WIDE])
@pytest.mark.parametrize("name", SPECS)
def test_a_users_part_of_every_sum_is_its_own(name: str, clip_norm: float) -> None:
    responses, scores = data(0, single([3, 5, 2, 4]))
    scores.valid[2 * K] = False  # the third user contributes nothing but that it is there
    everybody = list(range(responses.users))

    def sums(users: list[int]) -> list[torch.Tensor]:
        return run(*fresh(), SPECS[name], *some_users(responses, scores, users), clip_norm)

    whole = sums(everybody)
    alone = [sums([user]) for user in everybody]
    for j, total in enumerate(whole):
        parts = [parts[j] for parts in alone]
        assert all(float(part.norm()) <= clip_norm for part in parts)
        assert float(parts[0].norm()) > 1e-6
        assert float(parts[2].norm()) == 0.0
        torch.testing.assert_close(total, torch.stack(parts).sum(0), rtol=1e-9, atol=1e-9)
    for j, total in enumerate(sums(everybody[1:])):
        assert float((whole[j] - total).norm()) <= clip_norm


@pytest.mark.parametrize("name", SPECS)
def test_a_round_leaves_nothing_but_what_was_released(name: str) -> None:
    """Two first rounds of other users that release the same: the second round cannot differ."""
    second = data(9, single([3, 4]))
    found = []
    for seed in (1, 2):
        policy, optimizer = fresh()
        first = data(seed, single([2, 5, 3]))
        before = run(policy, optimizer, SPECS[name], *first, WIDE)
        state = copy.deepcopy(optimizer.state_dict())
        found.append(
            (before, run(policy, optimizer, SPECS[name], *second, WIDE), state, policy.state())
        )
    (before, sums, state, weights), (others, again, other_state, other_weights) = found
    assert any((a != b).any() for a, b in zip(before, others, strict=True))  # other users indeed
    assert all(torch.equal(a, b) for a, b in zip(sums, again, strict=True))
    assert repr(state) == repr(other_state)
    assert all(torch.equal(w, other_weights[n]) for n, w in weights.items())


def test_the_harness_sees_what_outlives_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A critic that keeps a mean reward, and a step along a sum as it is."""
    real = UPDATES["pg"]

    def keeps(round_: PrivateRound, spec: Any) -> None:
        held = getattr(round_.policy, "critic", 0.0)
        scores = open_private(round_.scores)
        round_.policy.critic = float(scores.values.mean())  # type: ignore[attr-defined]
        round_.scores = Private(Scores(scores.values * (1 + abs(held)), scores.valid, {}))
        real(round_, spec)

    def steps(round_: PrivateRound, spec: Any) -> None:
        weights = Private(np.ones(len(open_private(round_.responses).user)))
        raw = round_.clipped_sum(weights, batch_size=8).bounded.total
        round_.step(Released(raw[: round_.policy.dimension], 1))
        real(round_, spec)

    for broken in (keeps, steps):
        monkeypatch.setitem(UPDATES, "pg", broken)
        with pytest.raises(AssertionError):
            test_a_round_leaves_nothing_but_what_was_released("pg")


def test_the_shape_of_a_users_micro_batch_does_not_depend_on_the_others() -> None:
    """Or one user more would change how the others' contributions round."""
    responses, scores = data(0, single([3, 5, 20, 4, 4]))

    def shapes(users: list[int]) -> dict[int, tuple[int, int]]:
        chosen, _ = some_users(responses, scores, users)
        return {
            users[u]: (batch.size, batch.width)
            for batch in micro_batches(chosen, 8)
            for u in batch.users
        }

    everybody = shapes([0, 1, 2, 3, 4])
    for user in range(5):
        assert shapes([user])[user] == everybody[user]
    assert len(set(everybody.values())) == 2  # two widths
