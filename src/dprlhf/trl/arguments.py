"""The arguments of a private trainer: rows, model and tokenizer as TRL's trainers take them."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar, cast

from dprlhf.data.given_rows import rows_from
from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.recipe import Recipe
from dprlhf.training.policy_setup import load_policy_of
from dprlhf.trl.config import PrivacyFields

C = TypeVar("C", bound=PrivacyFields)


def rows_of(given: Any, name: str, *, may_lack_prompts: bool) -> Any:
    """Return rows in memory as a ``datasets.Dataset``, with a column ``prompt`` if they need it."""
    if given is None:
        raise DprlhfError(
            f"{name}: give the users' prompts; without any there is nobody to protect"
        )
    if isinstance(given, dict):
        raise DprlhfError(f"{name}: give one dataset, not a dictionary of several")
    if isinstance(given, str):
        raise DprlhfError(
            f"{name}={given!r}: give the rows, such as datasets.load_dataset({given!r},"
            " split='train')"
        )
    if not (isinstance(given, Iterable) or callable(given) or hasattr(given, "columns")):
        raise DprlhfError(
            f"{name}: give a datasets.Dataset or a list of rows, not a {type(given).__name__}"
        )
    rows = rows_from(given, "prompt")
    if "prompt" not in rows.column_names and not may_lack_prompts:
        found = ", ".join(rows.column_names)
        raise DprlhfError(f"{name}: there is no column 'prompt'; the columns are {found}")
    if images := [column for column in rows.column_names if column in ("image", "images")]:
        raise DprlhfError(
            f"{name}: the column {images[0]!r} would be given to the model in TRL, and the models"
            f" here read text alone: take it out, as with remove_columns({images[0]!r})"
        )
    return rows


def policy_of(recipe: Recipe, model: Any, tokenizer: Any) -> CausalLMPolicy:
    """Return the policy of a trainer's model, which is a name or a model."""
    given = None if isinstance(model, str) else model
    if given is not None and not hasattr(given, "config"):
        raise DprlhfError(f"model: a {type(model).__name__} is no name and no transformers model")
    return load_policy_of(recipe, model=given, tokenizer=tokenizer)


def with_user_column(config: C, column: str | None) -> C:
    """Return a copy of a trainer's config whose ``privacy_unit`` is the trainer's ``user_column``.

    Raises:
        DprlhfError: The config names another column, or it is no name.
    """
    own: Any = copy.copy(config)
    if column is not None and not isinstance(column, str):
        raise DprlhfError(f"user_column: give the name of a column, not {column!r}")
    if column is not None:
        if own.privacy_unit not in (None, column):
            raise DprlhfError(
                f"user_column={column!r}, but args.privacy_unit is {own.privacy_unit!r}"
            )
        own.privacy_unit = column
    return cast(C, own)


def refuse_optimizers(optimizers: Any) -> None:
    """Refuse what a private trainer does not take, with the reason."""
    if optimizers not in (None, (), [], (None, None), [None, None]):
        raise DprlhfError(
            "optimizers: the optimizer steps along released gradients, and a resumed run makes it"
            " again: name it in args (optim, learning_rate, lr_scheduler_type)"
        )
