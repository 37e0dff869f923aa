"""The column with the users' names: one number for all spellings of a name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.data.columns import NUMBERS, ROWS_AT_ONCE, called, is_json, is_text
from dprlhf.data.loading import listed, rows_without_value
from dprlhf.data.spelling import UNSEEN, WHOLE
from dprlhf.errors import DprlhfError

SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
"""The characters that ``str.strip`` removes."""


def user_codes(rows: Any, spec: recipe.Data) -> NDArray[np.int64]:
    """Number the values of the user column in the order of their first rows, ``[rows]``.

    The column stays in Arrow's memory, where a text costs its bytes and no Python object.
    """
    batches = rows.select_columns([spec.user_column]).with_format("arrow").iter(ROWS_AT_ONCE)
    names = pa.chunked_array([chunk for batch in batches for chunk in batch.column(0).chunks])
    if pa.types.is_dictionary(names.type):  # each file may come with a dictionary of its own
        names = names.cast(names.type.value_type)
    where = f"data {spec.path!r}: user_column {spec.user_column!r}"
    if is_json(names.type):
        raise DprlhfError(
            f"{where} mixes types, as texts and numbers are: write all its values as text"
        )
    if not is_text(names.type):
        raise DprlhfError(
            f"{where} must hold a text or a number in every row, not {called(names.type)}"
        )
    if missing := rows_without_value(names):
        raise DprlhfError(
            f"{where} must hold a text or a number in every row ({listed(missing, 'row')} have"
            " none): rows without a user are nobody's privacy unit; fill or drop them"
        )
    if not any(is_kind(names.type) for is_kind in NUMBERS):
        # A name that is composed in two ways, or has a space at its end, is one person's, as for
        # the budget book (written): two users would bring twice what the book charges.
        names = names_as_written(names)
    if pa.types.is_floating(names.type):  # 0.0 and -0.0 are one number, and one name in the book
        names = pc.add(names.cast(pa.float64()), 0.0)
    codes = [chunk.indices.to_numpy() for chunk in names.dictionary_encode().chunks]
    return np.concatenate(codes).astype(np.int64)


def names_as_written(names: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column of texts as :func:`~dprlhf.data.spelling.written` has each.

    Parts in which nothing changes, nearly all as a rule, stay where they are and are not copied.
    """

    def part(chunk: pa.Array) -> pa.Array:
        given = chunk.cast(pa.string())
        made = pc.replace_substring_regex(given, UNSEEN, "")
        made = pc.utf8_trim(pc.utf8_normalize(made, form="NFKC"), characters=SPACES)
        made = pc.replace_substring_regex(made, f"^{WHOLE}$", r"\1\2")
        made = pc.replace_substring_regex(made, "^-0$", "0")
        return given if made.equals(given) else made

    return pa.chunked_array([part(chunk) for chunk in names.chunks])
