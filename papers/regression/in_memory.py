"""Releases over users held in memory, in the place of :mod:`dprlhf.updates.privls.in_round`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from dprlhf.errors import DprlhfError
from dprlhf.gradients.clipping import MOST_USERS, clip_users
from dprlhf.privacy.accounting import Adjacency
from dprlhf.privacy.randomness import gaussian_noise, uniforms
from dprlhf.privacy.rounded_gaussian import grid_of, rounded_gaussian
from dprlhf.updates.privls.oracle import Contribution
from papers.regression.exponential import choose, total_units

_MICRO_BATCH = 2**18
"""Number of elements in a micro-batch of contributions, which fit a processor's cache."""


@dataclass(repr=False, eq=False)
class InMemoryRelease:
    """A Gaussian :class:`~dprlhf.updates.privls.oracle.Release` over users in memory."""

    features: torch.Tensor  # Features φ, [users, d], float64
    targets: torch.Tensor  # Targets A, [users], float64
    noise_multiplier: float  # Noise multiplier z of one call; 0 releases exact means
    expected_batch_size: float  # The divisor m of a sum, a public constant
    key: bytes  # Secret key, for the noise of this fit only
    _calls: int = field(default=0, init=False)

    def __call__(self, contribution: Contribution, bound: float) -> torch.Tensor:
        """Return (Σ_u clip(contribution_u, bound) + N(0, (z · bound)² I)) / m, ``[p]``."""
        most = max(MOST_USERS, math.ceil(2 * self.expected_batch_size))
        if len(self.features) > most + 1:
            raise DprlhfError(f"more than {most} users: set users to a number near theirs")
        total = _zeros(contribution, self.features)
        for features, targets in micro_batches(self.features, self.targets, len(total)):
            clipped, _ = clip_users(contribution(features, targets), bound, most_users=most)
            total += clipped.sum(0)
        self._calls += 1
        if self.noise_multiplier:
            grid = grid_of(self.noise_multiplier, bound, len(total))
            total = (total / grid.spacing).round_()
            total += rounded_gaussian(
                self.key, "regression", self._calls, std=grid.std, count=len(total)
            )
            total *= grid.spacing
        return total / self.expected_batch_size


@dataclass(repr=False, eq=False)
class InMemorySelect:
    """A :class:`~dprlhf.updates.privls.oracle.Select` over users in memory."""

    features: torch.Tensor  # Features φ, [users, d], float64
    targets: torch.Tensor  # Targets A, [users], float64
    epsilon: float  # Privacy loss ε of the choice, with δ = 0
    adjacency: Adjacency
    key: bytes  # Secret key, for this choice only

    def __call__(self, loss: Contribution, largest: float) -> int:
        """Return the index of the chosen candidate."""
        total = _zeros(loss, self.features)
        for features, targets in micro_batches(self.features, self.targets, len(total)):
            total += total_units(loss(features, targets), largest)
        return choose(total, self.epsilon, self.adjacency, self.key, "regression")


def issp_draws(key: bytes, dimension: int) -> tuple[float, torch.Tensor]:
    """Return the uniform draw of ISSP's test and the normal draws of its release, ``[d]``."""
    uniform = float(uniforms(key, "regression test", count=1)[0])
    return uniform, gaussian_noise(key, "regression", 1, count=dimension)


def micro_batches(
    features: torch.Tensor, targets: torch.Tensor, width: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield features and targets in micro-batches whose contributions fit the processor's cache."""
    # Rows of zeros pad the last: with one shape, a user's rounding does not depend on the others.
    size = min(1024, 2 ** max(0, (_MICRO_BATCH // max(1, width)).bit_length() - 1))
    for start in range(0, len(targets), size):
        x, y = features[start : start + size], targets[start : start + size]
        if missing := size - len(y):
            x = torch.nn.functional.pad(x, (0, 0, 0, missing))
            y = torch.nn.functional.pad(y, (0, missing))
        yield x, y


def _zeros(contribution: Contribution, features: torch.Tensor) -> torch.Tensor:
    """Return the zeros, ``[p]``, that a sum of contributions starts from."""
    width = contribution(features[:0], features.new_zeros(0)).shape[1]
    return torch.zeros(width, dtype=torch.float64)
