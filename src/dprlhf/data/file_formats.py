"""Files of rows by their format. To read another one, add an entry to ``FORMATS``.

CSV and JSON files have no types. ``datasets`` guesses them for each part of a file, so that a user
"007" among names such as "A12" would be 7 in a later part: one person as two users, and another
user's word would change how a value is read. Here a column is read as a whole.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import functools
import os
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dprlhf.data.columns import is_text
from dprlhf.data.json_files import conversation_in, of_any_kinds, read_json
from dprlhf.errors import BrokenLinesError

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


def read_csv(
    files: Sequence[str], texts: Collection[str], *, delimiter: str = ",", quotechar: str = '"'
) -> Any:
    """Return the rows of tables as text, in which an empty field alone has no value.

    Every row has a field for each column: a short one is refused, and so is a longer one, unless
    what is beyond the columns is empty. In a table of one column a blank line is a row without a
    value; in any other it is none.
    """
    import datasets

    csv.field_size_limit(sys.maxsize)  # how long a text may be is decided where it is read
    parts = [_csv_table(file, delimiter, quotechar) for file in files]
    table = pa.concat_tables(part.select(parts[0].column_names) for part in parts)
    for place, name in enumerate(table.column_names):
        if name not in texts:
            table = table.set_column(place, name, _numbers(table.column(name)))
    return datasets.Dataset(table)


def _csv_table(file: str, delimiter: str, quotechar: str) -> pa.Table:
    rows, broken, why = [], [], ""
    start = 1  # the line on which a row begins
    with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as lines:
        reader = csv.reader(lines, delimiter=delimiter, quotechar=quotechar, strict=True)
        try:
            names = [name or f"Unnamed: {i}" for i, name in enumerate(next(reader))]
            start = reader.line_num + 1
            for fields in reader:
                at, start = start, reader.line_num + 1
                if not fields and len(names) > 1:
                    continue
                fields = fields or [""]
                if len(fields) < len(names) or any(fields[len(names) :]):
                    why = why or f"a row has {len(fields)} fields for {len(names)} columns"
                    broken.append(at)
                elif not _is_utf8(fields):
                    why = why or "a text is no UTF-8"
                    broken.append(at)
                rows.append(fields)
        except csv.Error as error:
            alone = "new-line character" in str(error)
            why = why or ("a carriage return is not in quotes" if alone else str(error))
            broken.append(start)
        except StopIteration:
            raise BrokenLinesError([1], "the file is empty") from None
    if len(set(names)) < len(names) or not _is_utf8(names):
        raise BrokenLinesError([1], "two columns have one name, or a name is no UTF-8")
    if broken:
        raise BrokenLinesError(broken, why)
    return pa.table({
        name: pa.array([row[place] or None for row in rows], pa.large_string())
        for place, name in enumerate(names)
    })  # fmt: skip


def _is_utf8(fields: Sequence[str]) -> bool:
    """Return whether fields that were read with ``surrogateescape`` were UTF-8."""
    try:
        "".join(fields).encode()
    except UnicodeEncodeError:
        return False
    return True


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


MESSAGES = "messages"
"""The column whose texts are conversations as JSON, where the recipe reads its prompts from it."""


def with_conversations(rows: Any, prompt_column: str) -> Any:
    """Return rows whose column ``messages`` holds conversations, also where it comes as text.

    A CSV file has no lists: there a conversation is written as JSON. The name of the column and its
    type decide it, for all rows alike, not what some row holds. A text that is no JSON list of
    messages becomes None, which nobody can read.
    """
    import datasets

    if prompt_column != MESSAGES or MESSAGES not in rows.column_names:
        return rows
    kind = rows.features.arrow_schema.field(MESSAGES).type
    if not is_text(kind) or pa.types.is_null(kind):
        return rows
    talks = of_any_kinds({MESSAGES: [conversation_in(text) for text in rows[MESSAGES]]})
    others = rows.remove_columns(MESSAGES)
    both = [others, talks] if others.column_names else [talks]
    return datasets.concatenate_datasets(both, axis=1)


# --- lines of text -------------------------------------------------------------------------------


def read_lines(files: Sequence[str], texts: Collection[str]) -> Any:
    """Return a row with the column ``text`` for each line of text files that is not blank."""
    import datasets

    return datasets.Dataset.from_dict({"text": [line for file in files for line in lines_of(file)]})


def lines_of(file: str | Path) -> list[str]:
    """Return the lines of a text file that are not blank, as :func:`read_lines` does."""
    content = Path(file).read_bytes().removeprefix(codecs.BOM_UTF8)
    lines = [line.removesuffix(b"\r") for line in content.split(b"\n")]
    text = [line.decode("utf-8", "surrogateescape") for line in lines]
    if broken := [n for n, line in enumerate(text, 1) if "\r" in line or not _is_utf8([line])]:
        raise BrokenLinesError(broken, "a carriage return is not at its end, or it is no UTF-8")
    return [line for line in text if line.strip()]


# --- all of them ---------------------------------------------------------------------------------

FORMATS: dict[str, Read] = {
    ".csv": read_csv,
    ".json": read_json,
    ".jsonl": read_json,
    ".ndjson": read_json,
    ".parquet": _with_datasets("parquet"),
    ".tsv": functools.partial(read_csv, delimiter="\t"),
    ".txt": read_lines,
}
"""How the kinds of files are read, by their suffix; a text file has a prompt in each line that is
not blank."""
