"""Which changed settings a recipe leaves without effect."""

from typing import Any

import pytest

from dprlhf.recipe import Recipe, without_effect
from helpers.recipes import recipe_settings


def recipe_of(**changes: Any) -> Recipe:
    made = recipe_settings()
    for section, values in changes.items():
        made[section] = {**made.get(section, {}), **values}
    return Recipe.model_validate(made)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"optimizer": {"name": "adam", "momentum": 0.6}}, ["optimizer.momentum has no effect"]),
        ({"optimizer": {"name": "sgd", "momentum": 0.6}}, []),
        ({"data": {"max_prompts_per_user": 2}}, ["data.max_prompts_per_user has no effect"]),
        ({"data": {"max_prompts_per_user": 2, "user_column": "u"}}, []),
        ({}, []),
    ],
)
def test_a_changed_setting_that_changes_nothing_is_told(changes, expected):
    found = without_effect(recipe_of(**changes))
    assert len(found) == len(expected)
    for sentence, start in zip(found, expected, strict=True):
        assert sentence.startswith(start)
