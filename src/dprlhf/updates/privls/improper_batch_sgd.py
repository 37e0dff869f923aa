"""Private least squares by an improper predictor, free of the dimension (HZ Corollary 3).

Releases J times the mean over users of φ (clip(w_j · φ, R) − A), as ``projected_sgd`` does, but
nothing is projected: the predictor is φ ↦ clip(w · φ, R), "improper" because it is not linear.
Noise N(0, σ²I) on w has norm σ√d, yet it moves a prediction by no more than σ‖φ‖ ≤ σB, so the error
does not grow with d. A projection of w would act on the norm, and bring d back; a clipped
prediction keeps the sensitivity at 2BR or less whatever w has become. ‖w‖ itself can be of order √d
(He & Zhou, section 6.2): a policy update along w has to truncate it, which is post-processing.

He & Zhou (arXiv 2510.21060) refer to Algorithm 5 and Theorem 6.2 of Chen, Li, Rakhlin &
Simchi-Levi (arXiv 2502.13115, version 1). That paper leaves batch size, step size and number of
steps to its analysis; this file does not follow its listing line by line but is built to reach the
rate that Corollary 3 states, err² of order m^(−1/2) + (mε)^(−2/3). The choices:

- Every step uses all users of the round, with step size ``step_size`` / B², so J releases cost one
  Gaussian with z/√J. With disjoint batches the noise of a step would be J times that of one
  release, not √J times, and the second term would be (mε)^(−1/2).
- :func:`balanced_steps`: descent from 0 on realizable data leaves E(w·φ − w*·φ)² ≤ W²B²/J, and the
  noise adds at most J (step · 2BR z₁√J/m)² B² = 4R²J²z₁²/m². They balance at
  J = (W²B²m² / (8R²z₁²))^(1/3). Early stopping at J ≤ (WB/R)√m gives the first term.
- The result is the mean of the last half of the iterates, which averages noise that the descent
  has not contracted.

The proof of the sensitivity is in ``docs/proofs/gradient_oracles.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dprlhf.updates.privls.oracle import Release, check_positive, check_steps
from dprlhf.updates.privls.projected_sgd import released_gradient


@dataclass(frozen=True)
class ImproperBatchSGD:
    """Noisy gradient descent on the square loss, without projection; predictions are clipped.

    Attributes:
        feature_bound: Bound B on ‖φ‖; a feature of larger L2 norm is scaled down to it.
        target_bound: Bound R; targets and predictions are clipped to [−R, R].
        steps: The number of releases J.
        step_size: Step size of the descent, in units of 1/B².

    Raises:
        DprlhfError: A value is out of range.
    """

    feature_bound: float
    target_bound: float
    steps: int
    step_size: float = 1.0

    def __post_init__(self) -> None:
        """Check the settings."""
        check_positive(
            "improper-batch-sgd",
            feature_bound=self.feature_bound,
            target_bound=self.target_bound,
            step_size=self.step_size,
        )
        check_steps("improper-batch-sgd", self.steps)

    @property
    def releases(self) -> int:
        """The number of releases J of one fit."""
        return self.steps

    @property
    def prediction_bound(self) -> float | None:
        """The bound R: predictions are clipped to [−R, R]."""
        return self.target_bound

    def solve(self, release: Release, dimension: int) -> torch.Tensor:
        """Return w of the predictor φ ↦ clip(w · φ, R), ``[dimension]``, after J releases."""
        step = self.step_size / self.feature_bound**2
        w = torch.zeros(dimension, dtype=torch.float64)
        tail = torch.zeros_like(w)
        for j in range(self.steps):
            w = w - step * released_gradient(release, w, self.feature_bound, self.target_bound)
            if j >= self.steps // 2:
                tail += w
        return tail / (self.steps - self.steps // 2)


def balanced_steps(
    *,
    users: float,
    noise_multiplier: float,
    feature_bound: float,
    target_bound: float,
    radius: float,
    step_size: float = 1.0,
    most: int = 200,
) -> int:
    """Return J = min((W²B²m² / (8R²z₁²))^(1/3), (WB/R)√m) / step_size, from 1 to ``most``.

    Args:
        users: The public number of users m.
        noise_multiplier: Noise multiplier z₁ of a single release at the whole budget; each of J
            releases then has z₁√J.
        feature_bound: Bound B on ‖φ‖.
        target_bound: Bound R on targets.
        radius: Estimate W of ‖w*‖; it only sets J.
        step_size: Step size in units of 1/B²; both terms depend on J · step_size alone.
        most: Upper limit on J, which bounds the work.
    """
    signal = radius * feature_bound / target_bound
    early = signal * math.sqrt(users)
    noise = 8 * noise_multiplier**2
    private = (signal**2 * users**2 / noise) ** (1 / 3) if noise else math.inf
    return int(max(1, min(most, early / step_size, private / step_size)))
