"""A recipe's settings from the keyword arguments of :func:`dprlhf.train`."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel

from dprlhf.errors import REMOVED, DprlhfError, nearest
from dprlhf.recipe import Recipe, known_keys
from dprlhf.recipe.trl_names import COMBINED, INSTEAD, KEYS, settings_of

_SHORT = {
    "model": "policy__model_name_or_path",
    "epsilon": "privacy__epsilon",
    "delta": "privacy__delta",
    "learning_rate": "optimizer__learning_rate",
    "user_column": "data__user_column",
}
_ARGUMENTS = {
    "reward_funcs": "write reward=…, which takes the same",
    "train_dataset": "write prompts=…",
    "eval_dataset": "write evaluation_prompts=…, of nobody among the users",
    "args": "give settings by name, or take dprlhf.trl.PrivateGRPOTrainer with a config",
}
"""Arguments of TRL's trainers that have another name in :func:`dprlhf.train`."""


def settings_from(flat: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's sections from settings by name.

    A name is short for a key (``epsilon``), a key with ``__`` for the dot, or TRL's.
    """
    keys: dict[str, Any] = {}
    trl = {}
    for name, value in flat.items():
        key = _SHORT.get(name, name)
        if key in keys:
            raise DprlhfError(f"train: {key.replace('__', '.')} is given twice, also as {name}")
        if name in _SHORT or "__" in name or name in Recipe.model_fields:
            keys[key] = value
        elif name in KEYS or name in COMBINED:
            trl[name] = value
        else:
            _refuse(name)
            keys[name] = value  # which the recipe refuses, with the nearest of its keys
    for key, value in settings_of(trl).items():
        if key.replace(".", "__") in keys:
            raise DprlhfError(f"train: {key} is given twice, also by TRL's name of it")
        keys[key.replace(".", "__")] = value
    return _nested(keys)


def _nested(keys: dict[str, Any]) -> dict[str, Any]:
    """Return values by section from keys with ``__`` for the dot; the values stay as they are."""
    values: dict[str, Any] = {}
    # Sections first, so that keys of them are added, whichever a program wrote first.
    for key, value in sorted(keys.items(), key=lambda item: item[0].count("__")):
        *parents, last = key.split("__")
        node, path = values, ""
        for parent in parents:
            node, path = node.setdefault(parent, {}), f"{path}.{parent}".lstrip(".")
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last in node:
            raise DprlhfError(
                f"train: {key.replace('__', '.')} is given by itself, and {path} as a whole: write"
                " both there"
            )
        node[last] = _copied(value)
    return values


def _copied(value: Any) -> Any:
    """Return a value whose mappings are the recipe's own, as it adds keys to them."""
    value = value.model_dump() if isinstance(value, BaseModel) else value  # a section's settings
    return {k: _copied(v) for k, v in value.items()} if isinstance(value, dict) else value


def _refuse(name: str) -> None:
    """Refuse one of TRL's names that has no key, as the command line does, or one misspelt."""
    text = _ARGUMENTS.get(name) or INSTEAD.get(name) or REMOVED.get(name)
    if text:
        dots = "; in Python write __ for the dot" if re.search(r"[a-z]\.[a-z]", text) else ""
        raise DprlhfError(f"argument '{name}': {text}{dots}")
    keys = [key for key in known_keys(Recipe) if key.rpartition(".")[2] == name]
    near = nearest(name, [*_SHORT, *Recipe.model_fields, *KEYS, *COMBINED])
    if keys:  # of a section: a dot is no part of a keyword in Python
        near = keys[0].replace(".", "__")
    if near:
        raise DprlhfError(f"unknown argument '{name}'; did you mean '{near}'?")
