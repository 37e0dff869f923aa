"""Extra coordinates for each user in a round's first release, beside the gradient.

A rider is a small statistic of each user with a public definition (its mean reward, its summand of
the critic's normal equations). It is appended to the user's vector and clipped to a share of the
clip norm S: with riders of norms e₁, e₂ the vector itself is clipped to √(S² − e₁² − e₂²), so the
joint vector has norm at most S. The noise and the charge of the one release cover all of it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf.boundary import Released

Array = NDArray[np.float64]


class Rider(Protocol):
    """Extra coordinates appended to each user's vector in a round's first release.

    They are statistics such as its mean reward, within the same clip norm and noise.
    """

    @property
    def norm(self) -> float:
        """The public L2 bound e on each user's coordinates, below the clip norm."""

    @property
    def count(self) -> int:
        """The number of coordinates."""

    @property
    def penalised(self) -> bool:
        """Whether the rider reads rewards less the KL penalty, or those of the reward functions."""

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
            valid: Mask of the users with valid rewards, ``[users]``; the others are zero.
            features: The critic's features of each row's prompt, ``[rows, 1 + p]``; None without a
                critic.
        """

    def read(self, released: Released[torch.Tensor], t: int) -> Any:
        """Process the released mean of the coordinates, ``[count]``, of round t.

        Raises:
            TypeError: The coordinates did not come from the gate.
        """
