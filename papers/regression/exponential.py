"""Private least squares by the exponential mechanism (He & Zhou 2025, arXiv 2510.21060, Alg. 4).

Releases one of finitely many public candidates W: w with probability proportional to
exp(−c L(w)), L(w) = Σ_u (clip(w · φ_u, R) − clip(A_u, R))². The guarantee is pure: δ = 0.

Departures from the paper, with the proof in ``docs/proofs/exponential.md``: R is the bound on the
targets, since the printed one, on rewards, can spend 4ε where |Â| ≤ 2 R_max; predictions are
clipped to it; c is ε / (4R²), and half of that under replace-one, where L(w) and L(w′) may move in
opposite directions; losses are rounded to multiples of 4R²/2³⁰, so that sums are exact in any
order; sampling is Gumbel-max from uniforms that go down to 2⁻²⁵⁶.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf.errors import DprlhfError
from dprlhf.privacy.randomness import uint64_stream
from dprlhf.privacy.relations import Adjacency, check_adjacency
from dprlhf.updates.oracles import Contribution, check_positive

UNITS = 2**30
"""Number of steps in the range of a user's loss; float64 sums are exact for up to 2²³ users."""

_ROUNDING = 1e-8
"""Share of ε reserved for rounding: the relative error of 2²³ users' scores is smaller."""

_WORDS = 4
"""64-bit words in one uniform draw."""


@dataclass(frozen=True, eq=False)
class Exponential:
    candidates: torch.Tensor  # public: must not depend on users' data, [candidates, d]
    target_bound: float

    def __post_init__(self) -> None:
        check_positive("exponential", target_bound=self.target_bound)
        candidates = torch.as_tensor(self.candidates, dtype=torch.float64)
        if candidates.ndim != 2 or not candidates.numel():
            raise DprlhfError(
                "exponential: candidates must be a finite set, an array [candidates, d]; for all w"
                " in a ball use projected-sgd or sufficient-statistics"
            )
        if not bool(candidates.isfinite().all()):
            raise DprlhfError("exponential: candidates has entries that are not finite")
        object.__setattr__(self, "candidates", candidates)

    def losses(self, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return each user's squared error in [0, 4R²], ``[users, candidates]``."""
        # Row by row: how one product for all rounds a row depends on who else is there.
        guesses = [row.clone() @ self.candidates.mT for row in features]
        stacked = torch.stack([features.new_zeros(len(self.candidates)), *guesses])[1:]
        bound = self.target_bound
        clipped = stacked.clamp(-bound, bound), targets.clamp(-bound, bound)[:, None]
        return (clipped[0] - clipped[1]).square()

    @property
    def largest_loss(self) -> float:
        return 4 * self.target_bound**2

    def solve(self, select: Callable[[Contribution, float], int]) -> torch.Tensor:
        """Return the chosen candidate, ``[d]``; ``select`` is told the losses and the largest."""
        return self.candidates[select(self.losses, self.largest_loss)].clone()


def total_units(losses: torch.Tensor, largest: float) -> torch.Tensor:
    """Sum users' losses exactly, in units of ``largest`` / 2³⁰, ``[candidates]``, integers."""
    # A user whose losses are not all finite has loss zero everywhere, like an absent one.
    shares = losses.double() / largest
    finite = shares.isfinite().all(dim=1, keepdim=True)
    # where, not a product: 0 · NaN is NaN and would poison the sum.
    units = torch.where(finite, (shares.clamp(0.0, 1.0) * UNITS).round(), 0.0)
    return units.sum(0)


def exponent(epsilon: float, adjacency: Adjacency) -> float:
    """Return c · (range of one user's loss) of P(w) ∝ exp(−c L(w)) for pure ε."""
    check_adjacency(adjacency)
    return epsilon / 2 if adjacency == "replace-one" else epsilon


def choose(
    units: torch.Tensor,  # summed over all processes, [candidates]
    epsilon: float,
    adjacency: Adjacency,
    key: bytes,  # with its context, for one choice only
    *context: str | int,
) -> int:
    """Draw the index of a candidate by the Gumbel-max trick."""
    total = units.double().cpu().numpy()
    if math.isinf(epsilon):
        return int(total.argmin())
    scores = -exponent(epsilon * (1 - _ROUNDING), adjacency) / UNITS * (total - total.min())
    return int((scores + _gumbel(key, *context, count=len(total))).argmax())


def _gumbel(key: bytes, *context: str | int, count: int) -> NDArray[np.float64]:
    """Return ``[count]`` Gumbel draws −ln(−ln(1 − u)), u uniform with 256 digits."""
    # Whichever of u and 1 − u is smaller keeps 53 leading digits, so −ln(1 − u) does at both ends.
    words = uint64_stream(key, "gumbel", *context, count=_WORDS * count).reshape(_WORDS, count)
    upper = words[-1] >= np.uint64(2**63)  # u above a half: its complement is what is small
    words = np.where(upper, ~words, words)
    small = np.full(count, 0.5)
    for word in words:  # the last is the most significant
        small = (word.astype(np.float64) + small) * 2.0**-64
    return np.asarray(-np.log(np.where(upper, -np.log(small), -np.log1p(-small))))
