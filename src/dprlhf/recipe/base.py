"""What all settings share: they are strict and frozen, and refuse ``true`` for a number."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

IN_MEMORY = "in-memory"
"""The path or function name of data and rewards that were passed from Python."""


def _within_float32(value: float) -> float:
    """Refuse a number that a model in float32 could not be multiplied or divided by."""
    if not 1e-30 <= value <= 1e30:
        raise ValueError("Input should be between 1e-30 and 1e30")
    return value


PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False), AfterValidator(_within_float32)]


@dataclass(frozen=True)
class Experimental:
    """Marks a field, or some of its values, as not yet measured in a published experiment.

    Put it into the field's ``Annotated[...]``. Runs that use it say so in one line at their start,
    in ``--dry-run`` and on the privacy card; the privacy guarantee covers them as any other run.
    """

    values: tuple[str, ...] = ()  # The experimental values; empty marks every value but the default


class Settings(BaseModel):
    """Base class of all settings: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, values: Any) -> Any:
        """Turn ``true`` into text where a number is wanted: pydantic would read it as 1."""
        if not isinstance(values, dict):
            return values
        numbers = {
            name for name, field in cls.model_fields.items() if _is_a_number(field.annotation)
        }
        return {
            key: str(value).lower() if isinstance(value, bool) and key in numbers else value
            for key, value in values.items()
        }


def experimental(settings: Settings, prefix: str = "") -> Iterator[str]:
    """List the experimental features that some settings use, such as ``rollout.backend: vllm``."""
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        for mark in field.metadata:
            if isinstance(mark, Experimental) and value in (mark.values or (value,)):
                if mark.values:
                    yield f"{prefix}{name}: {value}"
                elif value != field.get_default():
                    yield f"{prefix}{name}"
        if isinstance(value, Settings):
            yield from experimental(value, f"{prefix}{name}.")


def default_of(section: type[BaseModel], name: str) -> Any:
    """Return the default of a setting, the one value that all of dprlhf takes without another."""
    return section.model_fields[name].default


def _is_a_number(annotation: Any) -> bool:
    """Return whether a field takes an int or a float, perhaps among other types."""
    return annotation in (int, float) or any(map(_is_a_number, typing.get_args(annotation)))


def values_of(recipe: Any) -> dict[str, Any]:
    """Return a recipe's values, of its data those that are stated: rows may settle the others."""
    values: dict[str, Any] = recipe.model_dump()
    return values | {"data": recipe.data.model_dump(exclude_unset=True)}


def changed(section: Settings, name: str) -> bool:
    """Return whether a setting has another value than its default."""
    return bool(getattr(section, name) != type(section).model_fields[name].default)
