"""What a supervised stage asks of its rows, checked by the recipe and the public types alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import numpy as np
import pyarrow as pa

from dprlhf.data.columns import NUMBERS, is_text
from dprlhf.data.users import Prompts
from dprlhf.errors import EXITS, DprlhfError, one_line
from dprlhf.recipe import Data


def check_columns(data: Data) -> None:
    """Refuse a section in which two keys name one column, so that no row could be read."""
    keys: dict[str, str] = {}
    for key in _column_keys(data):
        column = getattr(data, key)
        if column in keys:
            raise DprlhfError(
                f"data.{keys[column]} and data.{key} are both {column!r}: each needs a column of"
                " its own (of preference pairs, dprlhf dpo alone reads the prompt from chosen)"
            )
        keys[column] = key


def _column_keys(data: Data) -> list[str]:
    """Return the keys of the columns that a task reads; an implicit prompt has none of its own."""
    pairs = [key for key in ("chosen_column", "rejected_column") if hasattr(data, key)]
    keys = [*(key for key in type(data).model_fields if key.endswith("_column")), *pairs]
    unread = {"user_column"}
    if getattr(data, "label_column", None) is not None:
        unread |= {"chosen_column", "rejected_column"}
    if getattr(data, "implicit_prompt", False):
        unread.add("prompt_column")
    return [key for key in keys if key not in unread and getattr(data, key) is not None]


_ASKED, _ANSWERS = "How is the weather today?", ("It rains.", "The sun is out.")


def made_up_rows(data: Data, schema: pa.Schema, usual: dict[str, Any]) -> list[Prompts]:
    """Return made-up rows of the form that the types of the users' columns give."""
    unmade = {data.prompt_column, getattr(data, "label_column", None), *usual}
    named = [getattr(data, key) for key in _column_keys(data)]
    others = [column for column in named if column not in unmade]
    implicit = getattr(data, "implicit_prompt", False)
    asked = _made_up(
        schema.field(data.prompt_column).type,
        _ANSWERS[0],
        asked=True,
        answered=not others or implicit,
    )
    answers = [
        _made_up(schema.field(column).type, answer, asked=implicit, answered=True)
        for column, answer in zip(others, cycle(reversed(_ANSWERS)), strict=False)
    ]
    first = np.zeros(1, dtype=np.int64)
    values = {column: [value] for column, value in usual.items()}
    return [
        Prompts(
            [prompt if isinstance(prompt, list) else str(prompt)],
            first,
            first,
            {column: [value] for column, value in zip(others, rest, strict=True)} | values,
        )
        for prompt, *rest in product(asked, *answers)
    ]


def _made_up(kind: pa.DataType, answer: str, *, asked: bool, answered: bool) -> list[Any]:
    """Return made-up values of a column: a text, a number or messages, or one of each kind."""
    said = {"user": _ASKED} if asked else {}
    said |= {"assistant": answer} if answered else {}
    text = " ".join(said.values())
    if is_text(kind):
        return [1 if any(is_number(kind) for is_number in NUMBERS) else text]
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    message: Any = kind.value_type if lists else None
    at = message.get_field_index("content") if isinstance(message, pa.StructType) else -1
    parts = at >= 0 and pa.types.is_nested(message.field(at).type)
    messages = [
        {"role": role, "content": [{"type": "text", "text": content}] if parts else content}
        for role, content in said.items()
    ]
    return [messages] if lists else [text, messages]


def failure_message(act: Callable[[], object], *, quoted: bool) -> str:
    """Return why something fails; empty where it does not."""
    try:
        act()
    except EXITS:
        raise
    except DprlhfError as error:
        return str(error)
    except BaseException as error:  # a panic in a tokenizer's compiled code is no Exception
        name = type(error).__name__
        return f"{name}: {one_line(error, 100)}" if quoted else name
    return ""
