"""A round without a trainer: the gate adds no noise, divides by nothing, and remembers."""

from __future__ import annotations

import torch

from dprlhf.boundary import BoundedSum, Private, Released
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses
from dprlhf.telemetry import TelemetryCoordinates
from dprlhf.updates import PrivateRound


class OpenGate:
    """Returns every sum as it is (divided by ``divisor``), and keeps it."""

    def __init__(self, divisor: float = 1.0) -> None:
        self.divisor = divisor
        self.sums: list[BoundedSum] = []

    def __call__(self, bounded: BoundedSum) -> Released[torch.Tensor]:
        self.sums.append(bounded)
        return Released(bounded.total / self.divisor, 1)


def round_of(
    policy: CausalLMPolicy,
    responses: Responses,
    scores: Scores,
    *,
    clip_norm: float,
    telemetry: TelemetryCoordinates | None = None,
    divisor: float = 1.0,
    learning_rate: float = 0.0,
) -> tuple[PrivateRound, OpenGate]:
    """Return a round with an SGD optimizer, and its gate."""
    gate = OpenGate(divisor)
    made = PrivateRound(
        policy=policy,
        responses=Private(responses),
        scores=Private(scores),
        clip_norm=clip_norm,
        telemetry=telemetry or TelemetryCoordinates(0.0, 3.0),
        optimizer=torch.optim.SGD(policy.parameters.values(), lr=learning_rate),
        reduce=lambda x: x,
        gate=gate,
    )
    return made, gate
