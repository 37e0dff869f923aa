"""Contract tests for extensions: what an update, a reward or a partition must do, ready to run.

The author of a plug-in calls these functions in a test of their own, with any test runner or none.
They need no network and no GPU: the language model is a tiny one with random weights, and the users
are made up. Each function raises an ``AssertionError`` (:func:`check_reward` a
:class:`~dprlhf.errors.DprlhfError`) that names the check that failed and what to look for.

The project's own updates, rewards and partitions pass the same functions (``tests/contracts``).
Passing is evidence and not a proof: the argument why an update is private belongs in its docstring.
"""

from __future__ import annotations

from dprlhf.rewards.check import ContractReport, check_reward
from dprlhf.testing.partition import PartitionReport, check_partition
from dprlhf.testing.update import UpdateReport, check_update, save_tiny_model, tiny_policy

__all__ = [
    "ContractReport",
    "PartitionReport",
    "UpdateReport",
    "check_partition",
    "check_reward",
    "check_update",
    "save_tiny_model",
    "tiny_policy",
]
