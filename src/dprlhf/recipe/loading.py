"""Reading recipes, with errors that name the key, what is allowed, and the nearest known key."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ValidationError

from dprlhf.errors import REMOVED, DprlhfError, nearest, one_line
from dprlhf.recipe.private_update import PrivateUpdate
from dprlhf.recipe.rl import Recipe
from dprlhf.recipe.updates import UPDATE_SETTINGS

if typing.TYPE_CHECKING:
    from dprlhf.recipe.supervised import StageRecipe

R = typing.TypeVar("R", bound=BaseModel)

AnyRecipe: typing.TypeAlias = "Recipe | StageRecipe"
"""The recipe of a run of private updates, or of a supervised stage before it."""

_LONGEST = 80
"""Characters of an offending value that an error quotes."""


class _UniqueKeys(yaml.SafeLoader):
    """Reads YAML, and refuses a key that a mapping has twice, of which YAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node whose keys are all different."""
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.YAMLError(f"the key {twice!r} is given twice")
        return super().construct_mapping(node, deep)

    def get_single_data(self) -> Any:
        """Return the value of the whole text."""
        try:
            return super().get_single_data()
        except (TypeError, ValueError, LookupError, AttributeError) as error:  # as of 2024-99-99
            raise yaml.YAMLError(str(error)) from None


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
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise DprlhfError(f"override '{override}': write section.key=value")
        *parents, last = key.split(".")
        node: Any = settings
        for parent in parents:
            child = (
                _item(node, parent, key) if isinstance(node, list) else node.setdefault(parent, {})
            )
            if child is None:
                child = node[int(parent) if isinstance(node, list) else parent] = {}
            if not isinstance(child, dict | list):
                raise DprlhfError(f"override '{key}': '{parent}' is a single value, not a section")
            node = child
        value = _parse(text, override)
        if isinstance(node, list):
            _item(node, last, key)
            node[int(last)] = value
        else:
            node[last] = value
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
        raise DprlhfError(f"{source}: {_refused('stage', f'it is one of {names}', stage, names)}")
    return _make(STAGES[stage], settings, source)


def make_recipe(settings: Mapping[str, Any], source: str = "recipe") -> Recipe:
    """Validate settings; errors name the key, what is allowed, and the nearest known key."""
    return _make(Recipe, settings, source)


def _make(kind: type[R], settings: Mapping[str, Any], source: str) -> R:
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        raise DprlhfError(f"{source}: {_explain(error, kind)}") from None


def dump_recipe(recipe: AnyRecipe) -> str:
    """Return the recipe as YAML, every default written out."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def _item(node: list[Any], index: str, key: str) -> Any:
    if not index.isdecimal() or int(index) >= len(node):
        raise DprlhfError(f"override '{key}': '{index}' is not an index of a list of {len(node)}")
    return node[int(index)]


def _parse(text: str, override: str) -> Any:
    try:
        value = _UniqueKeys(text).get_single_data()
    except yaml.YAMLError as error:
        reason = one_line(error)
        raise DprlhfError(f"override '{override}': the value is not valid YAML: {reason}") from None
    if isinstance(value, str):
        try:  # YAML reads 1e-3 and inf as text
            return float(value)
        except ValueError:
            return value
    return value


def _explain(error: ValidationError, kind: type[BaseModel] = Recipe) -> str:
    problems = error.errors()
    # A misspelt required key is missing and unknown at once; the second says more.
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    location = [str(part) for part in first["loc"]]
    key = ".".join(location) or "recipe"
    if first["type"] == "extra_forbidden":
        named = ".".join(part for part in location if not part.isdecimal())
        if instead := REMOVED.get(named) or REMOVED.get(location[-1]):
            return f"'{key}' is gone: {instead}"
        like = f"data.{location[-1]}"
        if key.endswith(f".{like}") and like in known_keys(kind):
            return f"'{key}' is no setting: public rows are read as the users' are, by {like}"
        near = _nearest_key(location, kind)
        if near == key:
            section = location[0]
            return f"'{key}' is not a setting of this {section}: another {section}.name has it"
        return f"unknown key '{key}'" + (f"; did you mean '{near}'?" if near else "")
    if first["type"] == "missing":
        return f"'{key}' is missing"
    message = first["msg"].removeprefix("Value error, ")
    given = first.get("input")
    if isinstance(given, dict | list | BaseModel):
        return f"{key}: {message}"
    return _refused(key, message, given, first.get("ctx", {}).get("expected", ""))


def _refused(key: str, message: str, given: Any, choices: Any) -> str:
    if hasattr(given, "save_pretrained"):
        return (
            f"{key}: give a hub id or a folder, not a {type(given).__name__}: save it first with"
            " save_pretrained (a model together with its tokenizer)"
        )
    listed = [word.strip("' ") for word in str(choices).replace(" or ", ",").split(",")]
    shown = _shown(given)
    near = nearest(shown.strip("'"), listed)
    return f"{key}: {message}, not {shown}" + (f"; did you mean {near!r}?" if near else "")


def _shown(given: Any) -> str:
    """Return a value in one line; only the type of what is neither text nor a number."""
    if not isinstance(given, str | int | float | None):
        return f"a {type(given).__name__}"
    shown = repr(given)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"


def _nearest_key(location: list[str], kind: type[BaseModel]) -> str | None:
    """Return the most similar key of the same section, else of any section."""
    *section, last = location
    plain = [part for part in section if not part.isdecimal()]
    known = [key.split(".") for key in known_keys(kind)]
    siblings = [key[-1] for key in known if key[:-1] == plain]
    anywhere = {key[-1]: ".".join(key) for key in reversed(known)}
    if last in anywhere:
        return anywhere[last]
    if near := nearest(last, siblings):
        return ".".join([*section, near])
    near = nearest(last, anywhere)
    return anywhere[near] if near else None


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """List all keys of a recipe as ``section.key``, with those of every update."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for part in models_in(field.annotation):
            yield from known_keys(part, f"{prefix}{name}.")


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """List the settings classes that a key's value can have; for ``update``, all of them."""
    if annotation is PrivateUpdate:
        yield from UPDATE_SETTINGS.values()
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) in (types.UnionType, typing.Union, Annotated, list, dict):
        for part in typing.get_args(annotation):
            yield from models_in(part)
