"""The interface of private least-squares oracles: their access to users' data, and their result.

An oracle never holds users' data. It queries them through a callable that its caller provides:

- :class:`Release`, for the Gaussian oracles, answers with a noised mean over the users of a
  function of one user; J calls are J releases of the same users.
- :class:`Select`, for the exponential mechanism, answers with the index of a candidate.

So the same oracle runs by itself (``papers/regression``, beside the package) and inside a training
round, where the caller sums over micro-batches and processes and the gate adds the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Adjacency

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


class Select(Protocol):
    """The exponential mechanism over a finite set of candidates."""

    def __call__(self, loss: Contribution, largest: float) -> int:
        """Return the index of the chosen candidate.

        Args:
            loss: Computes each user's loss under each candidate, ``[users, candidates]``.
            largest: Upper bound of a loss, which is in [0, largest]. The implementation
                (``papers/regression/exponential.py``) sums by ``total_units``, which clamps
                losses to it, and draws by ``choose``.
        """


@dataclass(frozen=True)
class Guarantee:
    """(ε, δ)-differential privacy of one fit, as an upper bound."""

    epsilon: float
    delta: float
    adjacency: Adjacency
    mechanism: str

    @property
    def pure(self) -> bool:
        """Whether this is pure differential privacy."""
        return self.delta == 0.0 and math.isfinite(self.epsilon)


@dataclass(frozen=True)
class Fit:
    """The released result of a private least-squares fit.

    Attributes:
        w: Coefficients, ``[d]``, float64.
        guarantee: The privacy guarantee of ``w``, and so of every prediction.
        prediction_bound: Bound R to clip predictions to, [−R, R]; None leaves them as they are.
        failed: Whether the private test of ISSP failed, so that ``w`` is zero. The guarantee covers
            this value, too.
    """

    w: torch.Tensor
    guarantee: Guarantee
    prediction_bound: float | None = None
    failed: bool = False

    def predict(self, features: Any) -> torch.Tensor:
        """Return the predictions, ``[users]``, for array-like features, ``[users, d]``."""
        return predictions(torch.as_tensor(features), self.w, self.prediction_bound)


def predictions(features: torch.Tensor, w: torch.Tensor, bound: float | None) -> torch.Tensor:
    """Return w · φ clipped to [−bound, bound], ``[users]``.

    ``w`` may have several columns, ``[d, candidates]``: then the values are
    ``[users, candidates]``.
    """
    # Not one product for all rows: how it rounds a row depends on the row's place, which follows
    # from who else is there.
    w = w.to(features)
    if w.ndim == 1:
        values = (features * w).sum(1)
    else:
        rows = [row.clone() @ w for row in features]
        values = torch.stack(rows) if rows else features.new_zeros(0, w.shape[1])
    return values if bound is None else values.clamp(-bound, bound)


def bounded_rows(
    features: torch.Tensor, targets: torch.Tensor, feature_bound: float, target_bound: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale each φ to norm at most B and clamp each target to [−R, R], row by row."""
    norms = features.norm(dim=1, keepdim=True)
    scale = (feature_bound / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1)
    return features * scale, targets.clamp(-target_bound, target_bound)


def finite_rows(features: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Set feature and target of every row that is not finite to zero, as for an absent user."""
    finite = features.isfinite().all(dim=1) & targets.isfinite()
    # where, not a product: 0 · NaN is NaN.
    return torch.where(finite[:, None], features, 0.0), torch.where(finite, targets, 0.0)


def project(w: torch.Tensor, radius: float) -> torch.Tensor:
    """Return the point of the ball ‖w‖ ≤ radius that is nearest to ``w``."""
    return w * min(1.0, radius / max(float(w.norm()), 1e-300))


def check_positive(oracle: str, **values: float) -> None:
    """Check that each bound is a positive, finite number."""
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise DprlhfError(f"{oracle}: {name} must be a positive, finite number, not {value}")
