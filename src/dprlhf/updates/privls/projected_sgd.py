"""Private least squares by projected noisy gradient descent (Bassily et al. 2019; HZ appendix C).

Releases J times the mean over users of φ (clip(w_j · φ, R) − A), whose norm is at most
B (R + min(R, B‖w_j‖)): BR in the first step, from w = 0, and never more than 2BR. Each step moves
against it and projects to ‖w‖ ≤ W. Everything after a release is post-processing.

He & Zhou (arXiv 2510.21060, appendix C) take Theorem 3.2 of Bassily et al. (arXiv 1908.09970), an
analysis of mini-batch SGD that draws each mini-batch from all users. Departures:

- Every step uses all users of the round: J releases cost them J Gaussians, one with z/√J. In a
  training round a user's round is already secret, and drawing a mini-batch inside it would need an
  amplification argument on top of that of random allocation.
- Predictions are clipped to [−R, R]: the targets' range. The clipped loss is still convex (its
  derivative clip(p) − A is non-decreasing in p), has the same minimiser where predictions stay in
  range, and bounds the gradient by 2BR instead of B(BW + R). w_j is public, so a step's bound may
  take it into account: steps near 0 have half the noise.
- The step size is ``step_size`` / B²: the loss is B²-smooth, so up to 1 is stable whatever the
  data. Features that spread over d directions have a curvature near B²/d, and take d times that.
- The result is the mean of the last half of the iterates, not of all: the first ones carry the
  distance to the start, which on a well-conditioned problem is gone by then.
- The number of steps is left to the caller. :func:`balanced_steps` balances the two terms of the
  excess loss of averaged descent with step 1/B², W²B²/(2J) and dJ(2BR z₁)²/(2m²B²), where z₁ is
  the noise multiplier of the whole budget: J = WBm / (2R z₁ √d), and at least 1. That gives the
  error √d/(mε) of the paper.

The proof of the sensitivity is in ``docs/proofs/gradient_oracles.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dprlhf.updates.privls.oracle import (
    Release,
    bounded_rows,
    check_positive,
    check_steps,
    predictions,
    project,
)


@dataclass(frozen=True)
class ProjectedSGD:
    """Projected noisy gradient descent on the square loss.

    Attributes:
        feature_bound: Bound B on ‖φ‖; a feature of larger L2 norm is scaled down to it.
        target_bound: Bound R; targets and predictions are clipped to [−R, R].
        radius: Radius W; w is projected to ‖w‖ ≤ W.
        steps: The number of releases J.
        step_size: Step size of the descent, in units of 1/B².

    Raises:
        DprlhfError: A value is out of range.
    """

    feature_bound: float
    target_bound: float
    radius: float
    steps: int
    step_size: float = 1.0

    def __post_init__(self) -> None:
        """Check the settings."""
        check_positive(
            "projected-sgd",
            feature_bound=self.feature_bound,
            target_bound=self.target_bound,
            radius=self.radius,
            step_size=self.step_size,
        )
        check_steps("projected-sgd", self.steps)

    @property
    def releases(self) -> int:
        """The number of releases J of one fit."""
        return self.steps

    @property
    def prediction_bound(self) -> float | None:
        """None: ‖w‖ ≤ W already bounds predictions."""
        return None

    def solve(self, release: Release, dimension: int) -> torch.Tensor:
        """Return w, ``[dimension]``, after J releases."""
        step = self.step_size / self.feature_bound**2
        w = torch.zeros(dimension, dtype=torch.float64)
        tail = torch.zeros_like(w)
        for j in range(self.steps):
            gradient = released_gradient(release, w, self.feature_bound, self.target_bound)
            w = project(w - step * gradient, self.radius)
            if j >= self.steps // 2:
                tail += w
        return tail / (self.steps - self.steps // 2)


def released_gradient(
    release: Release, w: torch.Tensor, feature_bound: float, target_bound: float
) -> torch.Tensor:
    """Release the mean over users of φ (clip(w · φ, R) − A), ``[d]``."""
    largest = min(target_bound, feature_bound * float(w.norm()))  # of |w · φ|; w is public

    def gradient(features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        features, targets = bounded_rows(features, targets, feature_bound, target_bound)
        return features * (predictions(features, w, target_bound) - targets)[:, None]

    return release(gradient, feature_bound * (target_bound + largest))


def balanced_steps(
    *,
    users: float,
    noise_multiplier: float,
    dimension: int,
    feature_bound: float,
    target_bound: float,
    radius: float,
    step_size: float = 1.0,
    most: int = 100,
) -> int:
    """Return J = WBm / (2R z₁ √d) / step_size, from 1 to ``most``.

    Args:
        users: The public number of users m.
        noise_multiplier: Noise multiplier z₁ of a single release at the whole budget; each of J
            releases then has z₁√J.
        dimension: Dimension d of the features.
        feature_bound: Bound B on ‖φ‖.
        target_bound: Bound R on targets.
        radius: Radius W of the ball that w is projected to.
        step_size: Step size in units of 1/B²; both terms of the error depend on J · step_size
            alone.
        most: Upper limit on J: once converged, more steps neither help nor hurt.
    """
    work = 2 * target_bound * noise_multiplier * math.sqrt(dimension)
    balanced = radius * feature_bound * users / work if work else math.inf
    return int(max(1, min(most, balanced / step_size)))
