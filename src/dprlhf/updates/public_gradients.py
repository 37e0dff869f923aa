"""The vectors that an update would clip, computed on PUBLIC prompts: a subspace is fitted to them.

The update itself defines what a user contributes (a gradient, or the change of a copy), so it is
run on public rows up to its first sum over users, and the summands are returned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.boundary import BoundedSum, Private, Released, open_private
from dprlhf.errors import DprlhfError
from dprlhf.gradients.micro_batches import user_gradients
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.protocol import Rows
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses, Tick
from dprlhf.rollout.logprobs import base_logprobs
from dprlhf.updates import find_update
from dprlhf.updates.round import PrivateRound, Terms, subtract_kl
from dprlhf.updates.telemetry import TelemetryCoordinates

Vectors = Private[Iterable[tuple[NDArray[np.int64], torch.Tensor]]]


def public_gradients(
    policy: CausalLMPolicy,
    responses: Responses,
    scores: Scores,  # Their rewards, [rows]
    *,
    update: recipe.PrivateUpdate,
    kl: recipe.KL,
    reward_range: float,
    optimizer: torch.optim.Optimizer,
    t: int,
    tick: Tick | None = None,
) -> torch.Tensor:
    """Return what PUBLIC users would contribute to round t, ``[users, dimension]``; no step."""
    round_ = _PublicRound(
        policy=policy,
        responses=Private(responses),
        scores=Private(scores),
        plan=Terms(update.clip_norm, 0.0, 1.0, responses.users),
        telemetry=TelemetryCoordinates(0.0, reward_range),
        optimizer=optimizer,
        reduce=lambda total: total,
        gate=no_gate,
        t=t,
        tick=tick,
    )
    subtract_kl(round_, kl, update.batch_size)
    try:
        find_update(update)(round_, update)
    except _SummandsError as summands:
        return _stacked(policy, open_private(summands.vectors), responses.users)
    raise DprlhfError(f"update.subspace: update.name {update.name} made no sum over users")


def weighted_gradients(
    policy: CausalLMPolicy, responses: Responses, weights: NDArray[np.float64], batch_size: int
) -> torch.Tensor:
    """Return Σ_rows weight · ∇ log π of each PUBLIC user, ``[users, dimension]``."""
    vectors = _whole(policy, responses, weights, batch_size=batch_size)
    return _stacked(policy, vectors, responses.users)


def likelihood_gradients(
    policy: CausalLMPolicy,
    responses: Responses,
    *,
    batch_size: int,
    optimizer: torch.optim.Optimizer,
    t: int,
) -> torch.Tensor:
    """Return each public user's gradient of its responses' log-likelihood under the base model."""
    # The policy gradient (leave-one-out) whose reward is a response's mean log μ a token: a step
    # along its mean over users lowers the base model's perplexity of what the policy writes.
    tokens = np.maximum(responses.policy_mask.numpy().sum(1), 1)
    values = base_logprobs(policy, responses, batch_size).sum(1) / tokens
    return public_gradients(
        policy,
        responses,
        Scores(values, np.ones(len(values), dtype=np.bool_), {}),
        update=recipe.PG(batch_size=batch_size),
        kl=recipe.KL(),
        reward_range=math.inf,
        optimizer=optimizer,
        t=t,
    )


def _whole(
    policy: CausalLMPolicy, responses: Rows, weights: NDArray[np.float64], **named: Any
) -> Iterator[tuple[NDArray[np.int64], torch.Tensor]]:
    for users, _, gradients, _ in user_gradients(policy, responses, weights, rows=None, **named):
        yield users, gradients[:, 0]


def _stacked(
    policy: CausalLMPolicy, vectors: Iterable[tuple[NDArray[np.int64], torch.Tensor]], users: int
) -> torch.Tensor:
    parameter = next(iter(policy.parameters.values()))
    stacked = torch.zeros(users, policy.dimension, dtype=parameter.dtype)
    for places, of_places in vectors:
        real = places >= 0
        stacked[places[real]] = of_places[torch.from_numpy(real)].to(stacked)
    return stacked


class _SummandsError(Exception):
    """Raised in place of the first clipped sum, to return each public user's unclipped vector."""

    def __init__(self, vectors: Vectors) -> None:
        super().__init__()
        self.vectors = vectors


class _PublicRound(PrivateRound):
    """A round of public users, which ends where their vectors would be summed."""

    def clipped_sum(self, weights: Private[NDArray[np.float64]], *, batch_size: int) -> NoReturn:
        """End the update with each user's Σ_rows weight · ∇ log π(y|x)."""
        vectors = partial(_whole, self.policy, batch_size=batch_size, tick=self.tick)
        raise _SummandsError(self.responses.map(vectors, weights))

    def clipped_vectors(self, vectors: Vectors, dimension: int | None = None) -> NoReturn:
        """End the update with the users' vectors."""
        if dimension is not None:
            raise DprlhfError(
                "update.subspace: this update releases vectors that are not of the policy's"
                " parameters: leave subspace out"
            )
        raise _SummandsError(vectors)


def no_gate(bounded: BoundedSum) -> Released[torch.Tensor]:
    """Stand in for the gate where only public rows are read."""
    raise AssertionError("public rows need no gate")
