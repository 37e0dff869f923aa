"""How values are spelt: as their row alone would have them, and for comparison with others."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dprlhf.data.messages import text_of

DEPTH = 64
"""Most lists and mappings in one another that a value may have."""
ENTRIES = 2**16
"""Most entries of lists and mappings that a value may have in all."""
KEYS = 1024
"""Most different keys that the mappings of a value may have."""

UNSEEN = (
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\ufe00-\ufe0f\ufeff\ufff9-\ufffb\U000e0001-\U000e007f]"
)
"""Characters that are not seen: controls, marks of direction and order, variation selectors."""

_PLUS = r"\+?"
WHOLE = _PLUS + r"(-?)0*(0|[1-9][0-9]*)(?:\.0+)?"
"""A whole number as text: its sign, zeros in front, its digits, and a fraction of nothing."""

_FIRST = ("role", "content", "id", "type", "function", "name", "arguments")
"""Keys of messages and of the calls of tools in the order in which chat templates know them."""


def undo_arrow_unification(value: Any) -> Any:
    """Return a value from an Arrow table as it would be if its row were the only one.

    Arrow has one type for the values of all rows. So mappings have the keys of all rows, with None
    for those that they lack, in the order of the first row, and a missing value or a fraction in
    one row turns the integers of all into floats. A chat template that asks for a key, or a reward
    that writes a number, would depend on other rows.
    """
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        return [undo_arrow_unification(one) for one in value]
    if not isinstance(value, dict):
        return value
    known = {key: _FIRST.index(key) if key in _FIRST else len(_FIRST) for key in value}
    ordered = sorted(value, key=lambda key: (known[key], key))
    return {key: undo_arrow_unification(value[key]) for key in ordered if value[key] is not None}


def too_nested(value: Any) -> bool:
    """Return whether a value has more lists and mappings, or more in them, than are read.

    Whatever walks over a value does so by recursion, which ends where Python's limit is
    (``DEPTH``). A reader of JSON takes a time quadratic in the lists that it finds (``ENTRIES``).
    In a table, each different key is a column in which all rows have a place (``KEYS``).
    """
    level, keys, entries = [value], set[Any](), 0
    for _ in range(DEPTH + 1):
        mappings = [one for one in level if isinstance(one, dict)]
        level = [inner for one in level if isinstance(one, list | tuple) for inner in one]
        for one in mappings:
            keys.update(one)
            level += one.values()
        entries += len(level)
        if len(keys) > KEYS or entries > ENTRIES:
            return True
        if not level:
            return False
    return True


def storable(value: Any) -> Any:
    """Return a value as Arrow can hold it: a UUID is a text, and half a character becomes "?".

    Whoever cuts a text in the middle of a character that takes two units of UTF-16, as JavaScript
    does, leaves a lone surrogate, which is no UTF-8.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, list | tuple):
        return [storable(one) for one in value]
    if isinstance(value, dict):
        return {storable(key): storable(one) for key, one in value.items()}
    return str(value) if isinstance(value, uuid.UUID) else value


def spelt(value: Any) -> Any:
    """Return the truth value or number that a text spells; anything else as it is.

    Where one field of a CSV column is neither, all its fields are texts. So what a row says is read
    from its own field, and does not change with another user's.

    >>> spelt("True"), spelt(" 1"), spelt("-0.5"), spelt("spam"), spelt("inf")
    (True, 1, -0.5, 'spam', 'inf')
    """
    text = value.strip().lower() if isinstance(value, str) else ""
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII):
        return int(text)
    number = r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?"
    return float(text) if re.fullmatch(number, text, re.ASCII) else value


def written(value: Any) -> str:
    """Return a name as text: 17, 17.0 (a column with gaps), "17", "+17" and "017" are one user.

    Programs that read a table take "017" for a number in some files, or parts of files, and for a
    text in others. Names that look alike are one user, too: what is not seen is left out, such as
    a space of no width, and letters of another width or style are the plain ones (NFKC). Two people
    whose names differ in that alone are one privacy unit, which costs neither a part of the
    guarantee; one person who counted as two would. What a reader tells apart is two users: "a" and
    "A", "1" and "1e0", "1" and "one".

    >>> [written(name) for name in (17.0, "017", "0", "-0.0", "1.70", "A07", "\\uff11\\u200b")]
    ['17', '17', '0', '0', '1.70', 'A07', '1']
    """
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = unicodedata.normalize("NFKC", re.sub(UNSEEN, "", text)).strip()
    whole = re.fullmatch(WHOLE, text)
    return text if whole is None else f"{whole[1]}{whole[2]}".replace("-0", "0")


def known_as(value: Any) -> str:
    """Return the text by which a user is known: a name, or without names a prompt or a whole row.

    It depends on no other row, so that nobody is unknown in a file where another row comes first.

    >>> known_as({"content": "why?", "role": "user", "name": None})
    '{"role": "user", "content": "why?"}'
    """
    return written(undo_arrow_unification(value))


def hash_of(texts: Sequence[str]) -> NDArray[np.uint64]:
    """Return a hash of each text, without a key, ``[texts]``."""
    written_out = (text.encode(errors="surrogatepass") for text in texts)
    digests = (hashlib.blake2b(one, digest_size=8).digest() for one in written_out)
    return np.fromiter(map(int.from_bytes, digests), dtype=np.uint64)


def plain(value: Any) -> str:
    """Return the words of a text, a conversation, or a list of these, without regard to case.

    A message without text, such as a call of a tool, is known by all else that it holds but its
    role. Unicode writes some letters in two ways; they are brought into its normal form C (NFC).
    """
    if isinstance(value, list | tuple):
        return " ".join(filter(None, map(plain, value)))
    text = text_of(value)
    if isinstance(value, dict) and not text.strip():
        held = {
            k: v
            for k, v in undo_arrow_unification(value).items()
            if k != "role" and v not in ("", [])
        }
        text = json.dumps(held, sort_keys=True, default=str, ensure_ascii=False) if held else ""
    # Upper and lower case of some letters are alike in the other form (NFD) alone.
    folded = unicodedata.normalize("NFD", text).casefold()
    return " ".join(unicodedata.normalize("NFC", folded).split())
