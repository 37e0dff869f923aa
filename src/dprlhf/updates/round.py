"""One round as an update sees it: the users' batch, and the only way from there to the policy.

An update turns the batch into a clipped sum over users, releases it through the gate, and moves the
policy along what was released; some updates do this several times in a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf.boundary import BoundedSum, Private, Released, check_released, open_private
from dprlhf.gradients.clipping import (
    ClippedSum,
    Weighted,
    clipped_sum,
    clipped_vectors,
    vector_norm,
)
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.optimizers import ascend
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses, Tick
from dprlhf.updates.critic import Critic
from dprlhf.updates.telemetry import TelemetryCoordinates


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
        expected_batch_size: m of the plan.
        telemetry: the coordinates that ride in the round's first release.
        optimizer: of the policy's parameters; it sees released values only.
        reduce: sums a tensor over all processes.
        gate: turns the sum over all processes into a released mean.
        number: t, from 1.
        tick: told the number of rows done.
        critic: V as the rounds before left it; the first release moves it.
        features: φ of each prompt, ``[prompts, 1 + p]``; with a critic only.
        values: V of each row's prompt before this round, ``[rows]``; with a critic only.
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
    expected_batch_size: float
    telemetry: TelemetryCoordinates
    optimizer: torch.optim.Optimizer
    reduce: Callable[[torch.Tensor], torch.Tensor]
    gate: Callable[[BoundedSum], Released[torch.Tensor]]
    number: int
    tick: Tick | None = None
    critic: Critic | None = None
    unpenalised: Private[Scores] = field(init=False)
    features: Private[NDArray[np.float64]] | None = None
    values: Private[NDArray[np.float64]] | None = None
    released: Released[torch.Tensor] | None = None
    telemetry_released: Released[torch.Tensor] | None = None
    norms: Private[NDArray[np.float64]] | None = None

    def __post_init__(self) -> None:
        self.unpenalised = self.scores
        if self.critic is not None:
            given = open_private(self.responses)
            features = self.critic.features(self.policy, given.prompt_tokens)
            self.features = Private(features)
            self.values = Private(self.critic.values(features)[given.prompt])

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
        given = Weighted(
            open_private(self.responses), open_private(weights), self._extra(), self._extra_norm
        )
        return clipped_sum(
            self.policy,
            Private(given),
            clip_norm=self.clip_norm,
            batch_size=batch_size,
            reduce=self.reduce,
            tick=self.tick,
        )

    @property
    def radius(self) -> float:
        """√(S² − e²), the bound on a user's vector beside its telemetry coordinates."""
        return vector_norm(self.clip_norm, self._extra_norm)

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
        return clipped_vectors(
            vectors,
            self.policy.dimension if dimension is None else dimension,
            extra=Private(self._extra()),
            extra_norm=self._extra_norm,
            clip_norm=self.clip_norm,
            reduce=self.reduce,
        )

    def release(self, clipped: ClippedSum) -> Released[torch.Tensor]:
        """Charge the round (once) and return the noised mean, float64, without what rides in it.

        Raises:
            TypeError: the sum did not come from the clipping code.
        """
        if not isinstance(clipped, ClippedSum):
            raise TypeError(
                f"release takes a ClippedSum, which only the clipping code makes, not"
                f" {type(clipped).__name__}"
            )
        released = self.gate(clipped.bounded)
        check_released(released, "release")
        if self.released is None:
            ends = [self.telemetry.count, self.critic.count if self.critic else 0]
            length = len(clipped.bounded.total)
            parts = released.split([length - sum(ends), *ends])
            self.released, self.telemetry_released, of_critic = parts
            released = self.released
            if self.critic is not None:
                self.critic.step(of_critic, self.number)
            self.norms = clipped.norms
        return released

    def step(self, direction: Released[torch.Tensor]) -> None:
        """Let the optimizer ascend along a released direction, ``[dimension]``."""
        ascend(self.policy.parameters.values(), self.optimizer, direction)

    @property
    def _extra_norm(self) -> float:
        """e, the public bound on what rides in the first release beside a user's vector."""
        if self.released is not None:
            return 0.0
        return math.hypot(self.telemetry.norm, self.critic.norm if self.critic else 0.0)

    def _extra(self) -> NDArray[np.float64]:
        """Return each user's telemetry and critic coordinates, ``[users, e]``; later none."""
        responses, scores = open_private(self.responses), open_private(self.unpenalised)
        if self.released is not None:
            return np.zeros((responses.users, 0))
        valid = open_private(self.valid)
        extra = self.telemetry.of_users(responses.user, scores.values, valid)
        if self.critic is None:
            return extra
        assert self.features is not None
        features = open_private(self.features)[responses.prompt]
        rewards = open_private(self.scores).values
        rewards = rewards if rewards.ndim == 1 else rewards[:, 0]  # the first token's is the whole
        steps = self.critic.of_users(features, rewards, responses.user, valid)
        return np.concatenate([extra, steps], axis=1)


def users_with_valid_scores(responses: Responses, scores: Scores) -> NDArray[np.bool_]:
    """Return which users have a valid score for every response, ``[users]``."""
    broken = np.bincount(responses.user, ~scores.valid, minlength=responses.users)
    valid: NDArray[np.bool_] = broken == 0
    return valid
