"""The types of columns, which are public: which can hold prompts, and which names of users."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from dprlhf.errors import DprlhfError

NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)


NAMES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, *NUMBERS)


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column of this type is read as text; one without any value is, too."""
    return pa.types.is_null(kind) or any(is_kind(kind) for is_kind in NAMES)


def _element(kind: pa.DataType) -> pa.DataType | None:
    """Return the type of a list's elements; None for what is no list."""
    return kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else None


def _is_json(kind: pa.DataType | None) -> bool:
    """Return whether a type is that of values of several kinds, as ``datasets`` keeps them."""
    return getattr(kind, "extension_name", None) == "arrow.json"


def _called(kind: pa.DataType) -> str:
    """Return what values of a type are called in a message, without the keys of mappings."""
    if _element(kind) is not None:
        return "lists"
    return "mappings" if pa.types.is_nested(kind) else str(kind)


def check_readable(rows: Any, column: str, where: str) -> None:
    """Check that a column's type is that of texts, numbers or conversations.

    Of any other every row would be unreadable, and a run would spend its budget on nothing. A type
    is public; the keys of mappings are from rows, so the message has none.

    Args:
        rows: A ``datasets.Dataset``.
        column: Name of one of its columns.
        where: The beginning of the message.

    Raises:
        DprlhfError: It is not.
    """
    kind = rows.features.arrow_schema.field(column).type
    message = _element(kind)
    struct = isinstance(message, pa.StructType)
    talks = _is_json(message) or (struct and kind.value_type.get_field_index("role") >= 0)
    if talks or is_text(kind) or _is_json(kind):
        return
    found = _called(kind) if message is None else f"lists of {_called(message)}"
    found += " without a role" if struct else ""
    raise DprlhfError(
        f"{where} {column!r} holds {found}: give texts, numbers, or conversations, which are lists"
        " of messages with a role and a content"
    )
