"""The private updates, one file for each algorithm."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dprlhf.recipe import PrivateUpdate
from dprlhf.updates.round import PrivateRound

UpdateFunction = Callable[[PrivateRound, Any], None]
"""A function that performs one round of an update, given the round and the recipe's ``update``."""

_FUNCTIONS = {
    "pg": "pg.policy_gradient",
    "grpo": "grpo.grpo",
    "ppo": "ppo.ppo",
    "rebel": "rebel.rebel",
    "npg": "npg.npg",
}


class _Updates(Mapping[str, UpdateFunction]):
    """The updates of this package by their names in a recipe; a run loads the one that it names."""

    def __getitem__(self, name: str) -> UpdateFunction:
        module, _, function = _FUNCTIONS[name].partition(".")
        update: UpdateFunction = getattr(importlib.import_module(f"{__name__}.{module}"), function)
        return update

    def __iter__(self) -> Iterator[str]:
        return iter(_FUNCTIONS)

    def __len__(self) -> int:
        return len(_FUNCTIONS)


UPDATES = _Updates()


def find_update(spec: PrivateUpdate) -> UpdateFunction:
    """Return the function of the update that a recipe names, of this package or of a plug-in."""
    if spec.name in _FUNCTIONS:
        return UPDATES[spec.name]
    from dprlhf.recipe import update_plugin

    return update_plugin(spec.name).function


__all__ = ["UPDATES", "PrivateRound", "UpdateFunction", "find_update"]
