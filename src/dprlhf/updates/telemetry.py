"""Telemetry of private rewards: two released coordinates, which give a noised mean reward.

The released vector has two coordinates beside the gradient, inside the same clip norm and covered
by the same noise: the user's mean reward, and 1 if all of the user's rewards were valid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf.boundary import Released, open_released
from dprlhf.privacy.plan import Plan

SHARE = 0.14
"""Share of the clip norm for the two coordinates: the gradient keeps √(1 − 0.14²), or 99% of it."""


@dataclass(frozen=True)
class TelemetryCoordinates:
    """The scaled mean reward and validity of each user."""

    norm: float  # Bound on the two coordinates together, SHARE · S; 0 leaves them out
    reward_range: float
    noise_std: Callable[[int], float] = lambda t: 0.0

    @classmethod
    def from_plan(cls, plan: Plan, reward_range: float) -> TelemetryCoordinates:
        """Return the coordinates whose norm is a share of the plan's clip norm."""
        scale = plan.clip_norm if math.isfinite(plan.clip_norm) else 1.0
        size = plan.expected_batch_size
        return cls(SHARE * scale, reward_range, lambda t: plan.noise_std_of(t) / size)

    @property
    def count(self) -> int:
        """The number of coordinates."""
        return 2 if self.norm else 0

    @property
    def _unit(self) -> float:
        return self.norm / math.sqrt(2)

    def of_users(
        self,
        user: NDArray[np.int64],  # Index of each row's user, [rows], from 0
        rewards: NDArray[np.float64],  # The reward of each row without the KL penalty, [rows]
        valid: NDArray[np.bool_],  # [users]
    ) -> NDArray[np.float64]:
        """Return each user's scaled mean reward and validity, ``[users, count]``."""
        users = len(valid)
        rows = np.bincount(user, minlength=users)
        mean = np.bincount(user, rewards, minlength=users) / np.maximum(rows, 1)
        both = np.stack([mean / self.reward_range, np.ones(users)], axis=1)
        return (self._unit * both * valid[:, None])[:, : self.count]

    def read(self, released: Released[torch.Tensor], t: int) -> ReleasedReward:
        """Return the noised mean reward, from the released coordinates, ``[2]``, of round t."""
        reward, valid = (open_released(released, "telemetry") / self._unit).tolist()
        std = self.noise_std(t) / self._unit
        known = ReleasedReward(None, None, valid, std).known  # otherwise the ratio is mere noise
        mean = float(np.clip(reward / valid, -1, 1)) * self.reward_range if known else None
        # The noise of numerator and denominator, to first order.
        error = std / valid * math.hypot(1, reward / valid) * self.reward_range if known else None
        return ReleasedReward(mean, error, valid, std)


@dataclass(frozen=True)
class ReleasedReward:
    """The noised mean reward of a round's private users."""

    mean: float | None  # The noised mean reward; None where the noise hides it
    noise_std: float | None  # Standard deviation of the noise in mean. Sampling error comes on top
    valid_share: float  # Noised number of users with valid rewards, over the expected batch size
    valid_std: float  # Standard deviation of the noise in valid_share

    @property
    def known(self) -> bool:
        """Whether the noised number of users with valid rewards is well above its noise."""
        return self.valid_share > max(3 * self.valid_std, 1e-9)


@dataclass
class ValidShare:
    """The share of users with valid rewards over the rounds so far, from released values alone."""

    rounds: int = 0
    _users: float = 0.0
    _sum: float = 0.0
    _variance: float = 0.0

    def add(self, noised: float, noise_std: float, expected_users: float) -> None:
        """Count a round's released share."""
        self.rounds += 1
        self._users += expected_users
        self._sum += noised
        self._variance += noise_std**2

    @property
    def mean(self) -> float:
        """The noised share."""
        return self._sum / self.rounds

    def error(self, share: float) -> float:
        """Return the standard error of :attr:`mean` if the true share were this one."""
        # From the noise, and from the number of a round's users: its variance is at most its mean.
        return math.sqrt(self._variance / self.rounds**2 + share / self._users)

    def is_below(self, share: float) -> bool:
        """Return whether the true share is below this one, by three standard errors."""
        return max(self.mean, 0.0) + 3 * self.error(share) < share
