"""Private least squares by insufficient-statistics perturbation (ISSP).

Brown, Hayase, Hopkins, Kong, Liu, Oh, Perdomo & Smith 2024 (arXiv 2404.15409); the oracle of HZ
Corollary 2. Instead of noising ΦᵀΦ, ISSP finds weights under which the least-squares solution is
stable, tests privately that they exist, and releases the weighted solution with noise shaped by the
inverse of the data's own matrix. The error grows with d and not with the condition number.

1. Filters. At level j, keep the largest set of users whose leverages in it are at most τ_j, and
   from it remove the largest residual until all are at most ρ_j. Levels 0, 1, …, 2k + 1 rise by so
   little that one user's presence changes a kept set by no more than the next level allows.
2. Test. The score is the smallest s such that level s removes at most s users, and at most k. One
   user moves it by at most 1. The test passes with a probability that falls from 1 at score 0 to 0
   at score k; if it fails, w = 0 is released.
3. Release. w ~ N(β, c² S⁻¹): β and S are solution and matrix with each user weighted by the share
   of the levels k + 1, …, 2k that keep it, which one user changes by at most 2 in total.

Departures from the paper, each proved in ``docs/proofs/issp.md``:

- One test for both filters instead of one each: half the privacy budget for testing.
- The test's pass probabilities are the steepest that (ε, δ) allows (Desfontaines, Voss, Gipson &
  Mandayam 2022, arXiv 2006.03684), instead of truncated noise on the score: the smallest k.
- The levels of leverage are 1/τ_j = 1/τ_0 − 5j/4 instead of a geometric sequence with ratio
  e^(1/k): the removal of one user asks for 1/τ_0 − j, and the rest is room for rounding.
- A score of max(removed, level) instead of their sum, because a level's residual filter may remove
  both a user that the neighbouring dataset lacks and need one level more.
- The paper's constants are replaced by the bounds of the proof evaluated for the numbers at hand,
  and c by the analytic Gaussian mechanism; the split of (ε, δ) between test and release is the one
  with the least noise on a public grid.
- Features are scaled down to norm B and targets clipped to [−R, R], user by user, and a public
  ridge κ is added to every matrix. Every step of the proof holds with them, and no data can make a
  matrix singular in floating point: an error would reveal something about the data.
- Neighbours differ by adding, removing or zeroing one user; replace-one is two such steps, each
  with (ε/2, δ/(1 + e^(ε/2))).

As in the paper, m must grow like d k² with k of order log(1/δ)/ε: ISSP is for few dimensions and
many users. Out of that range it refuses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from dprlhf.errors import DprlhfError
from dprlhf.privacy.gaussian import gaussian_noise_multiplier
from dprlhf.privacy.relations import Adjacency, check_adjacency
from dprlhf.updates.oracles import bounded_rows, check_positive

LARGEST_GROWTH = math.e
"""Limit on the ratio of highest to lowest residual bound; beyond it the noise is excessive."""

SMALLEST_DELTA = 1e-14
"""The least δ for adding or removing one user: the test is drawn with 52 bits."""

_STEP = 1.25
"""1/τ_j − 1/τ_{j+1}: 1 for the removal of a user, and a quarter for rounding."""

_SHARES = tuple(i / 20 for i in range(1, 20))
_COVARIANCE_SHARE = 0.05
"""The share of the release's δ for the change of S, which costs far less than that of β."""


@dataclass(frozen=True)
class ISSP:
    """Insufficient-statistics perturbation (Brown et al. 2024)."""

    feature_bound: float
    target_bound: float  # Bound R; targets are clipped to [−R, R]
    residual_bound: float | None = None  # ρ_0 of the least-squares solution; None takes 2R
    leverage: float = 3.0  # largest leverage expected, in units of the mean d/m
    ridge: float = 1e-6  # κ in units of mB²

    def __post_init__(self) -> None:
        bounds = {**vars(self), "residual_bound": self.largest_residual}
        check_positive("issp", **bounds)

    @property
    def largest_residual(self) -> float:
        """The bound ρ_0 that the residuals are expected to keep."""
        return 2 * self.target_bound if self.residual_bound is None else self.residual_bound

    def solve(
        self,
        features: torch.Tensor,  # [users, d]
        targets: torch.Tensor,  # Targets, [users]
        *,
        users: float,  # public
        epsilon: float,
        delta: float,
        adjacency: Adjacency,
        uniform: float,  # secret, a multiple of 2⁻⁵² plus half a step, for the test
        normals: torch.Tensor,  # Secret standard normal draws, [d], for the release
    ) -> tuple[torch.Tensor, bool]:
        """Return w, ``[d]``, and whether the private test failed (w is then zero)."""
        d = features.shape[1]
        step = _one_step(epsilon, delta, adjacency)
        if math.isfinite(epsilon) and step[1] < SMALLEST_DELTA:
            raise DprlhfError(
                f"issp: delta {delta:g} is too small at epsilon {epsilon:g} ({adjacency}): raise it"
                f" {SMALLEST_DELTA / step[1]:,.3g}-fold"
            )
        setup = make_setup(self.leverage * d / users, *step)
        if setup is None:
            raise DprlhfError(
                f"issp: {d} dimensions need more than {users:,.0f} users at epsilon {epsilon:g},"
                f" delta {delta:g} ({adjacency}): use sufficient-statistics, improper-batch-sgd or"
                " projected-sgd"
            )
        features, targets = bounded_rows(features, targets, self.feature_bound, self.target_bound)
        ridge = self.ridge * users * self.feature_bound**2
        score, weights = find_weights(features, targets, setup, self.largest_residual, ridge)
        if uniform <= setup.fail_probability[score]:
            return torch.zeros(d, dtype=torch.float64), True
        system = System.of(features, targets, weights, ridge)
        scale = setup.noise * self.largest_residual
        # S = L Lᵀ, so L⁻ᵀ g has covariance S⁻¹.
        shaped = torch.linalg.solve_triangular(system.cholesky.mT, normals[:, None], upper=True)
        return system.solution + scale * shaped[:, 0], False


@dataclass(frozen=True)
class Setup:
    """The public constants of one fit, for residual bound 1."""

    k: int  # Largest score; scores are 0..k
    lowest_leverage: float  # Leverage bound τ_0 of the lowest level
    growth: float  # Ratio ρ_{j+1} / ρ_j of the residual bounds of two levels
    fail_probability: tuple[float, ...]  # Probability that the test fails, at scores 0..k
    noise: float  # Scale c of the release's noise, per unit of ρ_0

    @property
    def levels(self) -> int:
        return 2 * self.k + 2

    def leverage_bound(self, level: int) -> float:
        """τ_j = 1/(1/τ_0 − 5j/4): a set of level j without one user is a set of level j + 1."""
        return 1 / (1 / self.lowest_leverage - _STEP * level)


@lru_cache(maxsize=256)
def make_setup(lowest: float, epsilon: float, delta: float) -> Setup | None:
    """Return the constants with the least noise for add-remove (ε, δ), if there are any."""
    if math.isinf(epsilon):
        constants = proof_constants(lowest, 1)
        return constants and Setup(1, lowest, constants[0], (0.0, 1.0), 0.0)
    best: Setup | None = None
    for share in _SHARES:
        # Above this k, (2k + 1) ln(growth) > 1.
        fail = fail_probabilities(share * epsilon, delta / 2, math.sqrt(0.5 / lowest))
        constants = proof_constants(lowest, len(fail) - 1) if fail else None
        if fail is None or constants is None:
            continue
        growth, leverage, shift = constants
        multiplier = release_noise(leverage, (1 - share) * epsilon, delta / 2)
        if multiplier is not None and (best is None or shift * multiplier < best.noise):
            best = Setup(len(fail) - 1, lowest, growth, fail, shift * multiplier)
    return best


def fail_probabilities(epsilon: float, delta: float, most: float) -> tuple[float, ...] | None:
    """Return the fastest rise from 0 to 1 of which neighbours are (ε, δ)-indistinguishable."""
    # q_{s+1} = min(e^ε q_s + δ, 1 − e^−ε (1 − q_s − δ), 1); None if k would be above `most`.
    # Multiples of 2⁻⁵², like the draw, rounded down by more than floating point errs.
    fail, grain = [0.0], 2.0**-52
    while fail[-1] < 1.0:
        if len(fail) > most:
            return None
        q = fail[-1]
        rise = min(math.exp(min(epsilon, 700.0)) * q, 1.0) + delta - 4 * grain
        left = 1 - math.exp(-epsilon) * (1 - q - delta) - 2 * grain
        end = q + delta - grain >= 1
        fail.append(1.0 if end else math.floor(max(0.0, min(rise, left)) / grain) * grain)
    return tuple(fail)


def proof_constants(lowest: float, k: int) -> tuple[float, float, float] | None:
    """Return ρ_{j+1}/ρ_j, h, and the bound on ‖β − β′‖_S per unit of ρ_0.

    h = 1/(1/τ_{2k+1} − k) bounds every leverage that the proof meets. Residual bounds grow by
    1/(1 − (k + 1)h): 1/(1 − kh) for the proof, and the rest for rounding. Neighbours' solutions
    differ by at most 2ρ √(h (1 + 2h)), ρ = growth^(2k+1) (1 + kh) ρ_0. None where the levels do not
    exist or rise by more than LARGEST_GROWTH.
    """
    room = 1 / lowest - _STEP * (2 * k + 1) - k
    if room <= k + 1:
        return None
    h = 1 / room
    growth = 1 / (1 - (k + 1) * h)
    if (2 * k + 1) * math.log(growth) > math.log(LARGEST_GROWTH):
        return None
    highest = growth ** (2 * k + 1) * (1 + k * h)
    return growth, h, 2 * highest * math.sqrt(h * (1 + 2 * h))


def release_noise(leverage: float, epsilon: float, delta: float) -> float | None:
    """Return c in units of ‖β − β′‖_S for which N(β, c²S⁻¹) is (ε, δ)-DP, if ε suffices."""
    # The mean moves by the analytic Gaussian mechanism, S by a tail bound of the privacy loss.
    log_delta = math.log(_COVARIANCE_SHARE * delta) - epsilon
    covariance = covariance_epsilon(2 * leverage, log_delta)
    if covariance >= 0.5 * epsilon:
        return None
    return gaussian_noise_multiplier(epsilon - covariance, (1 - _COVARIANCE_SHARE) * delta)


def covariance_epsilon(trace: float, log_delta: float) -> float:
    """Return an ε that the loss of N(0, S⁻¹), N(0, S′⁻¹) exceeds with probability ≤ e^log_delta.

    With λ the eigenvalues of S^−½ S′ S^−½ and Σ|λ_i − 1| ≤ ``trace``, the loss L has
    log E e^{sL} = Σ f(λ_i), f(λ) = −(s ln λ + ln(1 − s(λ − 1)))/2, convex with f(1) = 0. So a
    single eigenvalue 1 ± trace is the worst case, and Chernoff's bound gives ε at any s.
    """
    if trace >= 1:
        return math.inf
    best = math.inf
    for i in range(1, 200):
        s = i / 200 / trace
        most = max(-0.5 * (s * math.log1p(x) + math.log1p(-s * x)) for x in (trace, -trace))
        best = min(best, (most - log_delta) / s)
    return best


@dataclass(frozen=True)
class System:
    """Weighted normal equations with a ridge, and their solution."""

    cholesky: torch.Tensor  # Cholesky factor L of S = Σ w φφᵀ + κI = L Lᵀ, [d, d]
    solution: torch.Tensor  # Weighted least-squares solution β = S⁻¹ Σ w φA, [d]

    @classmethod
    def of(
        cls, features: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, ridge: float
    ) -> System:
        weighted = features * weights[:, None]
        matrix = features.mT @ weighted
        matrix.diagonal().add_(ridge)
        cholesky = torch.linalg.cholesky(matrix)
        vector = (weighted.mT @ targets)[:, None]
        return cls(cholesky, torch.cholesky_solve(vector, cholesky)[:, 0])

    def leverages(self, features: torch.Tensor) -> torch.Tensor:
        """Return φᵀS⁻¹φ of each user, ``[users]``."""
        scaled = torch.linalg.solve_triangular(self.cholesky, features.mT, upper=False)
        squares: torch.Tensor = scaled.square().sum(0)
        return squares


class FilteredWeights(NamedTuple):
    score: int  # Score of the private test, 0..k; at k the test always fails and weights are unused
    weights: torch.Tensor  # Weight of each user in the normal equations, [users], in [0, 1]


def find_weights(
    features: torch.Tensor, targets: torch.Tensor, setup: Setup, residual_bound: float, ridge: float
) -> FilteredWeights:
    """Run the filters at all levels on features ``[users, d]`` and targets ``[users]``, float64."""
    k = setup.k
    score, weights = k, torch.zeros(len(targets), dtype=torch.float64)
    kept = torch.ones(len(targets), dtype=torch.bool)
    removals: list[tuple[float, int]] | None = None
    for level in reversed(range(setup.levels)):
        before = int(kept.sum())
        # A lower level's set is a subset of a higher one's, so the search goes on from there.
        kept = filter_leverage(features, kept, setup.leverage_bound(level), ridge)
        if removals is None or int(kept.sum()) != before:
            removals = remove_residuals(features, targets, kept, k, residual_bound, ridge)
        bound = residual_bound * setup.growth**level
        count = next((i for i, (largest, _) in enumerate(removals) if largest <= bound), None)
        if count is None:  # the level removes too many
            continue
        inside = kept.clone()
        inside[[user for _, user in removals[:count]]] = False
        score = min(score, max(int((~inside).sum()), level))
        if k < level <= 2 * k:
            weights += inside / k
    return FilteredWeights(score, weights.clamp(max=1.0))


def filter_leverage(
    features: torch.Tensor, kept: torch.Tensor, bound: float, ridge: float
) -> torch.Tensor:
    """Return the largest subset of ``kept`` in which every leverage is at most ``bound``."""
    # A user above the bound is above it in every smaller set, so all are removed at once.
    zero = torch.zeros(len(features), dtype=torch.float64)
    while True:
        leverages = System.of(features, zero, kept.double(), ridge).leverages(features)
        over = kept & (leverages > bound)
        if not bool(over.any()):
            return kept
        kept = kept & ~over


def remove_residuals(
    features: torch.Tensor, targets: torch.Tensor, kept: torch.Tensor, most: int, bound: float,
    ridge: float,
) -> list[tuple[float, int]]:  # fmt: skip
    """Return (largest residual, its user), removing that user after each, down to the bound."""
    kept = kept.clone()
    removals: list[tuple[float, int]] = []
    while len(removals) <= most:
        solution = System.of(features, targets, kept.double(), ridge).solution
        residuals = torch.where(kept, (targets - features @ solution).abs(), 0.0)
        user = int(residuals.argmax()) if len(residuals) else 0
        largest = float(residuals[user]) if len(residuals) else 0.0
        removals.append((largest, user))
        if largest <= bound:
            break
        kept[user] = False
    return removals


def _one_step(epsilon: float, delta: float, adjacency: Adjacency) -> tuple[float, float]:
    """Return the budget of adding or removing one user."""
    check_adjacency(adjacency)
    if adjacency == "replace-one":
        return epsilon / 2, delta / (1 + math.exp(min(epsilon / 2, 300.0)))
    return epsilon, delta
