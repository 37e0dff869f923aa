"""Files of rows by their format. To read another one, add an entry to ``FORMATS``.

CSV and JSON files have no types. ``datasets`` guesses them for each part of a file, so that a user
"007" among names such as "A12" would be 7 in a later part: one person as two users, and another
user's word would change how a value is read. Here a column is read as a whole.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

Read = Callable[[Sequence[str], Collection[str]], Any]
"""Returns the ``datasets.Dataset`` of files, given their paths and the columns that are texts."""


def _with_datasets(builder: str) -> Read:
    """Return a reader of files by one of the builders of ``datasets.load_dataset``."""

    def read(files: Sequence[str], texts: Collection[str]) -> Any:
        import datasets

        given = {"train": list(files)}
        return datasets.load_dataset(
            builder, data_files=given, split="train", cache_dir=own_cache()
        )

    return read


def own_cache() -> str:
    """Return a folder in the cache of ``datasets`` that no other account can read.

    ``datasets`` keeps a copy of what it reads from files, which everybody may read, whoever may
    read the file.
    """
    import datasets

    folder = Path(datasets.config.HF_DATASETS_CACHE) / f"dprlhf-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    return str(folder)


# --- tables as text ------------------------------------------------------------------------------


def read_csv(files: Sequence[str], texts: Collection[str], **options: Any) -> Any:
    """Return the rows of tables as text, in which an empty field alone has no value.

    pandas would read a user "NA", say, as none; and where lines have more fields than the header,
    the first of them as an index, so that the values of a column stood under the next one's name.

    Args:
        files: Paths of tables with the same columns.
        texts: Columns that stay as they are written, and are never numbers.
        **options: Options of ``pandas.read_csv``, such as ``sep``.

    Returns:
        A ``datasets.Dataset``. A column of whole numbers, numbers, or "true" and "false" alone has
        their type, and every other one that of texts.
    """
    import datasets
    import pandas as pd
    from pandas.errors import ParserWarning

    as_text = {"dtype": str, "keep_default_na": False, "na_values": [""], "index_col": False}
    parts = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", ParserWarning)  # of fields beyond the header's
        for file in files:
            frame = pd.read_csv(file, **{**options, **as_text, "chunksize": None})
            columns = pa.schema([(str(name), pa.large_string()) for name in frame.columns])
            parts.append(pa.Table.from_pandas(frame, columns, preserve_index=False))
    table = pa.concat_tables(part.select(parts[0].column_names) for part in parts)
    for place, name in enumerate(table.column_names):
        if name not in texts:
            table = table.set_column(place, name, _numbers(table.column(name)))
    return datasets.Dataset(table)


def _numbers(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the numbers or truth values that all texts of a column are; else the texts."""
    given = texts.drop_null()
    if not len(given):
        return texts
    words = pa.array(["true", "false"], texts.type)
    if pc.all(pc.is_in(pc.utf8_lower(given), words)).as_py():
        return texts.cast(pa.bool_())
    # A fraction in the same column would round whole numbers that float64 cannot hold.
    long = pc.any(pc.match_substring_regex(texts, r"^[+-]?\d{16,}$")).as_py()
    for kind in (pa.int64(), *(() if long else (pa.float64(),))):
        with contextlib.suppress(pa.ArrowInvalid):
            return texts.cast(kind)
    return texts


def _broken_csv_lines(file: Path, delimiter: str = ",") -> list[int]:
    """Return the lines (from 1) with another number of fields than the header, or no UTF-8."""
    broken: list[int] = []
    width, start = None, 1
    with open(file, encoding="utf-8", errors="replace", newline="") as lines:
        reader = csv.reader(lines, delimiter=delimiter)
        try:
            for fields in reader:
                width = width or len(fields)
                if (fields and len(fields) != width) or any("\ufffd" in f for f in fields):
                    broken.append(start)
                start = reader.line_num + 1
        except csv.Error:
            broken.append(start)
    return broken


# --- JSON ----------------------------------------------------------------------------------------


def read_json(files: Sequence[str], texts: Collection[str]) -> Any:
    """Return the rows of files with a JSON object in each line, or with one list of objects.

    A value keeps the type that JSON gives it: a text that looks like a date stays a text, and where
    the values of a column differ in kind, each keeps its own.
    """
    import datasets

    rows = [row for file in files for row in _objects(file)]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    features = datasets.Dataset.from_dict(columns, on_mixed_types="use_json").features
    for name, feature in features.items():
        columns[name] = [_encoded(value, feature) for value in columns[name]]
    return datasets.Dataset.from_dict(columns, features=features)


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
    with open(file, encoding="utf-8-sig") as lines:
        start = lines.read(1)
        while start.isspace():
            start = lines.read(1)
        lines.seek(0)
        if start == "[":
            rows = json.load(lines, object_pairs_hook=_without_repeats)
        else:
            readable = (line for line in lines if line.strip())
            rows = (json.loads(line, object_pairs_hook=_without_repeats) for line in readable)
        for row in rows:
            if not isinstance(row, dict):
                raise TypeError("a row is no JSON object")
            yield row


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; refuse one that has a key twice, of which a reader would take one."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key comes twice")
    return made


def _is_json_object(line: bytes) -> bool:
    """Return whether a line is blank or holds a JSON object."""
    try:
        return not line.strip() or isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):  # lists in lists, thousands of them
        return False


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _lines_that_are_not(readable: Callable[[bytes], bool]) -> Callable[[Path], list[int]]:
    """Return a function that returns the lines of a file (from 1) that cannot be read."""

    def broken(file: Path) -> list[int]:
        lines = enumerate(file.read_bytes().splitlines(), start=1)
        return [number for number, line in lines if not readable(line)]

    return broken


# --- all of them ---------------------------------------------------------------------------------


def _no_lines(file: Path) -> list[int]:
    return []


@dataclass(frozen=True)
class Format:
    """How one kind of file is read.

    Attributes:
        read: Returns the rows of files.
        broken_lines: Returns the lines of a file (from 1) that cannot be read, for the error
            message, which quotes none of them; empty where a file has no lines.
    """

    read: Read
    broken_lines: Callable[[Path], list[int]] = _no_lines


_JSON = Format(read_json, _lines_that_are_not(_is_json_object))

FORMATS = {
    ".csv": Format(read_csv, _broken_csv_lines),
    ".json": _JSON,
    ".jsonl": _JSON,
    ".ndjson": _JSON,
    ".parquet": Format(_with_datasets("parquet")),
    ".tsv": Format(
        functools.partial(read_csv, sep="\t"), functools.partial(_broken_csv_lines, delimiter="\t")
    ),
    ".txt": Format(_with_datasets("text"), _lines_that_are_not(_is_utf8)),
}
"""The kinds of files that are read, by their suffix; a text file has a prompt in each line that is
not blank."""
