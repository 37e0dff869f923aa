"""Settings that a recipe changes, and that its other settings leave without effect.

They are told and not refused: often one key of a recipe is changed on the command line, such as
``optimizer.name``, and those that belonged to its old value stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dprlhf.recipe.base import changed
from dprlhf.recipe.data import Documents
from dprlhf.recipe.loading import AnyRecipe
from dprlhf.recipe.rl import Recipe


def without_effect(recipe: AnyRecipe) -> list[str]:
    """Return a sentence for each changed setting that has no effect in this recipe."""
    return [f"{key} has no effect {where}" for key, where in _found(recipe)]


def _found(recipe: AnyRecipe) -> Iterator[tuple[str, str]]:
    optimizer = recipe.optimizer
    if optimizer.name == "adam" and changed(optimizer, "momentum"):
        yield "optimizer.momentum", f"with optimizer.name {optimizer.name}, which has its own"
    data = recipe.data
    if data.user_column is None and changed(data, "max_prompts_per_user"):
        yield "data.max_prompts_per_user", "without data.user_column: each row is a user"
    if Path(data.path).is_file():
        for name in ("name", "split"):
            if changed(data, name):
                yield f"data.{name}", "on a single file, all of whose rows are read"
    whole = isinstance(data, Documents) and data.completion_column is None
    if whole and changed(data, "max_prompt_tokens"):
        yield "data.max_prompt_tokens", "without data.completion_column: all is learnt"
    if isinstance(recipe, Recipe):
        oracle = recipe.update.least_squares
        if oracle is not None:
            for name in ("steps", "step_size") if oracle.closed_form else ("damping",):
                if changed(oracle, name):
                    yield f"update.oracle.{name}", f"with update.oracle.name {oracle.name}"
