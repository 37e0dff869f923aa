"""How values are spelt: as their row alone would have them, and for comparison with others."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dprlhf.data.messages import text_of

SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
"""The characters that ``str.strip`` removes."""


_WHOLE = r"(-?)0*(0|[1-9][0-9]*)(?:\.0+)?"
"""A whole number as text: its sign, zeros in front, its digits, and a fraction of nothing."""

_FIRST = ("role", "content", "id", "type", "function", "name", "arguments")
"""Keys of messages and of the calls of tools in the order in which chat templates know them."""


def as_alone(value: Any) -> Any:
    """Return a value from an Arrow table as it would be if its row were the only one.

    Arrow has one type for the values of all rows. So mappings have the keys of all rows, with None
    for those that they lack, in the order of the first row, and a missing value or a fraction in
    one row turns the integers of all into floats. A chat template that asks for a key, or a reward
    that writes a number, would depend on other rows.
    """
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        return [as_alone(one) for one in value]
    if not isinstance(value, dict):
        return value
    known = {key: _FIRST.index(key) if key in _FIRST else len(_FIRST) for key in value}
    ordered = sorted(value, key=lambda key: (known[key], key))
    return {key: as_alone(value[key]) for key in ordered if value[key] is not None}


def written(value: Any) -> str:
    """Return a name as text: 17, 17.0 (a column with gaps), "17", "17.0" and "017" are one user.

    Programs that read a table take "017" for a number in some files, or parts of files, and for a
    text in others.

    >>> [written(name) for name in (17.0, "017", "0", "-0.0", "1.70", "A07")]
    ['17', '17', '0', '0', '1.70', 'A07']
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = unicodedata.normalize("NFC", text).strip()
    whole = re.fullmatch(_WHOLE, text)
    return text if whole is None else f"{whole[1]}{whole[2]}".replace("-0", "0")


def known_as(value: Any) -> str:
    """Return the text by which a user is known: a name, or without names a prompt or a whole row.

    It depends on no other row, so that nobody is unknown in a file where another row comes first.

    >>> known_as({"content": "why?", "role": "user", "name": None})
    '{"role": "user", "content": "why?"}'
    """
    return written(as_alone(value))


def formerly_written(value: Any) -> list[str]:
    """Return the texts as which earlier versions may have hashed a name: as its file had it."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    whole = written(value)
    return [text, whole, f"{whole}.0"] if whole.lstrip("-").isdecimal() else [text, whole]


def hash_of(texts: Sequence[str]) -> NDArray[np.uint64]:
    """Return a hash of each text, without a key, ``[texts]``."""
    from pandas.util import hash_array

    hashes: NDArray[np.uint64] = hash_array(np.array(texts, dtype=object), categorize=False)
    return hashes


def plain(value: Any) -> str:
    """Return the words of a text, a conversation, or a list of these, without regard to case.

    A message without text, such as a call of a tool, is known by all else that it holds but its
    role. Unicode writes some letters in two ways; they are brought into its normal form C (NFC).
    """
    if isinstance(value, list | tuple):
        return " ".join(filter(None, map(plain, value)))
    text = text_of(value)
    if isinstance(value, dict) and not text.strip():
        held = {k: v for k, v in as_alone(value).items() if k != "role" and v not in ("", [])}
        text = json.dumps(held, sort_keys=True, default=str, ensure_ascii=False) if held else ""
    # Upper and lower case of some letters are alike in the other form (NFD) alone.
    folded = unicodedata.normalize("NFD", text).casefold()
    return " ".join(unicodedata.normalize("NFC", folded).split())


def names_as_written(names: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column of texts as :func:`written` has each.

    Parts in which nothing changes, nearly all as a rule, stay where they are and are not copied.
    """

    def part(chunk: pa.Array) -> pa.Array:
        given = chunk.cast(pa.string())
        made = pc.utf8_trim(pc.utf8_normalize(given, form="NFC"), characters=SPACES)
        made = pc.replace_substring_regex(made, f"^{_WHOLE}$", r"\1\2")
        made = pc.replace_substring_regex(made, "^-0$", "0")
        return given if made.equals(given) else made

    return pa.chunked_array([part(chunk) for chunk in names.chunks])
