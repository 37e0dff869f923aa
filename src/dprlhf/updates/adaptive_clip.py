"""A clip norm that follows a quantile of the users' gradient norms, by noised counts.

Andrew et al. (arXiv 1905.03871, Algorithm 1) let the clip norm C_t of round t follow the quantile
γ: each release counts, with noise, the share b of users with ‖g_u‖ ≤ C_t, and
C_{t+1} = C_t exp(η (γ − b)).

Here the noise is that of one public clip norm S in every round. So it is the gradients that are
scaled: user u contributes clip(a_t g_u, S) with a_t = S/C_t, and the released mean is divided by
a_t. The factor a_t follows from releases of earlier rounds alone, so it is a constant given these.
The count is one more coordinate of the same release, a :class:`~dprlhf.updates.rider.Rider`: +e for
a user whose gradient was not clipped, −e for one whose gradient was. Its mean over 2e, plus ½, is
b. Its magnitude e does not depend on the user, and the gradient is clipped to √(S² − e² − …), so
the joint vector has norm at most S.

Departures from the paper: b is cut to [0, 1], so that one round changes the clip norm by a factor
of at most exp(η); and C_t bounds the gradient beside the other coordinates, √(S² − e² − …)/a_t.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.boundary import Released, open_released

Array = NDArray[np.float64]


class AdaptiveClip:
    """The factor a_t on the users' gradients, and the coordinate from which it follows.

    Args:
        spec: The recipe's ``update.clip_norm``.
        clip_norm: S, the L2 bound on a user's whole contribution.

    Attributes:
        factor: a_t = S/C_t; 1 in the first round.
        unclipped: The noised share b of the last round's users whose gradient was not clipped; not
            a number before the first release.
    """

    penalised = False
    count = 1

    def __init__(self, spec: recipe.QuantileClip, clip_norm: float) -> None:
        self._spec = spec
        self._clip_norm = clip_norm
        self.norm = math.sqrt(spec.share) * clip_norm
        self.factor = 1.0
        self.unclipped = math.nan

    @property
    def clip_norm(self) -> float:
        """The clip norm C_t in the gradients' own unit."""
        return self._clip_norm / self.factor

    def of_users(
        self,
        user: NDArray[np.int64],
        rewards: Array,
        valid: NDArray[np.bool_],
        features: Array | None = None,
    ) -> Array:
        """Return −e for each user with rows and valid rewards, ``[users, 1]``; 0 for others.

        The clipping code, which alone knows the norms, changes the sign for those whose gradient
        is not clipped (``signed`` in :class:`dprlhf.gradients.clipping.Weighted`).
        """
        present = valid & (np.bincount(user, minlength=len(valid)) > 0)
        return np.where(present, -self.norm, 0.0)[:, None]

    def read(self, released: Released[torch.Tensor], t: int) -> None:
        """Set the factor of the next round by the released mean of the coordinate, ``[1]``.

        Raises:
            TypeError: The coordinate did not come from the gate.
        """
        mean = float(open_released(released, "the clip norm")[0]) / self.norm
        self.unclipped = min(max(0.5 + mean / 2, 0.0), 1.0)
        self.factor *= math.exp(self._spec.step_size * (self.unclipped - self._spec.quantile))

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a checkpoint keeps, computed from released values only."""
        return {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in _STATE}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what :meth:`state` returned."""
        for name in _STATE:
            setattr(self, name, float(state[name]))


_STATE = ("factor", "unclipped")
