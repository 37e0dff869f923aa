"""Rows from wherever a recipe or a program has them: files, folders, the hub, memory.

To read another kind of file, add an entry to ``FORMATS``.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dprlhf import recipe
from dprlhf.errors import DprlhfError, one_line
from dprlhf.hub import check_connection, pinned

ROWS_AT_ONCE = 10_000
"""Rows of a column that are read into memory together."""

_SHOWN = 5

NO_TEXT = (
    "a text holds a lone surrogate, which is half of a character and cannot be written as UTF-8:"
    ' mend it with text.encode(errors="replace").decode()'
)


def _with_datasets(builder: str, **options: Any) -> Callable[[str], Any]:
    """Return a reader of files by one of the builders of ``datasets.load_dataset``."""

    def read(file: str) -> Any:
        import datasets

        files = {"train": file}
        return datasets.load_dataset(
            builder, data_files=files, split="train", cache_dir=_own_cache(), **options
        )

    return read


def _csv(separator: str) -> Callable[[str], Any]:
    """Return a reader of tables as text, in which an empty field alone has no value.

    pandas would read a user "NA", say, as none; and where lines have more fields than the header,
    the first of them as an index, so that the values of a column stood under the next one's name.
    """
    read = _with_datasets(
        "csv", sep=separator, keep_default_na=False, na_values=[""], index_col=False
    )

    def read_all_fields(file: str) -> Any:
        from pandas.errors import ParserWarning

        with warnings.catch_warnings():
            warnings.simplefilter("error", ParserWarning)  # of fields beyond the header's
            return read(file)

    return read_all_fields


def _lines_that_are_not(readable: Callable[[bytes], bool]) -> Callable[[Path], list[int]]:
    """Return a function that returns the lines of a file (from 1) that cannot be read."""

    def broken(file: Path) -> list[int]:
        lines = enumerate(file.read_bytes().splitlines(), start=1)
        return [number for number, line in lines if not readable(line)]

    return broken


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


def _no_lines(file: Path) -> list[int]:
    return []


@dataclass(frozen=True)
class Format:
    """How one kind of file is read.

    Attributes:
        read: Returns the ``datasets.Dataset`` of a file, given its path.
        broken_lines: Returns the lines of a file (from 1) that cannot be read, for the error
            message, which quotes none of them; empty where a file has no lines.
    """

    read: Callable[[str], Any]
    broken_lines: Callable[[Path], list[int]] = _no_lines


FORMATS = {
    ".csv": Format(_csv(","), _broken_csv_lines),
    ".json": Format(_with_datasets("json"), _lines_that_are_not(_is_json_object)),
    ".jsonl": Format(_with_datasets("json"), _lines_that_are_not(_is_json_object)),
    ".ndjson": Format(_with_datasets("json"), _lines_that_are_not(_is_json_object)),
    ".parquet": Format(_with_datasets("parquet")),
    ".tsv": Format(_csv("\t"), functools.partial(_broken_csv_lines, delimiter="\t")),
    ".txt": Format(_with_datasets("text"), _lines_that_are_not(_is_utf8)),
}
"""The kinds of files that are read, by their suffix; a text file has a prompt in each line that is
not blank."""

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")

_FILE_SUFFIXES = {
    *FORMATS, ".arrow", ".feather", ".xls", ".xlsx", ".db", ".sqlite", ".pkl", ".gz", ".bz2", ".xz",
    ".zst", ".zip", ".tar", ".tgz",
}  # fmt: skip
"""Suffixes of files of one's own, readable or not: no dataset on the hub has one of them."""


def load_rows(spec: recipe.Data) -> Any:
    """Load the rows that a recipe names as a ``datasets.Dataset``.

    A name that can only be that of a file of one's own is not looked up on the hub, which would
    reveal it.

    Raises:
        DprlhfError: The rows cannot be found or read. The message quotes no row.
    """
    from dprlhf.assets import resolve

    path = resolve(spec.path)
    with _silent_datasets():
        try:
            rows = _read(path, spec)
        except DprlhfError:
            raise
        except OSError as error:  # no such dataset, no connection: names places, not rows
            raise DprlhfError(
                f"data {spec.path!r}: could not be loaded ({one_line(error, 200)})"
            ) from None
        except Exception as error:  # a parser's message may quote a row
            broken = _broken_lines(Path(path))
            where = f"; broken: {listed(broken, 'line')}" if broken else ""
            raise DprlhfError(
                f"data {spec.path!r}: could not be loaded ({type(error).__name__}){where}; check"
                f" the file, its format, and the split {spec.split!r}"
            ) from None
    return _skip_and_limit(rows, spec)


@contextlib.contextmanager
def _silent_datasets() -> Iterator[None]:
    """Silence ``datasets``: its log quotes the value that a parser fails at, its bars count rows.

    How many rows users have is private, unlike the number of users.
    """
    import datasets  # its first import sets the level, and would undo what follows

    logger = logging.getLogger("datasets")
    level, bars = logger.level, datasets.is_progress_bar_enabled()
    logger.setLevel(logging.CRITICAL + 1)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()


def _read(path: str, spec: recipe.Data) -> Any:
    """Read a folder, a file, or a dataset on the hub."""
    import datasets

    revision = pinned(spec.path, spec.revision, "data.revision")
    place = Path(path)
    if place.is_dir():
        return _load_folder(place, spec)
    if place.suffix in FORMATS:
        if not place.is_file():
            raise DprlhfError(f"data {spec.path!r}: there is no such file")
        return _read_file(place, spec)
    if place.exists():
        raise DprlhfError(
            f"data {spec.path!r}: not a kind of file that is read: use {', '.join(FORMATS)}"
        )
    if not _HUB_ID.fullmatch(path) or place.suffix.lower() in _FILE_SUFFIXES:
        raise DprlhfError(f"data {spec.path!r}: there is no such file or folder")
    copies = Path(datasets.config.HF_DATASETS_CACHE)
    if not (copies / path.replace("/", "___")).exists():
        check_connection(
            f"data {spec.path!r}: there is no such file or folder, no copy from the hub in {copies}"
        )
    return datasets.load_dataset(path, spec.name, split=spec.split, **revision)


def _read_file(file: Path, spec: recipe.Data) -> Any:
    _refuse_part(spec)
    rows = FORMATS[file.suffix].read(str(file))
    if file.suffix != ".txt":
        return rows
    # The lines of a text file have no name of their own; ``datasets`` calls them "text".
    rows = rows.select([place for place, line in enumerate(rows["text"]) if line.strip()])
    return rows if spec.prompt_column == "text" else rows.rename_column("text", spec.prompt_column)


def _refuse_part(spec: recipe.Data) -> None:
    """Refuse a part of a split, such as ``train[:90%]``, where all rows would be read all the same.

    Raises:
        DprlhfError: The split is a part, or a sum of several.
    """
    if "[" in spec.split or "+" in spec.split:
        raise DprlhfError(
            f"data {spec.path!r}: the split {spec.split!r} selects rows of a dataset on the hub;"
            " of rows of one's own, skip and limit select some"
        )


def _load_folder(folder: Path, spec: recipe.Data) -> Any:
    import datasets

    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        _refuse_part(spec)
        loaded = datasets.load_from_disk(str(folder))
        rows = loaded[spec.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        return without_format(rows)
    for file in sorted(folder.glob(f"{spec.split}.*")):
        if file.suffix in FORMATS:
            return _read_file(file, spec)
    return datasets.load_dataset(str(folder), spec.name, split=spec.split, cache_dir=_own_cache())


def _own_cache() -> str:
    """Return a folder in the cache of ``datasets`` that no other account can read.

    ``datasets`` keeps a copy of what it reads from files, which everybody may read, whoever may
    read the file.
    """
    import datasets

    folder = Path(datasets.config.HF_DATASETS_CACHE) / f"dprlhf-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    return str(folder)


def _skip_and_limit(rows: Any, spec: recipe.Data) -> Any:
    if not spec.skip and spec.limit is None:
        return rows
    end = len(rows) if spec.limit is None else min(spec.skip + spec.limit, len(rows))
    if spec.skip and spec.skip >= end:
        raise DprlhfError(f"data {spec.path!r}: skip {spec.skip} leaves none of {len(rows)} rows")
    return rows.select(range(spec.skip, end))


def _broken_lines(file: Path) -> list[int]:
    return FORMATS[file.suffix].broken_lines(file) if file.is_file() else []


def check_present(rows: Any, spec: recipe.Data) -> None:
    """Refuse rows that lack a value in a column of the training data.

    Raises:
        DprlhfError: A value is missing; the message gives the rows' numbers (from 1).
    """
    for name in spec.columns:
        batches = rows.select_columns([name]).with_format("arrow").iter(ROWS_AT_ONCE)
        column = pa.chunked_array([chunk for batch in batches for chunk in batch.column(0).chunks])
        if missing := rows_without_value(column):
            raise DprlhfError(
                f"data {spec.path!r}: column {name!r} is empty in {listed(missing, 'row')}: fill"
                " or drop them"
            )


def rows_without_value(column: pa.ChunkedArray) -> list[int]:
    """Return the numbers (from 1) of the rows without a value in a column."""
    found: list[int] = pc.indices_nonzero(pc.is_null(column, nan_is_null=True)).to_pylist()
    return [row + 1 for row in found]


def listed(numbers: Sequence[int], what: str) -> str:
    """Return numbers as text for an error message: ``lines 3, 7 and 12 more``."""
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}{more}"


def without_format(rows: Any) -> Any:
    """Return a ``datasets.Dataset`` with all its columns, whose values are Python's.

    A format makes arrays or tables of conversations, and leaves columns out.

    Raises:
        DprlhfError: It has a transform, a function that changes rows whenever they are read.
    """
    if rows.format["type"] == "custom":
        raise DprlhfError(
            "prompts: the dataset has a transform (set_transform, with_transform), which would"
            " change rows each time that they are read: apply it once, with rows.map(…), or take it"
            " off, with rows.with_format(None)"
        )
    return rows.with_format(None)
