"""A small recipe, changes to it, and the message with which it is refused."""

import copy
from typing import Any

import pytest

from dprlhf.errors import DprlhfError
from dprlhf.recipe import Recipe, make_recipe

SMALL: dict[str, Any] = {
    "policy": {"model_name_or_path": "model", "adapter": {"target_modules": ["q", "v"]}},
    "data": {"path": "prompts.csv"},
    "rewards": [{"function": "module:score"}, {"classifier": "folder", "weight": 0.5}],
    "privacy": {"epsilon": 4.0},
    "rounds": 10,
}


def recipe_settings(**changes: Any) -> dict[str, Any]:
    """Return SMALL with changes written as ``a__b=value``; list items by their index."""
    made = copy.deepcopy(SMALL)
    for name, value in changes.items():
        *parents, last = name.split("__")
        node: Any = made
        for parent in parents:
            node = node[int(parent)] if isinstance(node, list) else node.setdefault(parent, {})
        node[last] = value
    return made


def least(**changes: Any) -> Recipe:
    """Return a recipe of no more keys than it needs, with these sections changed."""
    values: dict[str, Any] = {
        "policy": {"model_name_or_path": "model"}, "data": {"path": "in-memory"},
        "rewards": [{"function": "in-memory"}], "privacy": {"epsilon": 4.0}, "rounds": 2,
    }  # fmt: skip
    return make_recipe(values | changes)


def refusal(values: Any) -> str:
    """Return what the recipe is refused with, without the word "recipe" in front."""
    with pytest.raises(DprlhfError) as caught:
        make_recipe(values)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("recipe: ")
    return message.removeprefix("recipe: ")
