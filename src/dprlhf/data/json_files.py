"""JSON as text and in files: conversations, rows, columns whose values may differ in kind."""

from __future__ import annotations

import codecs
import functools
import json
import math
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from dprlhf.data.spelling import DEPTH, storable, too_nested
from dprlhf.errors import BrokenLinesError


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
    read = functools.partial(
        json.loads, object_pairs_hook=_without_repeats, parse_int=_whole, parse_float=_finite,
        parse_constant=_finite,
    )  # fmt: skip
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


def _finite(digits: str) -> float | None:
    """Return a number; None for NaN, which stands for no value, and what no float holds."""
    number = float(digits)
    return number if math.isfinite(number) else None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; refuse one that has a key twice, of which a reader would take one."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key comes twice")
    return made


def read_json(files: Sequence[str], texts: Collection[str] = ()) -> Any:
    """Return the rows of files with a JSON object in each line, or with one list of objects.

    A value keeps the type that JSON gives it: a text that looks like a date stays a text, and where
    the values of a column differ in kind, each keeps its own.
    """
    rows = [row for file in files for row in _objects(file)]
    names = dict.fromkeys(name for row in rows for name in row)
    return of_any_kinds({name: [row.get(name) for row in rows] for name in names})


def of_any_kinds(columns: dict[str, list[Any]]) -> Any:
    """Return the rows of columns whose values may differ in kind; each keeps its own."""
    import datasets

    features = datasets.Features({name: _feature(values) for name, values in columns.items()})
    encoded = {
        name: [_encoded(value, feature) for value in columns[name]]
        for name, feature in features.items()
    }
    return datasets.Dataset.from_dict(encoded, features=features)


def _feature(values: list[Any]) -> Any:
    """Return the type of a column's values; that of JSON where Arrow has none for all of them."""
    import datasets

    try:
        rows = datasets.Dataset.from_dict({"of": values}, on_mixed_types="use_json")
    except (pa.ArrowException, TypeError, ValueError, OverflowError):  # which quotes a value
        return datasets.Json()
    return rows.features["of"]


def _encoded(value: Any, feature: Any) -> Any:
    """Return a value with those parts as JSON that ``datasets`` keeps as JSON.

    It takes a text such as "7" or "null" for JSON already, and returns 7 or nothing.
    """
    import datasets

    if value is None:
        return None
    if isinstance(feature, datasets.Json):
        return json.dumps(value)
    if isinstance(feature, datasets.List):
        return [_encoded(one, feature.feature) for one in value]
    if isinstance(feature, dict):
        return {key: _encoded(value.get(key), inner) for key, inner in feature.items()}
    return value


def _objects(file: str) -> Iterator[dict[str, Any]]:
    content = Path(file).read_bytes().removeprefix(codecs.BOM_UTF8)
    if content.lstrip()[:1] == b"[":
        for row in parsed(content.decode()):
            if not isinstance(row, dict):
                raise TypeError("a row is no JSON object")
            yield _row(row)
        return
    broken: list[int] = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = parsed(line.decode())
        except ValueError:
            row = None
        if not isinstance(row, dict):
            broken.append(number)
        elif not broken:
            yield _row(row)
    if broken:
        raise BrokenLinesError(broken, "a line is no JSON object, or has a key twice")


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without what no reader could take: its values nested too deep become None."""
    row = {name: None if too_nested(value) else value for name, value in row.items()}
    return dict(storable(row))
