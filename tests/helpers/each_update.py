"""One round of each update, behind a gate that releases the same whoever the users were."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from dprlhf import recipe
from dprlhf.boundary import Private
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses
from dprlhf.updates import UPDATES, PrivateRound
from dprlhf.updates.kl import subtract_kl
from dprlhf.updates.telemetry import TelemetryCoordinates
from helpers.batches import Shape, batch_of
from helpers.policies import policy_of
from helpers.rounds import FixedGate

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
