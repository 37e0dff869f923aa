"""The partitions: how users are spread over rounds, and what that costs.

One file holds a partition's draw, accountant, composition and likelihood ratio as a
:class:`~dprlhf.privacy.partitions.base.PartitionSpec`. To add a partition, write such a file, and
add its name and its entry below.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dprlhf.privacy.partitions.base import PartitionSpec

__all__ = ["Partition", "all_partitions"]

Partition = Literal["random-allocation", "fixed", "stream", "poisson"]
"""How users are spread over rounds: each draws its own secret round; disjoint batches of a fixed
size; disjoint batches in order of arrival; or each joins each round with probability q."""


@functools.cache
def all_partitions() -> dict[Partition, PartitionSpec]:
    """Return every partition by its name.

    They are loaded on the first call: the command line needs the names alone.
    """
    from dprlhf.privacy.partitions.disjoint import FIXED, STREAM
    from dprlhf.privacy.partitions.poisson import POISSON
    from dprlhf.privacy.partitions.random_allocation import RANDOM_ALLOCATION

    return {
        "random-allocation": RANDOM_ALLOCATION,
        "fixed": FIXED,
        "stream": STREAM,
        "poisson": POISSON,
    }
