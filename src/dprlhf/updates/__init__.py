"""The private updates, one file for each algorithm."""

from collections.abc import Callable
from typing import Any

from dprlhf.updates.grpo import grpo
from dprlhf.updates.npg import npg
from dprlhf.updates.pg import policy_gradient
from dprlhf.updates.ppo import ppo
from dprlhf.updates.rebel import rebel
from dprlhf.updates.round import PrivateRound

UPDATES: dict[str, Callable[[PrivateRound, Any], None]] = {
    "pg": policy_gradient,
    "grpo": grpo,
    "ppo": ppo,
    "rebel": rebel,
    "npg": npg,
}
"""By the name in the recipe: each takes the round and the recipe's ``update`` section."""

__all__ = ["UPDATES", "PrivateRound"]
