"""Disjoint batches of a fixed size: shuffled by the secret key, or in the order of arrival.

A user is in one batch, so the run costs what one round costs (parallel composition), also against
those who know the batches. The proof is in ``docs/proofs/disjoint_batches.md``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dprlhf.errors import DprlhfError
from dprlhf.privacy.partitions.base import (
    ONE_RELEASE,
    Allocation,
    Mechanism,
    PartitionSpec,
    Stream,
    gaussian_pair,
    one_round_each,
)


def _check(terms: Mechanism) -> None:
    if terms.adjacency == "add-remove":
        raise DprlhfError(
            f"partition {terms.partition} does not carry adjacency add-remove, because "
            "removing one user shifts every later batch: use adjacency zero-out or "
            "replace-one, or partition random-allocation"
        )
    if terms.participations != 1:
        raise DprlhfError(
            f"participations must be 1 with partition {terms.partition}, not "
            f"{terms.participations}: use partition random-allocation or poisson for "
            "several passes"
        )
    if terms.bands > 1 and terms.releases_per_round > 1:
        raise DprlhfError(ONE_RELEASE)


def _fixed(users: int, rounds: int, participations: int, stream: Stream) -> Allocation:
    permutation = np.argsort(stream(count=users), kind="stable")
    return cut(permutation, users, rounds)


def _stream(users: int, rounds: int, participations: int, stream: Stream) -> Allocation:
    return cut(np.arange(users), users, rounds)


def cut(order: NDArray[np.int64], users: int, rounds: int) -> Allocation:
    """Cut an order of the users into rounds of exactly ⌊N/T⌋; those left over stay out."""
    size = users // rounds
    starts = size * np.arange(rounds + 1)
    return Allocation(order[: starts[-1]].astype(np.int64), starts)


def _epsilon(terms: Mechanism, delta: float, single: float) -> tuple[float, float]:
    return single, single * (1 - 1e-7)


def _delta(terms: Mechanism, epsilon: float, single: float, rough: bool) -> float:
    return single


FIXED = PartitionSpec(
    accountant="analytic Gaussian mechanism (Balle & Wang 2018), parallel composition over rounds",
    assumption="batches are disjoint, and a user's slot does not depend on any other user's data",
    check=_check,
    draw=_fixed,
    epsilon=_epsilon,
    delta=_delta,
    pair=gaussian_pair(1.0),
    replaced=gaussian_pair(2.0),
    log_likelihood=one_round_each,
    disjoint=True,
)
"""A random permutation, cut into rounds of exactly m users; those left over stay out."""

STREAM = PartitionSpec(
    **{
        **vars(FIXED),
        "assumption": "batches are disjoint, and a user's place in the order does not depend on any"
        " other user's data",
        "draw": _stream,
        "in_order": True,
    }
)
"""In the order of arrival, every m users make a round; those left over stay out."""
