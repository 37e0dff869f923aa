"""What all settings share: strict, frozen, and no ``true`` where a number is wanted."""

from __future__ import annotations

import typing
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

IN_MEMORY = "in-memory"
"""What a recipe written from Python calls data and rewards that only the program holds."""

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _is_a_number(annotation: Any) -> bool:
    """Return whether a field takes an int or a float, perhaps among other things."""
    return annotation in (int, float) or any(map(_is_a_number, typing.get_args(annotation)))


class Settings(BaseModel):
    """Base of all settings: frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, values: Any) -> Any:
        """Have ``true`` refused as a text where a number is wanted: pydantic would read 1."""
        if not isinstance(values, dict):
            return values
        numbers = {
            name for name, field in cls.model_fields.items() if _is_a_number(field.annotation)
        }
        return {
            key: str(value).lower() if isinstance(value, bool) and key in numbers else value
            for key, value in values.items()
        }
