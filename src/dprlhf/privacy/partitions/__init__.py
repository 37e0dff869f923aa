"""The partitions: how users are spread over rounds, and what that costs.

One file holds a partition's draw, accountant, composition and likelihood ratio as a
:class:`~dprlhf.privacy.partitions.base.PartitionSpec`. To add a partition, write such a file, and
add its name and its place below.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Literal

__all__ = ["Partition", "all_partitions", "correlated_partition", "partition_named"]

Partition = Literal["random-allocation", "fixed", "stream", "poisson"]
"""How users are spread over rounds: each draws its own secret round; disjoint batches of a fixed
size; disjoint batches in order of arrival; or each joins each round with probability q."""


_HOMES: dict[Partition, str] = {
    "random-allocation": "random_allocation.RANDOM_ALLOCATION",
    "fixed": "disjoint.FIXED",
    "stream": "disjoint.STREAM",
    "poisson": "poisson.POISSON",
}


_CORRELATED: dict[Partition, str] = {"random-allocation": "correlated.CORRELATED"}
"""Partitions whose accountant is another where noise is correlated between rounds."""


@functools.cache
def partition_named(name: Partition) -> Any:
    """Load a partition's ``PartitionSpec``; the command line needs the names alone."""
    return _spec_at(_HOMES[name])


@functools.cache
def correlated_partition(name: Partition) -> Any:
    """Load a partition's spec for correlated noise; None where no accountant knows it."""
    return _spec_at(_CORRELATED[name]) if name in _CORRELATED else None


def _spec_at(home: str) -> Any:
    module, _, constant = home.partition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), constant)


def all_partitions() -> dict[Partition, Any]:
    """Return every partition by its name."""
    return {name: partition_named(name) for name in _HOMES}
