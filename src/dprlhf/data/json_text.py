"""JSON as text: what it holds, and whether that is a conversation."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from dprlhf.data.spelling import DEPTH, storable, too_nested


def conversation_in(text: Any) -> list[dict[str, Any]] | None:
    """Return the messages of a JSON text; None where it is something else."""
    try:
        given = parsed(text)
    except (TypeError, ValueError):
        return None
    talks = isinstance(given, list) and all(
        isinstance(one, dict) and "role" in one for one in given
    )
    return storable(given) if talks and not too_nested(given) else None


def parsed(text: str) -> Any:
    """Return what a JSON text holds, without what is nested deeper than Python reads it."""
    read = functools.partial(json.loads, object_pairs_hook=_without_repeats, parse_int=_whole)
    try:
        return read(text)
    except RecursionError:
        # Null stands for what has many more lists in lists than are read.
        kept, start, depth, most = [], 0, 0, DEPTH + 4
        for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[][{}]', text):
            if token[0] in "[{":
                depth += 1
                if depth == most:
                    kept += [text[start : token.start()], "null"]
            elif token[0] in "]}":
                start = token.end() if depth == most else start
                depth -= 1
        return read("".join([*kept, text[start:]]))


def _whole(digits: str) -> int | str:
    """Return a whole number; one that 64 bits do not hold as its text, for its row alone."""
    number = int(digits) if len(digits) <= 20 else 2**63
    return number if -(2**63) <= number < 2**63 else digits


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; refuse one that has a key twice, of which a reader would take one."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key comes twice")
    return made
