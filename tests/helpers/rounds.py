"""A round without a trainer, and a gate that adds no noise and remembers what it was given."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from dprlhf.boundary import BoundedSum, Private, Released, open_released
from dprlhf.data.users import Prompts
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses
from dprlhf.updates import PrivateRound
from dprlhf.updates.round import Terms
from dprlhf.updates.telemetry import TelemetryCoordinates

T = TypeVar("T")


class OpenGate:
    """Returns every sum as it is (divided by ``expected_batch_size``), and keeps it."""

    def __init__(self, expected_batch_size: float = 1.0) -> None:
        self.expected_batch_size = expected_batch_size
        self.sums: list[BoundedSum] = []

    def __call__(self, bounded: BoundedSum) -> Released[torch.Tensor]:
        self.sums.append(bounded)
        return Released(bounded.total / self.expected_batch_size, 1)


def value_of(released: Released[T]) -> T:
    """Return what a released value holds."""
    return open_released(released, "a test")


def round_of(
    policy: CausalLMPolicy,
    responses: Responses,
    scores: Scores,
    *,
    clip_norm: float,
    telemetry: TelemetryCoordinates | None = None,
    noise_multiplier: float = 0.0,
    expected_batch_size: float = 1.0,
    learning_rate: float = 0.0,
    gate: OpenGate | None = None,
) -> tuple[PrivateRound, OpenGate]:
    """Return a round with an SGD optimizer, and its gate."""
    gate = gate or OpenGate(expected_batch_size)
    made = PrivateRound(
        policy=policy, responses=Private(responses), scores=Private(scores),
        plan=Terms(clip_norm, noise_multiplier, expected_batch_size, users=1000),
        telemetry=telemetry or TelemetryCoordinates(0.0, 3.0),
        optimizer=torch.optim.SGD(policy.parameters.values(), lr=learning_rate), reduce=lambda x: x,
        gate=gate, t=1,
    )  # fmt: skip
    return made, gate


def random_scores(responses: Responses, seed: int = 0) -> Scores:
    """Return a valid score of each response, between -3 and 3."""
    values = np.random.default_rng(seed).uniform(-3, 3, len(responses.user))
    return Scores(values, np.ones(len(values), dtype=bool), {})


def token_logprobs(
    policy: CausalLMPolicy, responses: Responses, row: int, model: Any = None
) -> torch.Tensor:
    """log π(token | what stands before it) of one unpadded response, ``[tokens]``.

    Under another model than the policy's where one is given.
    """
    ids = responses.tokens[row][responses.mask[row].bool()]
    prompt = int(responses.mask[row, : -responses.max_new_tokens].sum())
    logits = (model or policy.model)(input_ids=ids[None]).logits[0] / policy.temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    return logprobs[range(prompt - 1, len(ids) - 1), ids[prompt:]]


def flat_gradient(policy: CausalLMPolicy, value: torch.Tensor) -> torch.Tensor:
    """∇ value by autograd, ``[dimension]``."""
    gradients = torch.autograd.grad(value, list(policy.parameters.values()))
    return torch.cat([g.flatten() for g in gradients])


def flat_parameters(policy: CausalLMPolicy) -> torch.Tensor:
    """θ, ``[dimension]``."""
    return torch.cat([p.detach().flatten() for p in policy.parameters.values()])


@torch.no_grad()
def set_parameters(policy: CausalLMPolicy, flat: torch.Tensor) -> None:
    """Set θ from ``[dimension]``."""
    offset = 0
    for parameter in policy.parameters.values():
        parameter.copy_(flat[offset : offset + parameter.numel()].reshape(parameter.shape))
        offset += parameter.numel()


def some_users(
    responses: Responses, scores: Scores, users: Sequence[int], *, in_place: bool = False
) -> tuple[Responses, Scores]:
    """The same round with these of its users only; or all in place, and the others blank."""
    rows = np.flatnonzero(np.isin(responses.user, users))
    prompts, owner = np.unique(responses.prompt[rows], return_inverse=True)
    held = responses.prompts
    own = responses.user[rows]
    number = np.full(len(responses.user) + 1, -1)  # the last one for places without a row
    number[rows] = np.arange(len(rows))
    fewer = Prompts(
        [held.prompts[p] for p in prompts], held.users[prompts], held.slots[prompts], {}
    )
    chosen = dataclasses.replace(
        responses, tokens=responses.tokens[rows], mask=responses.mask[rows], prompt=owner,
        user=own if in_place else np.searchsorted(np.sort(users), own),
        from_base=responses.from_base[rows],
        tool_mask=None if responses.tool_mask is None else responses.tool_mask[rows],
        texts=[""] * len(rows), prompts=fewer, users=responses.users if in_place else len(users),
        grid=number[responses.grid] if in_place else np.empty(0),
    )  # fmt: skip
    return chosen, scores.take(rows)
