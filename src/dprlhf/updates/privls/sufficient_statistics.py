"""Private least squares from noised sufficient statistics (AdaSSP, Wang 2018, arXiv 1803.02596).

Releases, once, the mean over users of (a φφᵀ/B², b φA/(BR)), a² + b² = 1, as a vector of norm at
most 1: the symmetric matrix by its upper triangle with √2 on the entries off the diagonal, which
keeps the Frobenius norm. The solution of the noised normal equations is post-processing.

Departures from AdaSSP:

- One Gaussian release of both statistics together instead of three releases with a third of ε
  each: the joint vector has norm at most 1 whatever a, so nothing is gained by splitting.
- a² = α/(α + γ) with α = WB²/√2 and γ = BR minimises the noise of E w* (α/a per coordinate, since
  an off-diagonal entry of E has half the variance) plus that of the vector (γ/b) at ‖w*‖ = W.
- The smallest eigenvalue of ΦᵀΦ is read off the noised matrix instead of being released by itself.
- The ridge is λ = max(0, 2e − λ_min), e = σ√(2d) the edge of the spectrum of the noise E
  (σ on the diagonal), which replaces AdaSSP's tail bound √(d ln(6/δ) ln(2d²/ρ)); it leaves no
  eigenvalue under 2e, and vanishes once the data's clear it, so the estimate is consistent.
- ‖w‖ ≤ W is enforced by projection.

The proof is in ``docs/proofs/sufficient_statistics.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dprlhf.errors import DprlhfError
from dprlhf.updates.privls.oracle import Release, bounded_rows, check_positive, project

LARGEST_DIMENSION = 2000
"""Above this, the d² / 2 numbers of each user no longer fit a micro-batch."""


@dataclass(frozen=True)
class SufficientStatistics:
    """Least squares from one noised release of ΦᵀΦ and ΦᵀA together."""

    feature_bound: float  # Bound B on ‖φ‖; a feature of larger L2 norm is scaled down to it
    target_bound: float  # Bound R; targets are clipped to [−R, R]
    radius: float  # Radius W; w is projected to ‖w‖ ≤ W
    damping: float = 0.0

    def __post_init__(self) -> None:
        """Check the settings."""
        check_positive(
            "sufficient-statistics",
            feature_bound=self.feature_bound,
            target_bound=self.target_bound,
            radius=self.radius,
        )
        if not (self.damping >= 0 and math.isfinite(self.damping)):
            raise DprlhfError(
                f"sufficient-statistics: damping must be at least 0, not {self.damping}"
            )

    @property
    def releases(self) -> int:
        """The number of releases of one fit: 1, for all statistics together."""
        return 1

    @property
    def shares(self) -> tuple[float, float]:
        """The norms a of the matrix and b of the vector in a contribution; a² + b² = 1."""
        alpha = self.radius * self.feature_bound**2 / math.sqrt(2)
        gamma = self.feature_bound * self.target_bound
        a = math.sqrt(alpha / (alpha + gamma))
        return a, math.sqrt(1 - a * a)

    def statistics(self, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return each user's (a φφᵀ/B², b φA/(BR)), ``[users, d(d+1)/2 + d]``, of norm ≤ 1."""
        # ‖φφᵀ‖_F = ‖φ‖² ≤ B² and ‖φA‖ ≤ BR.
        bound, (a, b) = self.feature_bound, self.shares
        features, targets = bounded_rows(features, targets, bound, self.target_bound)
        features = features / bound
        rows, columns, weight = _triangle(features.shape[1])
        matrix = features.index_select(1, rows) * features.index_select(1, columns)
        matrix = matrix * (a * weight).to(features)
        return torch.cat([matrix, features * (b * targets / self.target_bound)[:, None]], dim=1)

    def solve(self, release: Release, dimension: int) -> torch.Tensor:
        """Return w, ``[dimension]``, after one release."""
        if dimension > LARGEST_DIMENSION:
            raise DprlhfError(
                f"sufficient-statistics: {dimension} dimensions are more than {LARGEST_DIMENSION}:"
                " use projected-sgd"
            )
        bound, (a, b) = self.feature_bound, self.shares
        released = release(self.statistics, 1.0)
        rows, columns, weight = _triangle(dimension)
        matrix = torch.zeros(dimension, dimension, dtype=torch.float64)
        matrix[rows, columns] = released[: len(rows)] / weight * bound**2 / a
        matrix = matrix + matrix.triu(1).mT
        vector = released[len(rows) :] * bound * self.target_bound / b
        edge = (
            release.noise_multiplier
            / release.expected_batch_size
            * bound**2
            / a
            * math.sqrt(2 * dimension)
        )
        values, vectors = torch.linalg.eigh(matrix)
        values = values + max(0.0, 2 * edge - float(values[0]))
        values = values + self.damping * bound**2
        # Without noise and with too few users the system is singular: the least-norm solution.
        usable = values > values[-1] * dimension * torch.finfo(values.dtype).eps
        inverse = torch.where(usable, 1 / values, 0.0)
        return project(vectors @ (inverse * (vectors.mT @ vector)), self.radius)


def _triangle(dimension: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows, columns and weights (1 on the diagonal, else √2) of the upper triangle."""
    rows, columns = torch.triu_indices(dimension, dimension)
    weight = (1 + (rows != columns).double()).sqrt()
    return rows, columns, weight
