"""The types of columns, which are public: which can hold prompts, and which names of users."""

from __future__ import annotations

from collections.abc import Iterator
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


def is_json(kind: pa.DataType | None) -> bool:
    """Return whether a type is that of values of several kinds, as ``datasets`` keeps them."""
    return getattr(kind, "extension_name", None) == "arrow.json"


def called(kind: pa.DataType) -> str:
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
    talks = is_json(message) or (struct and kind.value_type.get_field_index("role") >= 0)
    if talks or is_text(kind) or is_json(kind):
        return
    found = called(kind) if message is None else f"lists of {called(message)}"
    found += " without a role" if struct else ""
    raise DprlhfError(
        f"{where} {column!r} holds {found}: give texts, numbers, or conversations, which are lists"
        " of messages with a role and a content"
    )


def check_decodable(rows: Any, where: str) -> None:
    """Refuse a column of sound or images, say, whose decoder is not installed.

    Else no user could be read, each would contribute zero, and a run would release noise alone.
    Only the columns' types decide it; bytes of no user's are what is decoded.

    Args:
        rows: A ``datasets.Dataset``.
        where: Names the rows in the message.

    Raises:
        DprlhfError: A package is missing.
    """
    for column, feature in rows.features.items():
        for part in _parts(feature):
            if not getattr(part, "decode", False):
                continue
            try:
                part.decode_example({"bytes": b"", "path": None})
            except ImportError as missing:
                raise DprlhfError(
                    f"{where}: the column {column!r} ({type(part).__name__}) cannot be decoded"
                    f" ({missing}): install what is missing, or leave the column out"
                ) from None
            except Exception:  # the decoder is there, and these bytes are nothing
                continue


def _parts(feature: Any) -> Iterator[Any]:
    """Yield a column's type and all types inside it."""
    if isinstance(feature, dict):
        inside: list[Any] = list(feature.values())
    else:
        yield feature
        inside = feature if isinstance(feature, list) else [getattr(feature, "feature", None)]
    for part in inside:
        if part is not None:
            yield from _parts(part)
