"""The private updates, one file for each algorithm."""

from collections.abc import Callable
from typing import Any

from dprlhf.updates.pg import policy_gradient
from dprlhf.updates.private_round import PrivateRound

UPDATES: dict[str, Callable[[PrivateRound, Any], None]] = {"pg": policy_gradient}
"""By the name in the recipe: each takes the round and the recipe's ``update`` section."""

__all__ = ["UPDATES", "PrivateRound"]
