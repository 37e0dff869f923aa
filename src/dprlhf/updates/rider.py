"""Further coordinates of each user that ride in a round's first release, beside the gradient.

A rider is a small public question about each user (its mean reward, its part of the critic's normal
equations). Its answer is appended to the user's vector and clipped to a share of the clip norm S:
with riders of norms e₁, e₂ the vector itself keeps √(S² − e₁² − e₂²), so the joint vector has norm
at most S. The noise and the charge of the one release cover all of it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf.boundary import Released

Array = NDArray[np.float64]


class Rider(Protocol):
    """Coordinates that ride along, and what the server does with their release."""

    @property
    def norm(self) -> float:
        """e, the L2 bound on each user's coordinates; public, below the clip norm."""

    @property
    def count(self) -> int:
        """The number of coordinates."""

    @property
    def penalised(self) -> bool:
        """Whether it sees the rewards less the KL penalty, or as the reward functions gave them."""

    def of_users(
        self,
        user: NDArray[np.int64],
        rewards: Array,
        valid: NDArray[np.bool_],
        features: Array | None,
    ) -> Array:
        """Return each user's coordinates, ``[users, count]``, a function of its own rows alone.

        Args:
            user: Index of each row's user, ``[rows]``, from 0.
            rewards: The reward of each row, ``[rows]``.
            valid: Which users have valid rewards, ``[users]``; the others are zero.
            features: The critic's features of each row's prompt, ``[rows, 1 + p]``; None without a
                critic.
        """

    def read(self, released: Released[torch.Tensor], t: int) -> Any:
        """Take in the released mean of the coordinates, ``[count]``, of round t.

        Raises:
            TypeError: The coordinates did not come from the gate.
        """
