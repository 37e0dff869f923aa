"""The private updates, one file for each algorithm."""

from collections.abc import Callable
from typing import Any

from dprlhf.recipe import PrivateUpdate, update_plugin
from dprlhf.updates.grpo import grpo
from dprlhf.updates.npg import npg
from dprlhf.updates.pg import policy_gradient
from dprlhf.updates.ppo import ppo
from dprlhf.updates.rebel import rebel
from dprlhf.updates.round import PrivateRound

UpdateFunction = Callable[[PrivateRound, Any], None]
"""A function that performs one round of an update, given the round and the recipe's ``update``."""

UPDATES: dict[str, UpdateFunction] = {
    "pg": policy_gradient,
    "grpo": grpo,
    "ppo": ppo,
    "rebel": rebel,
    "npg": npg,
}
"""The updates of this package, by their names in a recipe."""


def find_update(spec: PrivateUpdate) -> UpdateFunction:
    """Return the function of the update that a recipe names, of this package or of a plug-in."""
    return UPDATES[spec.name] if spec.name in UPDATES else update_plugin(spec.name).function


__all__ = ["UPDATES", "PrivateRound", "UpdateFunction", "find_update"]
