"""Public rows: for the evaluation, for fitting settings, and neutral prompts in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dprlhf.data.columns import listed_names
from dprlhf.data.file_formats import FORMATS, MESSAGES, lines_of
from dprlhf.data.in_memory import rows_of
from dprlhf.data.json_files import conversation_in
from dprlhf.data.loading import load_rows
from dprlhf.data.users import Prompts, Users
from dprlhf.errors import BrokenLinesError, DprlhfError
from dprlhf.recipe import AnyRecipe, Data

HELD_OUT = 64
"""Number of public rows after those of the evaluation to which settings are fitted."""
_LOOKED_AT = 16  # public texts that are looked at for conversations as JSON
CONTRASTED = 512
"""Number of public rows to which an adapter's start by ``public-contrast`` is fitted."""

# Used where a recipe names no public prompts.
_NEUTRAL = [
    "The weather today is",
    "My favourite meal to cook at home is",
    "In the morning she walked to the station and",
    "The report describes three ways in which",
]


def public_users(recipe: AnyRecipe, given: Any) -> Users | None:
    """Load the evaluation's rows, each a user of its own; None without evaluation."""
    if recipe.evaluation is None:
        return None
    data = recipe.evaluation.data.like(recipe.data)
    users = Users(rows_of(data, given), data, may_lack_prompts=recipe.rows_may_lack_prompts)
    if users.count < 2:
        raise DprlhfError(f"evaluation.data {data.path}: give at least 2 public rows")
    return users


def check_form(users: Users, public: Users | None) -> None:
    """Refuse public rows of another form than the users': rewards would get another kind of value.

    The types of both columns decide it; where the users' has values of several kinds, either form
    will do. Of texts, that public ones are conversations written as JSON is refused, too.
    """
    if public is not None and not public.conversations:
        first = public.select(np.arange(min(_LOOKED_AT, public.count))).prompts
        if any(conversation_in(text) for text in first):
            raise DprlhfError(
                "evaluation.data has conversations written as JSON, which would be read as texts:"
                f" call the column {MESSAGES!r} in both files (data.prompt_column={MESSAGES})"
            )
    if public is None or users.mixes_kinds or users.conversations == public.conversations:
        return
    forms = {True: "conversations", False: "plain text"}
    raise DprlhfError(
        f"evaluation.data holds {forms[public.conversations]}, and data"
        f" {forms[users.conversations]}: give both in one form; in a CSV file, conversations are"
        f" JSON in a column called {MESSAGES!r} (data.prompt_column={MESSAGES})"
    )


def evaluated(recipe: AnyRecipe, public: Users | None) -> Prompts | None:
    """Return the rows of the evaluation, the first ``evaluation.prompts``; None without any."""
    if public is None or recipe.evaluation is None:
        return None
    return public.select(np.arange(min(recipe.evaluation.prompts, public.count)))


def held_out(recipe: AnyRecipe, public: Users) -> Prompts:
    """Return up to :data:`HELD_OUT` public rows after the evaluation's, to fit settings to.

    Where the evaluation takes all rows, this is the last one.
    """
    assert recipe.evaluation is not None
    first = min(recipe.evaluation.prompts, public.count - 1)
    return public.select(np.arange(first, min(first + HELD_OUT, public.count)))


MEASURED = 32
"""Public rows on which the divergence of a step is measured (``update.subspace.target_kl``)."""


@dataclass(frozen=True)
class Guides:
    """Public prompts to which directions are fitted (``update.subspace``, an adapter's start)."""

    rows: Users  # Public rows, each a user of its own
    first: int = 0  # Index of the first row that is used; the evaluation has those before it

    @property
    def count(self) -> int:
        """The number of prompts."""
        return max(0, self.rows.count - self.first)

    def first_rows(self, count: int) -> Prompts:
        """Return the first ``count`` prompts, or all of them if there are fewer."""
        return self.rows.select(np.arange(self.first, min(self.first + count, self.rows.count)))

    def draw(self, count: int, random: np.random.Generator) -> Prompts:
        """Return ``count`` different prompts, or all of them if there are fewer."""
        chosen = random.choice(self.count, min(count, self.count), replace=False)
        prompts = self.rows.select(self.first + np.sort(chosen))
        users = np.arange(len(prompts))
        slots = np.zeros_like(users)
        return prompts.changed(users=users, slots=slots)


def guides(recipe: AnyRecipe, public: Users | None) -> Guides | None:
    """Return the public prompts of ``update.subspace``; None without one."""
    spec = getattr(recipe.update, "subspace", None)
    if spec is None:
        return None
    if spec.data is not None:
        data = spec.data.like(recipe.data)
        return Guides(Users(load_rows(data), data, may_lack_prompts=recipe.rows_may_lack_prompts))
    assert public is not None
    return leftover(recipe, public)


def leftover(recipe: AnyRecipe, public: Users) -> Guides:
    """Return the rows of ``evaluation.data`` that the evaluation does not use."""
    assert recipe.evaluation is not None
    return Guides(public, recipe.evaluation.prompts)


def used_rows(recipe: AnyRecipe) -> int | None:
    """Return how many rows, from the start, the run may take; None for all of them.

    These are the rows of :func:`evaluated`, :func:`held_out`, :func:`guides` and :func:`leftover`.
    """
    spec = getattr(recipe.update, "subspace", None)
    if spec is not None and spec.data is None:
        return None
    if recipe.policy.adapter.contrast_column is not None:
        return None
    return recipe.evaluation.prompts + HELD_OUT if recipe.evaluation is not None else 0


def in_memory_prompts(prompts: Sequence[Any]) -> Prompts:
    """Return public prompts in memory, each of a user of its own."""
    return Prompts(
        list(prompts), np.arange(len(prompts)), np.zeros(len(prompts), dtype=np.int64), {}
    )


def prompts_in(file: Path, column: str) -> list[Any]:
    """Read prompts from a column of a dataset file, or from the lines of any other text file.

    A blank line is no prompt.
    """
    if file.suffix == ".txt" or file.suffix not in FORMATS:
        try:
            return list(lines_of(file))
        except (OSError, BrokenLinesError) as error:
            raise DprlhfError(f"{file}: could not be read ({type(error).__name__})") from None
    rows = load_rows(Data(path=str(file), prompt_column=column))
    if column not in rows.column_names:
        raise DprlhfError(
            f"{file}: there is no column {column!r}; the columns are"
            f" {listed_names(rows.column_names)}"
        )
    return list(rows[column])


def neutral_prompts(*, conversations: bool = False, in_rows: bool = True) -> Prompts:
    """Return a few neutral prompts, for a recipe without public ones."""
    asked = [[{"role": "user", "content": text if in_rows else ""}] for text in _NEUTRAL]
    some = in_memory_prompts(asked if conversations else _NEUTRAL)
    return some.changed(in_rows=in_rows)
