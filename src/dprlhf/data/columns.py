"""The types of columns, which are public: which can hold prompts, and which names of users."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dprlhf.data.spelling import DEPTH, ENTRIES
from dprlhf.errors import DprlhfError

NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)


_BYTES = (
    pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary,
)  # fmt: skip
_LISTS = (
    pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_map,
)  # fmt: skip

NAMES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, *NUMBERS)


def answer_columns(spec: Any) -> set[str]:
    """Return the columns of a recipe's data that hold completions: texts or messages."""
    keys = ("completion_column", "chosen_column", "rejected_column")
    return {column for key in keys if (column := getattr(spec, key, None)) is not None}


def listed_names(names: Sequence[str]) -> str:
    """Return columns' names for a message; none where the first row may be a user's, no header.

    >>> listed_names(["prompt", "user_id"]), listed_names(["u17", "I have hepatitis, what now?"])
    ('prompt, user_id', 'not shown: some are no usual names (is the first row a header?)')
    """
    if all(re.fullmatch(r"[\w.:/-]{1,40}( [\w.:/-]{1,12})?", name) for name in names):
        return ", ".join(names)
    return "not shown: some are no usual names (is the first row a header?)"


_PERSONS = {
    "account", "author", "client", "customer", "email", "member", "owner", "patient", "person",
    "speaker", "student", "user", "username", "visitor", "worker",
}  # fmt: skip
"""Words by which a column's name looks like that of whoever its rows are from."""

_BESIDE = {"address", "hash", "id", "key", "name", "no", "number", "uuid"}
"""Words that may stand beside them."""


def person_column(names: Iterable[str]) -> str | None:
    """Return the first column whose name looks like that of a person; None without one.

    >>> person_column(["prompt", "customerId"]), person_column(["user_prompt", "score"])
    ('customerId', None)
    """
    for name in names:
        words = {*re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower())}
        if words & _PERSONS and words <= _PERSONS | _BESIDE:
            return name
    return None


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


ROWS_AT_ONCE = 10_000
"""Rows of a column that are read into memory together."""

MOST_BYTES = 2**20
"""Most bytes of a row that is read. A tokenizer takes up to 300 times the memory of a text, so that
without a bound one user could end a run in the round of its rows."""


def bytes_of(column: pa.Array) -> NDArray[np.int64]:
    """Return the bytes that each value of a column takes, ``[rows]``, to be compared with a bound.

    A number counts nothing, an entry of a list its share of ``ENTRIES``, and an image or a sound,
    which no tokenizer reads, a part of its bytes. JSON that is nested deeper than ``DEPTH`` counts
    as more than ``MOST_BYTES``.
    """
    kind = column.type
    if is_json(kind):
        sizes, texts = bytes_of(column.storage), column.storage
        opened = pc.add(pc.count_substring(texts, "["), pc.count_substring(texts, "{"))
        lists = opened.fill_null(0).to_numpy(zero_copy_only=False)
        sizes += lists * (MOST_BYTES // ENTRIES)
        for row in np.flatnonzero((lists > DEPTH) & (sizes <= MOST_BYTES)):
            marks = re.findall(r"[][{}]", re.sub(r'"(?:[^"\\]|\\.)*"', "", texts[row].as_py()))
            depths = itertools.accumulate(1 if mark in "[{" else -1 for mark in marks)
            if max(depths, default=0) > DEPTH:
                sizes[row] = MOST_BYTES + 1
        return sizes
    if isinstance(kind, pa.BaseExtensionType):
        return bytes_of(column.storage)
    if pa.types.is_dictionary(kind):
        return bytes_of(column.dictionary_decode())
    sizes = np.zeros(len(column), dtype=np.int64)
    if pa.types.is_struct(kind):
        for part in column.flatten():
            sizes += bytes_of(part)
    elif any(is_kind(kind) for is_kind in _LISTS):
        if pa.types.is_map(kind):
            entry = pa.struct([("key", kind.key_type), ("value", kind.item_type)])
            column = column.cast(pa.list_(entry))
        parents = pc.list_parent_indices(column).to_numpy()
        inner = bytes_of(pc.list_flatten(column)) + MOST_BYTES // ENTRIES
        sizes += np.bincount(parents, inner, len(column)).astype(np.int64)
    elif pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return bytes_of(column.cast(pa.large_string() if is_text(kind) else pa.large_binary()))
    elif any(is_kind(kind) for is_kind in _BYTES):
        lengths = pc.binary_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        sizes += lengths if is_text(kind) else lengths // 32
    return sizes


MOST_PIXELS = 2**24
"""Most pixels of an image that is decoded. A small file can hold many thousand times its bytes."""


@contextlib.contextmanager
def bounded_images() -> Iterator[None]:
    """Refuse images of more than ``MOST_PIXELS`` inside the context: their rows cannot be read."""
    # :func:`check_decodable` has loaded it, if there is a column of images.
    pillow: Any = sys.modules.get("PIL.Image")
    if pillow is None:
        yield
        return
    before, pillow.MAX_IMAGE_PIXELS = pillow.MAX_IMAGE_PIXELS, MOST_PIXELS // 2  # it refuses twice
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pillow.DecompressionBombWarning)
            yield
    finally:
        pillow.MAX_IMAGE_PIXELS = before


def check_readable(rows: Any, column: str, where: str) -> None:
    """Check that a column's type is that of texts, numbers or conversations.

    Of any other every row would be unreadable, and a run would spend its budget on nothing. A type
    is assumed to be public, also that of a column without any value; the keys of mappings are from
    rows, so the message has none. Where the type is that of texts, and no row has one, nothing is
    refused: whether others have a value is private.
    """
    kind = rows.features.arrow_schema.field(column).type
    message = _element(kind)
    struct = isinstance(message, pa.StructType)
    if pa.types.is_null(kind):
        raise DprlhfError(f"{where} {column!r} has no value in any row: a run would learn nothing")
    talks = is_json(message) or (struct and kind.value_type.get_field_index("role") >= 0)
    if talks or is_text(kind) or is_json(kind):
        return
    actual = called(kind) if message is None else f"lists of {called(message)}"
    actual += " without a role" if struct else ""
    raise DprlhfError(
        f"{where} {column!r} holds {actual}: give texts, numbers, or conversations, which are lists"
        " of messages with a role and a content"
    )


def check_decodable(rows: Any, where: str) -> None:
    """Refuse a column of sound or images, say, whose decoder is not installed.

    Else no user could be read, each would contribute zero, and a run would release noise alone.
    Only the columns' types decide it; bytes of no user's are what is decoded.
    """
    for column, feature in rows.features.items():
        for part in parts_of(feature):
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


def parts_of(feature: Any) -> Iterator[Any]:
    """Yield a column's type and all types inside it."""
    if isinstance(feature, dict):
        inside: list[Any] = list(feature.values())
    else:
        yield feature
        inside = feature if isinstance(feature, list) else [getattr(feature, "feature", None)]
    for part in inside:
        if part is not None:
            yield from parts_of(part)
