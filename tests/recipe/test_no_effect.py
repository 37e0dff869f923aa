"""Which changed settings a recipe leaves without effect."""

from __future__ import annotations

from pathlib import Path
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
        ({"kl": {"level": "token"}}, ["kl.level has no effect with kl.beta 0"]),
        ({"kl": {"level": "token", "beta": 0.1}}, []),
        ({}, []),
    ],
)
def test_a_changed_setting_that_changes_nothing_is_told(
    changes: dict[str, Any], expected: list[str]
) -> None:
    found = without_effect(recipe_of(**changes))
    assert len(found) == len(expected)
    for sentence, start in zip(found, expected, strict=True):
        assert sentence.startswith(start)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("sufficient-statistics", {"steps": 2, "step_size": 0.1}, ["steps", "step_size"]),
        ("sufficient-statistics", {"damping": 0.1, "sketch": 4}, []),
        ("projected-sgd", {"damping": 0.1}, ["damping"]),
        ("improper-batch-sgd", {"steps": 2, "step_size": 0.1, "gain": 2.0}, []),
    ],
)
def test_an_oracle_has_settings_of_its_own(
    name: str, value: dict[str, Any], told: list[str]
) -> None:
    update = {"name": "npg", "oracle": {"name": name, **value}}
    found = without_effect(recipe_of(update=update))
    assert found == [
        f"update.oracle.{key} has no effect with update.oracle.name {name}" for key in told
    ]


def test_a_file_has_no_split(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("prompt\nwhy\n")
    told = "has no effect on a single file, all of whose rows are read"
    given = {"path": str(file), "split": "test", "name": "plain"}
    assert without_effect(recipe_of(data=given)) == [f"data.name {told}", f"data.split {told}"]
    assert not without_effect(recipe_of(data={"path": str(tmp_path), "split": "test"}))
