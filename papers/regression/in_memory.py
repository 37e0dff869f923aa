"""Private regression on plain arrays: :func:`fit` runs an oracle outside of a training run.

Its releases are over users in memory, in the place of :mod:`dprlhf.updates.regression`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from dprlhf.errors import DprlhfError
from dprlhf.gradients.clipping import MOST_USERS, clip_users
from dprlhf.privacy.accounting import noise_multiplier
from dprlhf.privacy.randomness import new_key, uniforms
from dprlhf.privacy.relations import Adjacency, check_adjacency
from dprlhf.privacy.rounded_gaussian import grid_of, rounded_gaussian
from dprlhf.updates.oracles import (
    Contribution,
    ImproperBatchSGD,
    ProjectedSGD,
    SufficientStatistics,
)
from papers.regression.exponential import Exponential, choose, total_units
from papers.regression.issp import ISSP

Oracle = Exponential | SufficientStatistics | ISSP | ImproperBatchSGD | ProjectedSGD

_MICRO_BATCH = 2**18
"""Number of elements in a micro-batch of contributions, which fit a processor's cache."""


@dataclass(frozen=True)
class Guarantee:
    epsilon: float  # An upper bound
    delta: float
    adjacency: Adjacency
    mechanism: str

    @property
    def pure(self) -> bool:
        return self.delta == 0.0 and math.isfinite(self.epsilon)


@dataclass(frozen=True)
class Fit:
    w: torch.Tensor  # Coefficients, [d], float64
    guarantee: Guarantee  # of w, and so of every prediction
    prediction_bound: float = math.inf  # Predictions are clipped to ± this
    failed: bool = False  # Whether ISSP's private test failed, so that w is 0: covered, too

    def predict(self, features: Any) -> torch.Tensor:
        """Return the predictions, ``[users]``, for array-like features, ``[users, d]``."""
        x, bound = torch.as_tensor(features), self.prediction_bound
        return (x @ self.w.to(x)).clamp(-bound, bound)


def fit(
    oracle: Oracle,
    features: Any,  # [users, d]
    targets: Any,  # Targets A, [users]
    *,
    epsilon: float,
    delta: float = 0.0,
    adjacency: Adjacency = "replace-one",
    users: float | None = None,  # public; None: the rows, which are private under add-remove
    key: bytes | None = None,  # for one fit only; None draws one
) -> Fit:
    """Fit the coefficients w of a linear model by a private least-squares oracle.

    >>> x = torch.eye(2).repeat(500, 1)
    >>> oracle = SufficientStatistics(feature_bound=1.0, target_bound=1.0, radius=1.0)
    >>> found = fit(oracle, x, x @ torch.tensor([0.5, -0.5]), epsilon=2.0, delta=1e-6)
    >>> found.w.shape, found.guarantee.epsilon <= 2.0
    (torch.Size([2]), True)
    """
    x, y = (torch.as_tensor(a, dtype=torch.float64, device="cpu") for a in (features, targets))
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise DprlhfError(
            f"features must be [users, d] and targets [users], not {list(x.shape)} and"
            f" {list(y.shape)}"
        )
    # A row that is not finite counts as absent. where, not a product: 0 · NaN is NaN.
    finite = x.isfinite().all(dim=1) & y.isfinite()
    x, y = torch.where(finite[:, None], x, 0.0), torch.where(finite, y, 0.0)
    if not epsilon > 0:
        raise DprlhfError(f"epsilon must be above 0, not {epsilon}")
    check_adjacency(adjacency)
    if users is None and adjacency == "add-remove":
        raise DprlhfError(
            "adjacency add-remove needs users, a public number of users: the number of rows is"
            " private under it"
        )
    users = float(len(y)) if users is None else users
    if not users > 0:
        raise DprlhfError(f"users must be above 0, not {users:g}")
    key = new_key() if key is None else key
    if isinstance(oracle, Exponential):
        if delta != 0:
            raise DprlhfError(f"exponential is pure: leave delta at 0, not {delta}")
        w = oracle.solve(InMemorySelect(x, y, epsilon, adjacency, key))
        guarantee = Guarantee(epsilon, 0.0, adjacency, "exponential mechanism")
        return Fit(w, guarantee, oracle.target_bound)
    if not (0 < delta < 1 or math.isinf(epsilon)):
        raise DprlhfError(
            f"delta must be above 0 and below 1, not {delta}; only exponential is pure"
        )
    if isinstance(oracle, ISSP):
        w, failed = oracle.solve(
            x, y, users=users, epsilon=epsilon, delta=delta, adjacency=adjacency,
            uniform=float(uniforms(key, "regression test", count=1)[0]),
            normals=normals(key, x.shape[1]),
        )  # fmt: skip
        guarantee = Guarantee(epsilon, delta, adjacency, "private test and shaped Gaussian noise")
        return Fit(w, guarantee, failed=failed)
    z, guarantee = gaussian_budget(epsilon, delta, adjacency, oracle.releases)
    w = oracle.solve(InMemoryRelease(x, y, z, users, key), x.shape[1])
    improper = isinstance(oracle, ImproperBatchSGD)
    return Fit(w, guarantee, oracle.target_bound if improper else math.inf)


def gaussian_budget(
    epsilon: float, delta: float, adjacency: Adjacency, releases: int
) -> tuple[float, Guarantee]:
    """Return the noise multiplier of each of J releases of the same users, and their guarantee."""
    if math.isinf(epsilon):
        return 0.0, Guarantee(math.inf, delta, adjacency, "none: no noise is added")
    z, cost = noise_multiplier(
        epsilon, delta, rounds=1, adjacency=adjacency, releases_per_round=releases,
        partition="random-allocation" if adjacency == "add-remove" else "fixed",
    )  # fmt: skip
    word = f"{releases} Gaussian release{'s' if releases > 1 else ''}"
    return z, Guarantee(cost.epsilon, delta, adjacency, word)


def descent(
    name: str,
    users: int,
    dimension: int,
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
    feature_bound: float,
    target_bound: float,
    radius: float,
    step_size: float,
    most: int,
) -> ProjectedSGD | ImproperBatchSGD:
    """Return projected-sgd or improper-batch-sgd with the number of steps J, up to ``most``.

    With z₁ the noise multiplier of the whole budget, and before the division by ``step_size``:

    - Projected: J = WBm / (2R z₁ √d) balances the two terms of the excess loss of averaged descent
      with step 1/B², W²B²/(2J) and dJ(2BR z₁)²/(2m²B²): the paper's error √d/(mε).
    - Improper: Chen et al. leave batch size, step size and J to their analysis; these reach the
      rate of He & Zhou's Corollary 3, err² of order m^(−1/2) + (mε)^(−2/3). Descent from 0 on
      realizable data leaves E(w·φ − w*·φ)² ≤ W²B²/J, and the noise adds at most
      J (step · 2BR z₁√J/m)² B² = 4R²J²z₁²/m². They balance at J = (W²B²m² / (8R²z₁²))^(1/3). Early
      stopping at J ≤ (WB/R)√m gives the first term.
    """  # fmt: skip
    (z, _), projected = gaussian_budget(epsilon, delta, adjacency, 1), name == "projected-sgd"
    if projected:
        work = 2 * target_bound * z * math.sqrt(dimension)
        steps = radius * feature_bound * users / work if work else math.inf
    else:
        signal = radius * feature_bound / target_bound
        private = (signal**2 * users**2 / (8 * z**2)) ** (1 / 3) if z else math.inf
        steps = min(signal * math.sqrt(users), private)
    steps = int(max(1, min(most, steps / step_size)))
    given = feature_bound, target_bound, steps, step_size
    return ProjectedSGD(*given, radius=radius) if projected else ImproperBatchSGD(*given)


@dataclass(repr=False, eq=False)
class InMemoryRelease:
    """A Gaussian :class:`~dprlhf.updates.oracles.Release` over users in memory."""

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

        def clipped(features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return clip_users(contribution(features, targets), bound, most_users=most)[0].sum(0)

        total = _summed(clipped, self.features, self.targets)
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
    """The choice of the exponential mechanism over users in memory."""

    features: torch.Tensor  # Features φ, [users, d], float64
    targets: torch.Tensor  # Targets A, [users], float64
    epsilon: float  # Privacy loss ε of the choice, with δ = 0
    adjacency: Adjacency
    key: bytes  # Secret key, for this choice only

    def __call__(self, loss: Contribution, largest: float) -> int:
        total = _summed(lambda x, y: total_units(loss(x, y), largest), self.features, self.targets)
        return choose(total, self.epsilon, self.adjacency, self.key, "regression")


def normals(key: bytes, count: int) -> torch.Tensor:
    """Return ``[count]`` standard normal draws in float64."""
    # One float64 draw lies on a grid that an observer of (value + noise) can invert (Mironov 2012).
    # The preimage of a sum of four, over 2, is too large to search (Holohan & Braghin, 2107.10138).
    draws = uniforms(key, "regression", 1, 0, count=4 * count).reshape(4, count)
    quantiles: torch.Tensor = torch.special.ndtri(torch.from_numpy(draws))
    return quantiles.sum(0) / 2


def _summed(function: Contribution, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Add up a function of a micro-batch, to ``[p]``, over all users."""
    total = function(features[:0], targets[:0]).double()
    # Rows of zeros pad the last: with one shape, a user's rounding does not depend on the others.
    size = min(1024, 2 ** max(0, (_MICRO_BATCH // max(1, len(total))).bit_length() - 1))
    for start in range(0, len(targets), size):
        x, y = features[start : start + size], targets[start : start + size]
        missing = size - len(y)
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
        total += function(x, torch.nn.functional.pad(y, (0, missing)))
    return total
