"""What is said of settings that a recipe cannot have, and the keys that it can."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ValidationError

from dprlhf.errors import REMOVED, nearest
from dprlhf.recipe.private_update import PrivateUpdate
from dprlhf.recipe.updates import UPDATE_SETTINGS

_LONGEST = 80
"""Characters of an offending value that an error quotes."""


def explain(error: ValidationError, kind: type[BaseModel]) -> str:
    """Return why settings are refused, by the first of their errors that says most."""
    problems = error.errors()
    # A misspelt required key is missing and unknown at once; the second says more.
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    location = [str(part) for part in first["loc"]]
    if first["type"] != "extra_forbidden":  # pydantic adds the kind that is wanted: constrained-int
        location = [part for part in location if part.isidentifier() or part.isdecimal()]
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
    if instead := REMOVED.get(f"{key}={given}"):
        return f"{key}: {given} is gone: {instead}"
    if isinstance(given, dict | list | BaseModel):
        return f"{key}: {message}"
    return refused(key, message, given, first.get("ctx", {}).get("expected", ""))


def refused(key: str, message: str, given: Any, choices: Any) -> str:
    """Return why a value is refused, with the nearest of its choices."""
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
