"""The rows that a recipe names: a file, a folder, or a dataset on the hub."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dprlhf import recipe
from dprlhf.data.columns import answer_columns
from dprlhf.data.file_formats import FORMATS, own_cache, read_csv, with_conversations
from dprlhf.errors import BrokenLinesError, DprlhfError, missing_path, one_line
from dprlhf.hub import check_connection, split_revision

_CSV_OPTIONS = {"sep": "delimiter", "quotechar": "quotechar"}


def _read_split(builder: Any, spec: recipe.Data) -> Any:
    """Read the files of a folder or of a dataset on the hub as those of one's own are read."""
    import datasets

    config = builder.config
    apart = getattr(config, "field", None) or getattr(config, "sample_by", "line") != "line"
    if not config.data_files or apart:
        raise DprlhfError(
            f"data {spec.path!r}: its files are not at hand, have their rows under a key, or are"
            " texts of several lines: give a folder with the files, or Parquet"
        )
    read = FORMATS[_WITHOUT_TYPES[builder.name]]
    if builder.name == "csv":
        options, usual = config.pd_read_csv_kwargs, type(config)().pd_read_csv_kwargs
        other = sorted(k for k, v in options.items() if v != usual.get(k) and k not in _CSV_OPTIONS)
        if other:
            raise DprlhfError(
                f"data {spec.path!r}: its CSV files are read with {', '.join(other)}, which is not"
                " known here: give Parquet"
            )
        own = {ours: options[k] for k, ours in _CSV_OPTIONS.items() if k in options}
        read = functools.partial(read_csv, **own)
    fetch = datasets.DownloadManager(
        download_config=datasets.DownloadConfig(cache_dir=own_cache())
    ).download_and_extract
    splits = {
        str(split): read([str(file) for file in fetch(list(files))], _texts(spec))
        for split, files in config.data_files.items()
    }
    chosen = datasets.ReadInstruction.from_spec(spec.split).to_absolute(
        {split: len(rows) for split, rows in splits.items()}
    )
    parts = [splits[part.splitname].select(range(part.from_, part.to)) for part in chosen]
    return datasets.concatenate_datasets(parts)


_SHOWN = 5

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
    """
    from dprlhf.assets import resolve

    path = resolve(spec.path)
    with _silent_datasets():
        try:
            rows = _read(path, spec)
        except DprlhfError:
            raise
        except BrokenLinesError as broken:
            raise DprlhfError(
                f"data {spec.path!r}: could not be loaded: {broken.why};"
                f" broken: {listed(broken.lines, 'line')}"
            ) from None
        except OSError as error:  # no such dataset, no connection: names places, not rows
            raise DprlhfError(
                f"data {spec.path!r}: could not be loaded ({one_line(error, 200)})"
            ) from None
        except Exception as error:  # a parser's message may quote a row
            raise DprlhfError(
                f"data {spec.path!r}: could not be loaded ({type(error).__name__}); check"
                f" the file, its format, and the split {spec.split!r}"
            ) from None
    return with_conversations(_skip_and_limit(rows, spec), spec.prompt_column)


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

    place = Path(path)
    if place.is_dir():
        if (place / "dataset_info.json").is_file() or (place / "dataset_dict.json").is_file():
            _refuse_part(spec)
            loaded = datasets.load_from_disk(str(place))
            rows = loaded[spec.split] if isinstance(loaded, datasets.DatasetDict) else loaded
            return without_format(rows)
        for file in sorted(place.glob(f"{spec.split}.*")):
            if file.suffix in FORMATS:
                return _read_file(file, spec)
        builder = datasets.load_dataset_builder(str(place), spec.name, cache_dir=own_cache())
        if builder.name in _WITHOUT_TYPES:
            return _read_split(builder, spec)
        return datasets.load_dataset(str(place), spec.name, split=spec.split, cache_dir=own_cache())
    if place.suffix in FORMATS:
        if not place.is_file():
            raise missing_path(f"data {spec.path!r}: there is no such file", spec.path)
        return _read_file(place, spec)
    if place.exists():
        raise DprlhfError(
            f"data {spec.path!r}: not a kind of file that is read: use {', '.join(FORMATS)}"
        )
    path, revision = split_revision(path)
    if not _HUB_ID.fullmatch(path) or place.suffix.lower() in _FILE_SUFFIXES:
        raise missing_path(f"data {spec.path!r}: there is no such file or folder", spec.path)
    copies = Path(datasets.config.HF_DATASETS_CACHE)
    if not (copies / path.replace("/", "___")).exists():
        check_connection(
            f"data {spec.path!r}: there is no such file or folder, no copy from the hub in {copies}"
        )
    rows = datasets.load_dataset(path, spec.name, split=spec.split, revision=revision)
    if rows.info.builder_name not in _WITHOUT_TYPES:
        return rows
    return _read_split(datasets.load_dataset_builder(path, spec.name, revision=revision), spec)


_WITHOUT_TYPES = {"csv": ".csv", "json": ".json", "text": ".txt"}
"""Formats of which ``datasets`` guesses types, or where rows end, by its name: their suffix."""


def _texts(spec: recipe.Data) -> set[str]:
    """Return the columns that are texts whatever they hold: of users' names, and what is read."""
    return {spec.prompt_column, *spec.owners, *answer_columns(spec)}


def _read_file(file: Path, spec: recipe.Data) -> Any:
    _refuse_part(spec)
    rows = FORMATS[file.suffix]([str(file)], _texts(spec))
    if file.suffix != ".txt":
        return rows
    return rows if spec.prompt_column == "text" else rows.rename_column("text", spec.prompt_column)


def _refuse_part(spec: recipe.Data) -> None:
    """Refuse a part of a split, such as ``train[:90%]``, where all rows would be read anyway."""
    if "[" in spec.split or "+" in spec.split:
        raise DprlhfError(
            f"data {spec.path!r}: the split {spec.split!r} selects rows of a dataset on the hub;"
            " of rows of one's own, skip and limit select some"
        )


def _skip_and_limit(rows: Any, spec: recipe.Data) -> Any:
    if not spec.skip and spec.limit is None:
        return rows
    end = len(rows) if spec.limit is None else min(spec.skip + spec.limit, len(rows))
    if spec.skip and spec.skip >= end:
        # How many rows there are is private, unlike the number of users.
        raise DprlhfError(f"data {spec.path!r}: skip {spec.skip} leaves no row")
    return rows.select(range(spec.skip, end))


def rows_without_value(column: pa.ChunkedArray) -> list[int]:
    """Return the numbers (from 1) of the rows without a value in a column."""
    rows: list[int] = pc.indices_nonzero(pc.is_null(column, nan_is_null=True)).to_pylist()
    return [row + 1 for row in rows]


def listed(numbers: Sequence[int], what: str) -> str:
    """Return the numbers of rows for an error message: ``lines 3, 7 and 12 more``.

    They tell of users, so they are for the operator alone, who has the rows: a terminal gets them,
    and a log, which is passed on, does not.
    """
    if not sys.stderr.isatty():
        return f"some {what}s (on a terminal, this says which)"
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}{more}"


def without_format(rows: Any) -> Any:
    """Return a ``datasets.Dataset`` with all its columns, whose values are Python's.

    A format makes arrays or tables of conversations, and leaves columns out.
    """
    if rows.format["type"] == "custom":
        raise DprlhfError(
            "prompts: the dataset has a transform (set_transform, with_transform), which would"
            " change rows each time that they are read: apply it once, with rows.map(…), or take it"
            " off, with rows.with_format(None)"
        )
    return rows.with_format(None)
