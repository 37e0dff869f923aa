"""Reading recipes, with errors that name the key; the settings of one that have no effect."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from dprlhf.errors import DprlhfError, one_line
from dprlhf.recipe.base import changed
from dprlhf.recipe.data import Documents
from dprlhf.recipe.rl import Recipe

if typing.TYPE_CHECKING:
    from dprlhf.recipe.supervised import StageRecipe


R = typing.TypeVar("R", bound=BaseModel)

AnyRecipe: typing.TypeAlias = "Recipe | StageRecipe"
"""The recipe of a run of private updates, or of a supervised stage before it."""


class _UniqueKeys(yaml.SafeLoader):
    """Reads YAML: refuses a key that a mapping has twice, and makes a copy for each alias."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return a mapping's node, whose keys are all different before others are merged in."""
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.YAMLError(f"the key {twice!r} is given twice")
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return a node's value, made anew: an override of one place changes no other."""
        self.constructed_objects.pop(node, None)
        return super().construct_object(node, deep=True)

    def get_single_data(self) -> Any:
        """Return the value of the whole text."""
        try:
            return super().get_single_data()
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise yaml.YAMLError(str(error)) from None  # as of 2024-99-99


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a YAML recipe and apply ``section.key=value`` overrides."""
    recipe = load_any_recipe(path, overrides)
    if not isinstance(recipe, Recipe):
        raise DprlhfError(
            f"{path}: a recipe of stage {recipe.stage}: run it with dprlhf {recipe.stage} {path}"
        )
    return recipe


def load_any_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, stage: str | None = None
) -> AnyRecipe:
    """Read a YAML recipe of any stage; ``stage`` is that of a recipe which names none."""
    return recipe_from(read_settings(Path(path)), overrides, source=str(path), stage=stage)


def read_settings(path: Path) -> dict[str, Any]:
    """Read a YAML file of settings, in which no key is given twice."""
    try:
        settings = _UniqueKeys(path.read_text("utf-8")).get_single_data()
    except OSError as error:
        raise DprlhfError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DprlhfError(f"{path}: not valid YAML: {one_line(error, None)}") from None
    if not isinstance(settings, dict):
        raise DprlhfError(f"{path}: a recipe is a mapping of keys to values")
    return settings


def recipe_from(
    settings: dict[str, Any], overrides: Sequence[str], *, source: str, stage: str | None = None
) -> AnyRecipe:
    """Apply overrides to settings, in place, and return the recipe of their stage."""
    apply_overrides(settings, overrides)
    if stage is not None and "stage" not in settings and "rewards" in settings:
        raise DprlhfError(
            f"{source}: a recipe of private updates: run it with dprlhf train {source}"
        )
    stage = settings.setdefault("stage", stage)
    if stage is None:
        del settings["stage"]
        return _make(Recipe, settings, source)
    from dprlhf.recipe.supervised import STAGES

    if stage not in list(STAGES):  # a list has no hash
        names = ", ".join(STAGES)
        from dprlhf.recipe.refusals import refused

        raise DprlhfError(f"{source}: {refused('stage', f'it is one of {names}', stage, names)}")
    return _make(STAGES[stage], settings, source)


def make_recipe(settings: Mapping[str, Any], source: str = "recipe") -> Recipe:
    """Validate settings; errors name the key, what is allowed, and the nearest known key."""
    return _make(Recipe, settings, source)


def _make(kind: type[R], settings: Mapping[str, Any], source: str) -> R:
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        from dprlhf.recipe.refusals import explain

        raise DprlhfError(f"{source}: {explain(error, kind)}") from None


def dump_recipe(recipe: AnyRecipe) -> str:
    """Return the recipe as YAML, every default written out."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def apply_overrides(settings: dict[str, Any], overrides: Sequence[str]) -> None:
    """Set the values of ``section.key=value`` texts in place."""
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise DprlhfError(f"override '{override}': write section.key=value")
        put(settings, key, _parse(text, override))


def put(settings: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of ``section.key`` in place; sections on the way may be missing or null."""
    *parents, last = key.split(".")
    node: Any = settings
    for parent in parents:
        place = _place(node, parent, key)
        if (node.get(place) if isinstance(node, dict) else node[place]) is None:
            node[place] = {}
        node = node[place]
        if not isinstance(node, dict | list):
            raise DprlhfError(f"override '{key}': '{parent}' is a single value, not a section")
    node[_place(node, last, key)] = value


def _place(node: Any, part: str, key: str) -> int | str:
    """Return a part of a key as its section takes it: an index of a list, else itself."""
    if isinstance(node, dict):
        return part
    if not part.isdecimal() or int(part) >= len(node):
        raise DprlhfError(f"override '{key}': '{part}' is not an index of a list of {len(node)}")
    return int(part)


def _parse(text: str, override: str) -> Any:
    try:
        value = _UniqueKeys(text).get_single_data()
    except yaml.YAMLError as error:
        reason = one_line(error)
        raise DprlhfError(f"override '{override}': the value is not valid YAML: {reason}") from None
    if isinstance(value, str) and value == text.strip():  # and not in quotes
        try:  # YAML reads 1e-3 and inf as text
            return float(value)
        except ValueError:
            return value
    return value


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
    kind = getattr(recipe.update, "loss_type", None)
    if kind in ("policy_gradient", "linear_reward") and changed(recipe.update, "beta"):
        yield "update.beta", f"with update.loss_type {kind}"
    whole = isinstance(data, Documents) and data.completion_column is None
    if whole and changed(data, "max_prompt_tokens"):
        yield "data.max_prompt_tokens", "without data.completion_column: all is learnt"
    if isinstance(recipe, Recipe):
        for i, reward in enumerate(recipe.rewards):
            for name in ("label", "text"):
                if reward.function is not None and changed(reward, name):
                    yield f"rewards.{i}.{name}", "without a classifier"
        oracle = recipe.update.least_squares
        if oracle is not None:
            for name in ("steps", "step_size") if oracle.closed_form else ("damping",):
                if changed(oracle, name):
                    yield f"update.oracle.{name}", f"with update.oracle.name {oracle.name}"
