"""The partitions: how users are spread over rounds, and what that costs.

One file holds a partition's draw, accountant, composition and likelihood ratio as a
:class:`~dprlhf.privacy.partitions.base.PartitionSpec`; the table below names them. A new partition
is such a file, a line in the table, and its name in :mod:`dprlhf.privacy.relations`.
"""

from dprlhf.privacy.partitions.base import Allocation, PartitionSpec
from dprlhf.privacy.partitions.disjoint import FIXED, STREAM
from dprlhf.privacy.partitions.poisson import POISSON
from dprlhf.privacy.partitions.random_allocation import RANDOM_ALLOCATION
from dprlhf.privacy.relations import Partition

__all__ = ["PARTITIONS", "Allocation", "PartitionSpec"]

PARTITIONS: dict[Partition, PartitionSpec] = {
    "random-allocation": RANDOM_ALLOCATION,
    "fixed": FIXED,
    "stream": STREAM,
    "poisson": POISSON,
}
