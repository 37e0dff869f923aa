"""Private regression on plain arrays: :func:`fit` runs an oracle outside of a training run."""

from __future__ import annotations

import math
from typing import Any

import torch

from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import noise_multiplier
from dprlhf.privacy.randomness import new_key
from dprlhf.privacy.relations import Adjacency, check_adjacency
from dprlhf.updates.privls.gradient_descent import ImproperBatchSGD, ProjectedSGD
from dprlhf.updates.privls.oracle import Fit, Guarantee, finite_rows
from dprlhf.updates.privls.sufficient_statistics import SufficientStatistics
from papers.regression.exponential import Exponential
from papers.regression.in_memory import InMemoryRelease, InMemorySelect, issp_draws
from papers.regression.issp import ISSP

Oracle = Exponential | SufficientStatistics | ISSP | ImproperBatchSGD | ProjectedSGD


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
    x, y = _arrays(features, targets)
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
        return _exponential(oracle, x, y, epsilon, delta, adjacency, key)
    _check_delta(oracle, epsilon, delta)
    if isinstance(oracle, ISSP):
        uniform, normals = issp_draws(key, x.shape[1])
        w, failed = oracle.solve(
            x,
            y,
            users=users,
            epsilon=epsilon,
            delta=delta,
            adjacency=adjacency,
            uniform=uniform,
            normals=normals,
        )
        guarantee = Guarantee(epsilon, delta, adjacency, "private test and shaped Gaussian noise")
        return Fit(w, guarantee, oracle.prediction_bound, failed)
    z, guarantee = gaussian_budget(epsilon, delta, adjacency, oracle.releases)
    w = oracle.solve(InMemoryRelease(x, y, z, users, key), x.shape[1])
    return Fit(w, guarantee, oracle.prediction_bound)


def _check_delta(oracle: Oracle, epsilon: float, delta: float) -> None:
    if not (0 < delta < 1 or math.isinf(epsilon)):
        raise DprlhfError(
            f"delta must be above 0 and below 1 for {type(oracle).__name__}, not {delta}; only"
            " exponential is pure"
        )


def _arrays(features: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        x, y = (torch.as_tensor(a, dtype=torch.float64, device="cpu") for a in (features, targets))
    except (TypeError, ValueError, RuntimeError) as problem:
        raise DprlhfError("features and targets must be arrays of numbers") from problem
    if x.ndim != 2 or not x.shape[1] or y.shape != x.shape[:1]:
        raise DprlhfError(
            f"features must be [users, d] and targets [users], not {list(x.shape)} and"
            f" {list(y.shape)}"
        )
    return finite_rows(x, y)


def gaussian_budget(
    epsilon: float, delta: float, adjacency: Adjacency, releases: int
) -> tuple[float, Guarantee]:
    """Return the noise multiplier of each of J releases of the same users, and their guarantee."""
    if math.isinf(epsilon):
        return 0.0, Guarantee(math.inf, delta, adjacency, "none: no noise is added")
    z, cost = noise_multiplier(
        epsilon,
        delta,
        rounds=1,
        partition="random-allocation" if adjacency == "add-remove" else "fixed",
        adjacency=adjacency,
        releases_per_round=releases,
    )
    word = f"{releases} Gaussian release{'s' if releases > 1 else ''}"
    return z, Guarantee(cost.epsilon, delta, adjacency, word)


def _exponential(
    oracle: Exponential,
    x: torch.Tensor,
    y: torch.Tensor,
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
    key: bytes,
) -> Fit:
    if delta != 0:
        raise DprlhfError(f"exponential is pure: leave delta at 0, not {delta}")
    if oracle.candidates.shape[1] != x.shape[1]:
        raise DprlhfError(
            f"exponential: candidates have {oracle.candidates.shape[1]} dimensions, features"
            f" {x.shape[1]}"
        )
    w = oracle.solve(InMemorySelect(x, y, epsilon, adjacency, key))
    guarantee = Guarantee(epsilon, 0.0, adjacency, "exponential mechanism")
    return Fit(w, guarantee, oracle.prediction_bound)
