"""Public rows: those that the evaluation takes, those that it leaves over, and stand-ins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dprlhf.data.in_memory import rows_of
from dprlhf.data.users import FORMATS, Prompts, Users, load_rows
from dprlhf.errors import DprlhfError
from dprlhf.recipe import AnyRecipe, Data

_LEFT_OVER = 64

# Stand-ins where a recipe names no public prompts.
_NEUTRAL = [
    "The weather today is",
    "My favourite meal to cook at home is",
    "In the morning she walked to the station and",
    "The report describes three ways in which",
]


def public_users(recipe: AnyRecipe, given: Any) -> Users | None:
    """Load the evaluation's rows, each a user of its own; None where the recipe has none.

    Args:
        recipe: of any stage.
        given: rows that the program holds in their place.
    """
    if recipe.evaluation is None:
        return None
    data = recipe.evaluation.data.model_copy(update={"user_column": None})
    return Users(rows_of(data, given), data)


def evaluated(recipe: AnyRecipe, public: Users | None) -> Prompts | None:
    """Return the rows that the evaluation takes: the first so many."""
    if public is None or recipe.evaluation is None:
        return None
    return public.select(np.arange(min(recipe.evaluation.prompts, public.count)))


def held_out(recipe: AnyRecipe, public: Users) -> Prompts:
    """Return some rows after those (at least the last one): settings may be fitted to them."""
    assert recipe.evaluation is not None
    first = min(recipe.evaluation.prompts, public.count - 1)
    return public.select(np.arange(first, min(first + _LEFT_OVER, public.count)))


def in_memory_prompts(prompts: Sequence[Any]) -> Prompts:
    """Return public prompts that the program holds, one for each user."""
    return Prompts(
        list(prompts), np.arange(len(prompts)), np.zeros(len(prompts), dtype=np.int64), {}
    )


def prompts_in(file: Path, column: str) -> list[Any]:
    """Read a file of prompts: a data set with such a column, else one prompt a line.

    Raises:
        DprlhfError: it cannot be read, or has no such column.
    """
    if file.suffix not in FORMATS:
        try:
            return [line for line in file.read_text().splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise DprlhfError(f"{file}: could not be read ({type(error).__name__})") from None
    rows = load_rows(Data(path=str(file)))
    if column not in rows.column_names:
        raise DprlhfError(
            f"{file}: there is no column {column!r}; the columns are {', '.join(rows.column_names)}"
        )
    return list(rows[column])


def neutral_prompts() -> Prompts:
    """Return stand-ins for a recipe without public prompts."""
    return in_memory_prompts(_NEUTRAL)
