"""Neighbouring datasets, for every update: what a user adds to each sum, and what a round leaves.

One user's part of every released sum is its own, at most S long, whoever else is there. And of a
round nothing but its released values reaches the next one.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch

from dprlhf import recipe
from dprlhf.boundary import BoundedSum, Private, Released, open_private
from dprlhf.gradients.clipping import micro_batches
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses
from dprlhf.updates import UPDATES, PrivateRound
from dprlhf.updates.kl import subtract_kl
from dprlhf.updates.telemetry import TelemetryCoordinates
from gradients.test_gradients import Shape, batch_of, policy_of
from helpers.rounds import some_users

K = 4
TIGHT, WIDE = 0.3, 100.0
"""Clip norms: one that shortens every user, and one that would not hide another length."""
SPECS: dict[str, Any] = {
    "pg": recipe.PG(),
    "pg, paired": recipe.PG(baseline="paired"),
    "grpo": recipe.GRPO(name="grpo"),
    "ppo": recipe.PPO(name="ppo", epochs=2, local_learning_rate=1.0),
    "ppo, adam": recipe.PPO(name="ppo", local_optimizer="adam", local_learning_rate=0.01),
    "rebel": recipe.REBEL(name="rebel", steps=2),
    "rebel, gauss-newton": recipe.REBEL(name="rebel", solver="gauss-newton"),
    "npg": recipe.NPG(name="npg"),
    "npg, statistics": recipe.NPG(
        name="npg", oracle=recipe.Oracle(name="sufficient-statistics", sketch=16)
    ),
    "npg, gain": recipe.NPG(name="npg", oracle=recipe.Oracle(steps=2, gain=16.0)),
    "npg, sketch": recipe.NPG(name="npg", oracle=recipe.Oracle(steps=2, sketch=30)),
}


class FixedGate:
    """Keeps a copy of every sum, and releases the same values whatever the users were."""

    def __init__(self, clip_norm: float) -> None:
        self.clip_norm = clip_norm
        self.sums: list[torch.Tensor] = []

    def __call__(self, bounded: BoundedSum) -> Released[torch.Tensor]:
        assert bounded.clip_norm == self.clip_norm
        self.sums.append(bounded.total.clone())
        generator = torch.Generator().manual_seed(len(self.sums))
        size = bounded.total.shape
        bounded.total.zero_()  # it is used up: who steps along it steps nowhere
        return Released(0.01 * torch.randn(size, generator=generator, dtype=torch.float64), 1)


def single(lengths: list[int]) -> Shape:
    """Users with one prompt each."""
    return Shape(prompts=[[n] for n in lengths], k=K, length=4)


def data(seed: int, shape: Shape, shuffled: bool = False) -> tuple[Responses, Scores]:
    """Return a round where half of each prompt's responses are the base policy's."""
    responses = batch_of(shape, seed, shuffled)
    half = np.arange(shape.k) < shape.k // 2
    responses.from_base[:] = np.tile(half, len(responses.prompts))
    values = np.random.default_rng(seed).uniform(-3, 3, len(responses.user))
    return responses, Scores(values, np.ones(len(values), dtype=bool), {})


def run(
    policy: CausalLMPolicy,
    optimizer: torch.optim.Optimizer,
    spec: Any,
    responses: Responses,
    scores: Scores,
    clip_norm: float,
    batch_size: int = 8,
) -> list[torch.Tensor]:
    """Run one round, and return the sums that it handed to the gate."""
    gate = FixedGate(clip_norm)
    round_ = PrivateRound(
        policy=policy,
        responses=Private(responses),
        scores=Private(scores),
        clip_norm=clip_norm,
        noise_multiplier=1.0,
        expected_batch_size=3.0,
        telemetry=TelemetryCoordinates(0.14 * clip_norm, 3.0),
        optimizer=optimizer,
        reduce=lambda x: x,
        gate=gate,
        number=1,
    )
    subtract_kl(round_, recipe.KL(beta=0.2), batch_size)
    changes = {"clip_norm": clip_norm, "batch_size": batch_size}
    UPDATES[spec.name](round_, spec.model_copy(update=changes))
    assert len(gate.sums) == spec.releases
    return gate.sums


@functools.cache
def start() -> tuple[CausalLMPolicy, dict[str, torch.Tensor], set[str]]:
    policy = policy_of.__wrapped__("gpt2", "lora-b")  # of its own: these rounds train it
    return policy, policy.state(), set(vars(policy))


def fresh() -> tuple[CausalLMPolicy, torch.optim.Optimizer]:
    """Return the policy as it was at first, and an optimizer for it."""
    policy, state, attributes = start()
    policy.load_state(state)
    for name in set(vars(policy)) - attributes:
        delattr(policy, name)
    return policy, torch.optim.SGD(policy.parameters.values(), lr=0.1)


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
        round_.step(raw[: round_.policy.dimension])
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
