"""The interface of private least-squares oracles: their access to users' data.

An oracle never holds users' data. It queries them through a callable that its caller provides:
:class:`Release` answers with a noised mean over the users of a function of one user; J calls are J
releases of the same users. So the same oracle runs by itself (``papers/regression``, beside the
package) and inside a training round, where the caller sums over micro-batches and processes and the
gate adds the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch

from dprlhf.errors import DprlhfError

Contribution = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of features ``[users, d]`` and targets ``[users]``, row by row, to ``[users, p]``.

A row's result depends on that row alone. A user with several rows contributes the mean of its rows'
results, which satisfies the same bound.
"""


class Release(Protocol):
    """A Gaussian mechanism: (Σ_u clip(contribution_u, bound) + N(0, (z · bound)² I)) / m.

    Attributes:
        noise_multiplier: Standard deviation z of the noise of one call, in units of its bound.
        expected_batch_size: The public constant m that a sum is divided by.
    """

    @property
    def noise_multiplier(self) -> float:
        """The standard deviation z of the noise of one call, in units of its bound."""

    @property
    def expected_batch_size(self) -> float:
        """The public constant m that a sum is divided by."""

    def __call__(self, contribution: Contribution, bound: float) -> torch.Tensor:
        """Return the noised mean, ``[p]``, float64.

        Args:
            contribution: Computes each user's vector, ``[users, p]``; called on micro-batches of
                any size.
            bound: L2 bound on a user's vector. The implementation does not rely on it, but clips
                each user to it.
        """


def predictions(features: torch.Tensor, w: torch.Tensor, bound: float) -> torch.Tensor:
    """Return w · φ clipped to [−bound, bound], ``[users]``."""
    # Not one product for all rows: how it rounds a row depends on the row's place, which follows
    # from who else is there.
    return (features * w.to(features)).sum(1).clamp(-bound, bound)


def bounded_rows(
    features: torch.Tensor, targets: torch.Tensor, feature_bound: float, target_bound: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale each φ to norm at most B and clamp each target to [−R, R], row by row."""
    norms = features.norm(dim=1, keepdim=True)
    scale = (feature_bound / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1)
    return features * scale, targets.clamp(-target_bound, target_bound)


def project(w: torch.Tensor, radius: float) -> torch.Tensor:
    """Return the point of the ball ‖w‖ ≤ radius that is nearest to ``w``."""
    return w * min(1.0, radius / max(float(w.norm()), 1e-300))


def check_positive(oracle: str, **values: float) -> None:
    """Check that each bound is a positive, finite number."""
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise DprlhfError(f"{oracle}: {name} must be a positive, finite number, not {value}")
