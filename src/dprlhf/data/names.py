"""The columns with the users' names: one number for all spellings of a name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.data.columns import NUMBERS, ROWS_AT_ONCE, called, is_json, is_text
from dprlhf.data.loading import listed, rows_without_value
from dprlhf.data.spelling import UNSEEN, WHOLE, hash_of, written
from dprlhf.errors import DprlhfError

SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
"""The characters that ``str.strip`` removes."""


def user_codes(rows: Any, spec: recipe.Data) -> NDArray[np.int64]:
    """Number the values of the user column in the order of their first rows, ``[rows]``.

    The column stays in Arrow's memory, where a text costs its bytes and no Python object.
    """
    names = _column(rows, spec, *spec.owners)
    if not any(is_kind(names.type) for is_kind in NUMBERS):
        # A name that is composed in two ways, or has a space at its end, is one person's, as for
        # the budget book (written): two users would bring twice what the book charges.
        names = names_as_written(names)
    if pa.types.is_floating(names.type):  # 0.0 and -0.0 are one number, and one name in the book
        names = pc.add(names.cast(pa.float64()), 0.0)
    codes = [chunk.indices.to_numpy() for chunk in names.dictionary_encode().chunks]
    return np.concatenate(codes).astype(np.int64)


def matched(
    rows: Any, spec: recipe.Data, only: Collection[int] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of groups of which no two share a person, and the number of each row's group.

    A group is all whose one row is, as a rule a pair. Groups are taken one after the other (a
    greedy matching): those first whose people are in the fewest groups, then by their names. So
    each person is in the rows of one group at most, and who shares rows with whom decides alone.
    With hashes of groups in ``only`` those are returned. Numbers are in the order of first rows.
    """
    groups, of_row = groups_in(rows, spec)
    different = {group for group in groups if only is None or hash_of_group(group) in only}
    of_person = Counter(person for group in different for person in group)
    chosen, taken = dict[tuple[str, ...], int](), set[str]()
    for group in sorted(different, key=lambda group: (sum(of_person[p] for p in group), group)):
        if taken.isdisjoint(group):
            chosen[group] = len(chosen)
            taken.update(group)
    number = np.array([chosen.get(group, -1) for group in groups])[of_row]
    kept = np.flatnonzero(number >= 0)
    return kept, pa.array(number[kept]).dictionary_encode().indices.to_numpy().astype(np.int64)


def hash_of_group(group: tuple[str, ...]) -> int:
    """Return the hash by which a run knows a group after a withdrawal."""
    return int(hash_of(["\0".join(group)])[0])


def groups_in(rows: Any, spec: recipe.Data) -> tuple[list[tuple[str, ...]], NDArray[np.int64]]:
    """Return the owners of rows, as sorted names, and the place among these of each row's."""
    people: dict[str, int] = {}
    columns = []
    for column in spec.owners:
        coded = _column(rows, spec, column).dictionary_encode().unify_dictionaries()
        names = coded.chunk(0).dictionary.to_pylist()  # that of all chunks
        numbers = np.array([people.setdefault(written(name), len(people)) for name in names])
        columns.append(numbers[np.concatenate([chunk.indices for chunk in coded.chunks])])
    distinct, of_row = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    known = list(people)
    groups = [tuple(sorted({known[person] for person in row})) for row in distinct.tolist()]
    return groups, of_row.ravel()


def _column(rows: Any, spec: recipe.Data, column: str) -> pa.ChunkedArray:
    """Return a column of names, of which no row may lack one."""
    batches = rows.select_columns([column]).with_format("arrow").iter(ROWS_AT_ONCE)
    names = pa.chunked_array([chunk for batch in batches for chunk in batch.column(0).chunks])
    if pa.types.is_dictionary(names.type):  # each file may come with a dictionary of its own
        names = names.cast(names.type.value_type)
    where = f"data {spec.path!r}: user_column {column!r}"
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
    return names


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
