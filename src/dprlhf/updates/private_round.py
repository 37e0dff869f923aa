"""One round as an update sees it: the users' batch, and the only way from there to the policy.

An update turns the batch into a clipped sum over users, releases it through the gate, and moves the
policy along what was released; some updates do this several times in a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf.boundary import BoundedSum, Private, Released, open_private
from dprlhf.gradients.clipping import (
    ClippedSum,
    Weighted,
    clipped_sum,
    clipped_vectors,
    vector_norm,
)
from dprlhf.optimizers import ascend
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses, Tick
from dprlhf.telemetry import TelemetryCoordinates


@dataclass(repr=False, eq=False)
class PrivateRound:
    """The users of one round on this process, and the tools of an update.

    Attributes:
        policy: π_t; :meth:`step` moves it.
        responses: all responses of the round's users.
        scores: their rewards as the update sees them, ``[rows]``; less the KL penalty, which makes
            them ``[rows, response]`` where it is taken token by token.
        clip_norm: S of the plan.
        noise_multiplier: z of the plan.
        divisor: m of the plan.
        telemetry: the coordinates that ride in the round's first release.
        optimizer: of the policy's parameters; it sees released values only.
        reduce: sums a tensor over all processes.
        gate: turns the sum over all processes into a released mean.
        number: t, from 1.
        tick: told the number of rows done.
        unpenalised: the scores without a KL penalty, for telemetry.
        released: the first release without telemetry; ``[dimension]`` where it is a gradient.
        telemetry_released: the telemetry coordinates of the first release, ``[count]``.
        norms: each user's norm before clipping in the first release, for secret telemetry.
    """

    policy: CausalLMPolicy
    responses: Private[Responses]
    scores: Private[Scores]
    clip_norm: float
    noise_multiplier: float
    divisor: float
    telemetry: TelemetryCoordinates
    optimizer: torch.optim.Optimizer
    reduce: Callable[[torch.Tensor], torch.Tensor]
    gate: Callable[[BoundedSum], Released[torch.Tensor]]
    number: int
    tick: Tick | None = None
    unpenalised: Private[Scores] = field(init=False)
    released: torch.Tensor | None = None
    telemetry_released: torch.Tensor | None = None
    norms: Private[NDArray[np.float64]] | None = None

    def __post_init__(self) -> None:
        self.unpenalised = self.scores

    @property
    def valid(self) -> Private[NDArray[np.bool_]]:
        """Which users have a valid score for every response, ``[users]``; others contribute 0."""
        responses, scores = open_private(self.responses), open_private(self.scores)
        return Private(users_with_valid_scores(responses, scores))

    def clipped_sum(self, weights: Private[NDArray[np.float64]], *, batch_size: int) -> ClippedSum:
        """Return Σ_u clip(Σ_rows weight · ∇ log π(y|x), S), over all processes.

        Args:
            weights: of each row, ``[rows]``, or of each response token, ``[rows, response]``.
            batch_size: rows differentiated at once.
        """
        responses = open_private(self.responses)
        extra, extra_norm = self._extra()
        return clipped_sum(
            self.policy,
            Private(Weighted(responses, open_private(weights), extra, extra_norm)),
            clip_norm=self.clip_norm,
            batch_size=batch_size,
            reduce=self.reduce,
            tick=self.tick,
        )

    @property
    def radius(self) -> float:
        """√(S² − e²), the bound on a user's vector beside its telemetry coordinates."""
        _, extra_norm = self._extra()
        return vector_norm(self.clip_norm, extra_norm)

    def clipped_vectors(
        self,
        vectors: Private[Iterable[tuple[NDArray[np.int64], torch.Tensor]]],
        dimension: int | None = None,
    ) -> ClippedSum:
        """Return Σ_u clip(v_u, S) over all processes.

        Args:
            vectors: some users and their vectors, ``[n, dimension]``, until no user is left.
            dimension: of a vector; None for that of the policy.
        """
        extra, extra_norm = self._extra()
        return clipped_vectors(
            vectors,
            self.policy.dimension if dimension is None else dimension,
            extra=Private(extra),
            extra_norm=extra_norm,
            clip_norm=self.clip_norm,
            reduce=self.reduce,
        )

    def release(self, clipped: ClippedSum) -> torch.Tensor:
        """Charge the round (once) and return the noised mean, float64, without telemetry."""
        released = self.gate(clipped.bounded).value
        if self.released is None:
            width = len(released) - self.telemetry.count
            self.telemetry_released = released[width:]
            self.released = released = released[:width]
            self.norms = clipped.norms
        return released

    def step(self, direction: torch.Tensor) -> None:
        """Let the optimizer ascend along a released direction, ``[dimension]``."""
        ascend(self.policy.parameters.values(), self.optimizer, direction)

    def _extra(self) -> tuple[NDArray[np.float64], float]:
        responses, scores = open_private(self.responses), open_private(self.unpenalised)
        if self.released is not None:
            return np.zeros((responses.users, 0)), 0.0
        valid = open_private(self.valid)
        return self.telemetry.of_users(responses.user, scores.values, valid), self.telemetry.norm


def users_with_valid_scores(responses: Responses, scores: Scores) -> NDArray[np.bool_]:
    """Return which users have a valid score for every response, ``[users]``."""
    broken = np.bincount(responses.user, ~scores.valid, minlength=responses.users)
    valid: NDArray[np.bool_] = broken == 0
    return valid
