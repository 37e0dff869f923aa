"""Private least squares by noisy gradient descent, projected or with an improper predictor.

Both release J times the mean over users of φ (clip(w_j · φ, R) − A), whose norm is at most
B (R + min(R, B‖w_j‖)): BR in the first step, from w = 0, and never more than 2BR. Each step moves
against it, and the result is the mean of the last half of the iterates. Everything after a release
is post-processing. Every step uses all users of the round: J releases cost them J Gaussians, one
with z/√J. In a training round a user's round is already secret, and drawing a mini-batch inside it
would need an amplification argument on top of that of random allocation; with disjoint batches the
noise of a step would be J times that of one release, not √J times.

Predictions are clipped to [−R, R], the targets' range. The clipped loss is still convex (its
derivative clip(p) − A is non-decreasing in p), has the same minimiser where predictions stay in
range, and bounds the gradient by 2BR, not B(BW + R). w_j is public, so a step's bound may take
it into account: steps near 0 have half the noise. The step size is ``step_size`` / B²: the loss is
B²-smooth, so up to 1 is stable whatever the data. Features that spread over d directions have a
curvature near B²/d, and take d times that.

**Projected** (Bassily et al. 2019, arXiv 1908.09970, Theorem 3.2; He & Zhou, arXiv 2510.21060,
appendix C): each step projects to ‖w‖ ≤ W.

**Improper** (He & Zhou's Corollary 3, which refers to Algorithm 5 and Theorem 6.2 of Chen, Li,
Rakhlin & Simchi-Levi, arXiv 2502.13115, version 1): nothing is projected, and the predictor is
φ ↦ clip(w · φ, R), "improper" because it is not linear. Noise N(0, σ²I) on w has norm σ√d, yet it
moves a prediction by no more than σ‖φ‖ ≤ σB, so the error does not grow with d; a projection would
act on the norm, and bring d back. ‖w‖ itself can be of order √d (He & Zhou, section 6.2): a policy
update along w has to truncate it.

The proof of the sensitivity is in ``docs/proofs/gradient_oracles.md``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from dprlhf.errors import DprlhfError
from dprlhf.updates.privls.oracle import Release, bounded_rows, check_positive, predictions, project


@dataclass(frozen=True)
class GradientDescent:
    """Noisy gradient descent on the square loss."""

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
    """Descent without projection; the predictor is φ ↦ clip(w · φ, R)."""

    name = "improper-batch-sgd"


@dataclass(frozen=True)
class ProjectedSGD(GradientDescent):
    """Descent with a projection after each step."""

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
