"""One training round: its users' batch, the private sum over them, and the policy's step.

An update turns the batch into a clipped sum over users, releases it through the gate, and moves the
policy along what was released; some updates do this several times in a round. The KL penalty of
a recipe is subtracted from the rewards beforehand (:func:`subtract_kl`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Generic

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import TypeVar

from dprlhf import recipe
from dprlhf.boundary import BoundedSum, Private, Released, check_released
from dprlhf.gradients.clipping import (
    MOST_USERS,
    ClippedSum,
    Weighted,
    clipped_sum,
    clipped_vectors,
    vector_norm,
)
from dprlhf.gradients.micro_batches import language_model_rows
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.optimizers import ascend
from dprlhf.policies.protocol import ExplicitPolicy, Rows
from dprlhf.privacy.plan import Plan
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses, Tick
from dprlhf.rollout.logprobs import log_ratio_to_base
from dprlhf.updates.telemetry import ReleasedReward, TelemetryCoordinates

if TYPE_CHECKING:
    from dprlhf.gradients.subspace import Subspace


Array = NDArray[np.float64]
P = TypeVar("P", bound=CausalLMPolicy | ExplicitPolicy, default=CausalLMPolicy)
R = TypeVar("R", bound=Rows, default=Responses)


@dataclass(frozen=True)
class Terms:
    """The fields of a :class:`~dprlhf.privacy.plan.Plan` that an update reads."""

    clip_norm: float  # The L2 bound S on one user's contribution to a release
    noise_multiplier: float  # Standard deviation z of the noise in a sum, in units of S
    expected_batch_size: float  # The public constant m that a released sum is divided by
    users: int = MOST_USERS  # A public upper bound on the number of users in a round


@dataclass(repr=False, eq=False)
class PrivateRound(Generic[P, R]):
    """This process's users of one round, and the operations that an update performs on them.

    Attributes:
        policy: The policy π_t; :meth:`step` moves it.
        scores: Rewards less the KL penalty, ``[rows]``; ``[rows, response]`` where the penalty is
            taken token by token.
        telemetry: The coordinates behind each user's vector in the round's first release, inside
            the same clip norm and noise, which release the mean reward.
        gate: Turns the sum over all processes into a released mean.
        tick: Called with the number of rows done since the last call; for progress bars.
        subspace: The subspace in whose coordinates users' vectors are clipped and released; None
            for the coordinates of the parameters.
        unpenalised: The rewards without the KL penalty, for telemetry.
        released: The first release without telemetry; ``[dimension]`` where it is a gradient, or
            its coordinates in the subspace.
        reward: The noised mean reward from the first release; None before it or without telemetry.
        norms: Each user's norm before clipping in the first release, for secret telemetry.
    """

    policy: P
    responses: Private[R]
    scores: Private[Scores]
    plan: Plan | Terms
    telemetry: TelemetryCoordinates
    optimizer: torch.optim.Optimizer
    reduce: Callable[[torch.Tensor], torch.Tensor]
    gate: Callable[[BoundedSum], Released[torch.Tensor]]
    t: int
    tick: Tick | None = None
    subspace: Subspace | None = None
    unpenalised: Private[Scores] = field(init=False)
    released: Released[torch.Tensor] | None = field(default=None, init=False)
    reward: ReleasedReward | None = field(default=None, init=False)
    norms: Private[Array] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.unpenalised = self.scores
        self._log_ratio: tuple[bool, Private[Array]] | None = None

    @property
    def valid(self) -> Private[NDArray[np.bool_]]:
        """Mask of the users whose every response has a valid score, ``[users]``; others add 0."""
        return self.responses.map(users_with_valid_scores, self.scores)

    def log_ratio(self, batch_size: int, *, every_row: bool = False) -> Private[Array]:
        """Return log π_t − log π_ref of each response token, ``[rows, response]``; 0 on padding.

        π_ref is the policy with its adapter off, and μ wherever μ ≠ π_t. The result is kept until
        :meth:`step` moves the policy: KL penalty and importance ratios share it.

        Args:
            every_row: Compute all rows. Otherwise rows sampled from π_t may be left at 0.
        """
        if self._log_ratio is None or every_row > self._log_ratio[0]:
            ratios = self.responses.map(
                lambda given: _log_ratio(self.policy, given, batch_size, every_row=every_row)
            )
            self._log_ratio = every_row, ratios
        return self._log_ratio[1]

    def clipped_sum(self, weights: Private[NDArray[np.float64]], *, batch_size: int) -> ClippedSum:
        """Return Σ_u clip(Σ_rows weight · ∇ log π(y|x), S), over all processes.

        Args:
            weights: Weight of each row's ∇ log π, ``[rows]``, or of each response token's,
                ``[rows, response]``.
        """
        weighted = partial(Weighted, extra_norm=self._extra_norm)
        return clipped_sum(
            self.policy,
            self.responses.map(weighted, weights, self._extra()),
            clip_norm=self.plan.clip_norm,
            batch_size=batch_size,
            reduce=self.reduce,
            most_users=self.plan.users,
            subspace=self.subspace,
            tick=self.tick,
        )

    @property
    def vector_clip_norm(self) -> float:
        """The L2 bound √(S² − e²) on a user's vector without telemetry."""
        return vector_norm(self.plan.clip_norm, self._extra_norm)

    def clipped_vectors(
        self,
        vectors: Private[Iterable[tuple[NDArray[np.int64], torch.Tensor]]],
        dimension: int | None = None,
    ) -> ClippedSum:
        """Return Σ_u clip(v_u, S) over all processes.

        Args:
            vectors: Batches of users, ``[n]``, −1 for a filler, and their vectors,
                ``[n, dimension]``.
            dimension: Length of a vector; None takes the number of the policy's parameters, and
                the vectors' coordinates in the round's subspace, if it has one.
        """
        return clipped_vectors(
            vectors,
            self.policy.dimension if dimension is None else dimension,
            extra=self._extra(),
            extra_norm=self._extra_norm,
            clip_norm=self.plan.clip_norm,
            reduce=self.reduce,
            most_users=self.plan.users,
            subspace=self.subspace if dimension is None else None,
        )

    def release(self, clipped: ClippedSum) -> Released[torch.Tensor]:
        """Charge the round (once) and return the noised mean, float64, without telemetry.

        A sum in the coordinates of a subspace comes back as a vector of the policy's parameters,
        ``[dimension]``.

        Raises:
            TypeError: The sum did not come from the clipping code.
        """
        if not isinstance(clipped, ClippedSum):
            raise TypeError(
                f"release takes a ClippedSum, which only the clipping code makes, not"
                f" {type(clipped).__name__}"
            )
        released = self.gate(clipped.bounded)
        check_released(released, "release")
        if self.released is None:
            count = self.telemetry.count
            released, of_telemetry = released.split([len(clipped.bounded.total) - count, count])
            self.released = released
            if count:
                self.reward = self.telemetry.read(of_telemetry, self.t)
            self.norms = clipped.norms
        return released if clipped.subspace is None else released.map(clipped.subspace.lift)

    def step(self, direction: Released[torch.Tensor]) -> None:
        """Let the optimizer ascend along a released direction, ``[dimension]``."""
        self._log_ratio = None
        ascend(self.policy.parameters.values(), self.optimizer, direction)

    @property
    def _extra_norm(self) -> float:
        """The public L2 bound e on a user's coordinates of telemetry."""
        return 0.0 if self.released is not None else self.telemetry.norm

    def _extra(self) -> Private[Array]:
        """Return telemetry of each user, ``[users, e]``; none after a release."""
        if self.released is not None:
            return self.responses.map(lambda responses: np.zeros((responses.users, 0)))
        of_users = partial(_coordinates, self.telemetry)
        return self.responses.map(of_users, self.unpenalised, self.valid)


def _coordinates(
    telemetry: TelemetryCoordinates, responses: Rows, scores: Scores, valid: NDArray[np.bool_]
) -> Array:
    rewards = scores.values
    rewards = rewards if rewards.ndim == 1 else rewards[:, 0]  # the first reward-to-go is the sum
    return telemetry.of_users(responses.user, rewards, valid)


def _log_ratio(
    policy: CausalLMPolicy | ExplicitPolicy, rows: Rows, batch_size: int, *, every_row: bool
) -> Array:
    """Return log π_t − log π_ref, ``[rows, response]``.

    Unless ``every_row``, it is computed for rows from the base policy alone, and 0 for others.
    """
    if isinstance(policy, ExplicitPolicy):
        if every_row or rows.from_base.any():
            raise TypeError("only a language model's policy has log-ratios to a base policy")
        return np.zeros((len(rows.user), 1))
    responses = language_model_rows(rows)
    if every_row:
        return log_ratio_to_base(policy, responses, batch_size)
    ratios = np.zeros(tuple(responses.response_mask.shape))
    chosen = np.flatnonzero(responses.from_base)
    if len(chosen):
        ratios[chosen] = log_ratio_to_base(policy, responses.take(chosen), batch_size)
    return ratios


def counted_rows(responses: Rows, valid: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask of the rows that count in an update, ``[rows]``.

    Those of users with valid rewards, without the responses that ``rollout.mask_truncated`` leaves
    out. What a user's other rows weigh does not change.
    """
    left_out = getattr(responses, "left_out", None)  # only a language model's rows have it
    counted: NDArray[np.bool_] = valid[responses.user]
    return counted if left_out is None else counted & ~left_out


def users_with_valid_scores(responses: Rows, scores: Scores) -> NDArray[np.bool_]:
    """Return a mask of the users with responses that all have a valid score, ``[users]``."""
    rows = np.bincount(responses.user, minlength=responses.users)
    whole = np.bincount(responses.user, scores.valid, minlength=responses.users)
    valid: NDArray[np.bool_] = (rows > 0) & (whole == rows)
    return valid


def subtract_kl(round_: PrivateRound, spec: recipe.KL, batch_size: int) -> None:
    """Subtract the KL penalty from the rewards that the update sees, not from those of telemetry.

    β (log π_t(y|x) − log π_ref(y|x)) is subtracted from the response's own reward, as in RLHF
    (arXiv 2203.02155) and TRL's RLOO. Its mean over y ~ π_t is β KL(π_t ‖ π_ref), and the policy
    gradient of the penalised reward is that of E r − β KL: the derivative of the log-ratio itself
    has mean zero. π_ref is the network with its adapter off. With top-k, top-p or min-p the
    log-ratio is that of the policies before they are cut, which is finite at every token. The
    penalty is a function of one user's own rows, so it changes no sensitivity; GRPO, too, has it in
    the reward and not in its loss.
    """
    # Scores are clipped to [−R, R] before, so that the penalty counts even then.
    if not spec.beta:
        return
    bound = round_.telemetry.reward_range

    def less_penalty(scores: Scores, log_ratio: Array) -> Scores:
        values = penalised(scores.values, log_ratio, spec.beta, bound)
        returns = scores.returns
        if returns is not None:
            each = [penalised(of_turn, log_ratio, spec.beta, bound) for of_turn in returns.T]
            returns = np.stack(each, 1)
        return Scores(values, scores.valid, scores.failures, returns=returns)

    round_.scores = round_.scores.map(less_penalty, round_.log_ratio(batch_size, every_row=True))


def penalised(rewards: Array, log_ratio: Array, beta: float, bound: float) -> Array:
    """Return the rewards less the penalty, clipped to [−bound, bound]."""
    clipped: Array = (rewards - beta * log_ratio.sum(1)).clip(-bound, bound)
    return clipped
