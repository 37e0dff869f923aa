"""Private least-squares oracles (PrivLS): noisy gradient descent, and sufficient statistics.

Each finds w with small Σ_u (w · φ_u − A_u)² for features φ ``[users, d]``, targets A ``[users]``.
An oracle never holds users' data. It queries them through a callable that its caller provides:
:class:`Release` answers with a noised mean over the users of a function of one user; J calls are J
releases of the same users. So the same oracle runs by itself (``papers/regression``, beside the
package) and inside a training round (:mod:`dprlhf.updates.regression`), where the caller sums over
micro-batches and processes and the gate adds the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch

from dprlhf.errors import DprlhfError

Contribution = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of features ``[users, d]`` and targets ``[users]``, row by row, to ``[users, p]``.

A row's result depends on that row alone. A user with several rows contributes the mean of its rows'
results, which satisfies the same bound.
"""


class Release(Protocol):
    """A Gaussian mechanism: (Σ_u clip(contribution_u, bound) + N(0, (z · bound)² I)) / m."""

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


@dataclass(frozen=True)
class GradientDescent:
    """Noisy gradient descent on the square loss.

    It releases J times the mean over users of φ (clip(w_j · φ, R) − A), whose norm is at most
    B (R + min(R, B‖w_j‖)): BR in the first step, from w = 0, and never above 2BR. Each step moves
    against it, and the result is the mean of the last half of the iterates. Everything after a
    release is post-processing. Every step uses all users of the round: J releases cost them J
    Gaussians, one with z/√J. In a training round a user's round is already secret, and drawing a
    mini-batch inside it would need an amplification argument on top of that of random allocation;
    with disjoint batches the noise of a step would be J times that of one release, not √J times.

    Predictions are clipped to [−R, R], the targets' range. The clipped loss is still convex (its
    derivative clip(p) − A is non-decreasing in p), has the same minimiser where predictions stay in
    range, and bounds the gradient by 2BR, not B(BW + R). w_j is public, so a step's bound may take
    it into account: steps near 0 have half the noise. The step size is ``step_size`` / B²: the loss
    is B²-smooth, so up to 1 is stable whatever the data. Features that spread over d directions
    have a curvature near B²/d, and take d times that.

    The proof of the sensitivity is in ``docs/proofs/gradient_oracles.md``.
    """

    name: ClassVar[str]

    feature_bound: float  # Bound B on ‖φ‖; a feature of larger L2 norm is scaled down to it
    target_bound: float  # Bound R; targets and predictions are clipped to [−R, R]
    steps: int  # The number of releases J
    step_size: float = 1.0  # Step size of the descent, in units of 1/B²

    def __post_init__(self) -> None:
        """Check the settings."""
        if not (isinstance(self.steps, int) and self.steps >= 1):
            raise DprlhfError(
                f"{self.name}: steps (J) must be a whole number of at least 1, not {self.steps};"
                " sufficient-statistics needs a single release"
            )
        check_positive(self.name, **{n: v for n, v in vars(self).items() if n != "steps"})

    @property
    def releases(self) -> int:
        """The number of releases J of one fit."""
        return self.steps

    def solve(self, release: Release, dimension: int) -> torch.Tensor:
        """Return w, ``[dimension]``, after J releases."""
        step = self.step_size / self.feature_bound**2
        w = torch.zeros(dimension, dtype=torch.float64)
        tail = torch.zeros_like(w)
        for j in range(self.steps):
            gradient = released_gradient(release, w, self.feature_bound, self.target_bound)
            w = self.put_back(w - step * gradient)
            if j >= self.steps // 2:
                tail += w
        return tail / (self.steps - self.steps // 2)

    def put_back(self, w: torch.Tensor) -> torch.Tensor:
        """Return where a step ends that has led to ``w``."""
        return w


class ImproperBatchSGD(GradientDescent):
    """Descent without projection; the predictor is φ ↦ clip(w · φ, R).

    From He & Zhou's Corollary 3, which refers to Algorithm 5 and Theorem 6.2 of Chen, Li, Rakhlin &
    Simchi-Levi, arXiv 2502.13115, version 1. The predictor is "improper" because it is not linear.
    Noise N(0, σ²I) on w has norm σ√d, yet it moves a prediction by no more than σ‖φ‖ ≤ σB, so the
    error does not grow with d; a projection would act on the norm, and bring d back. ‖w‖ itself can
    be of order √d (He & Zhou, section 6.2): a policy update along w has to truncate it.
    """

    name = "improper-batch-sgd"


@dataclass(frozen=True)
class ProjectedSGD(GradientDescent):
    """Descent with a projection to ‖w‖ ≤ W after each step.

    From Bassily et al. 2019 (arXiv 1908.09970, Theorem 3.2) and He & Zhou's appendix C.
    """

    name: ClassVar[str] = "projected-sgd"

    radius: float = field(kw_only=True)  # Radius W; w is projected to ‖w‖ ≤ W

    def put_back(self, w: torch.Tensor) -> torch.Tensor:
        """Project to ‖w‖ ≤ W."""
        return project(w, self.radius)


def released_gradient(
    release: Release, w: torch.Tensor, feature_bound: float, target_bound: float
) -> torch.Tensor:
    """Release the mean over users of φ (clip(w · φ, R) − A), ``[d]``."""
    largest = min(target_bound, feature_bound * float(w.norm()))  # of |w · φ|; w is public

    def gradient(features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        features, targets = bounded_rows(features, targets, feature_bound, target_bound)
        return features * (predictions(features, w, target_bound) - targets)[:, None]

    return release(gradient, feature_bound * (target_bound + largest))


LARGEST_DIMENSION = 2000
"""Above this, the d² / 2 numbers of each user no longer fit a micro-batch."""


@dataclass(frozen=True)
class SufficientStatistics:
    """Least squares from one noised release of ΦᵀΦ and ΦᵀA (AdaSSP, Wang 2018, arXiv 1803.02596).

    Releases, once, the mean over users of (a φφᵀ/B², b φA/(BR)), a² + b² = 1, as a vector of norm
    at most 1: the symmetric matrix by its upper triangle with √2 on the entries off the diagonal,
    which keeps the Frobenius norm. The solution of the noised normal equations is post-processing.

    Departures from AdaSSP:

    - One Gaussian release of both statistics together instead of three releases with a third of ε
      each: the joint vector has norm at most 1 whatever a, so nothing is gained by splitting.
    - a² = α/(α + γ) with α = WB²/√2 and γ = BR minimises the noise of E w* (α/a per coordinate,
      since an off-diagonal entry of E has half the variance) plus that of the vector (γ/b) at
      ‖w*‖ = W.
    - The smallest eigenvalue of ΦᵀΦ is read off the noised matrix instead of being released.
    - The ridge is λ = max(0, 2e − λ_min), e = σ√(2d) the edge of the spectrum of the noise E (σ on
      the diagonal), which replaces AdaSSP's tail bound √(d ln(6/δ) ln(2d²/ρ)); it leaves no
      eigenvalue under 2e, and vanishes once the data's clear it, so the estimate is consistent.
    - ‖w‖ ≤ W is enforced by projection.

    The proof is in ``docs/proofs/sufficient_statistics.md``.
    """

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
