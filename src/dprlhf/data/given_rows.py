"""Rows that a program has in memory: lists, tables, datasets and generators of prompts."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from dprlhf.data.columns import ROWS_AT_ONCE
from dprlhf.data.loading import without_format
from dprlhf.data.spelling import storable, too_nested
from dprlhf.errors import DprlhfError


def rows_from(prompts: Any, column: str) -> Any:
    """Turn prompts in memory into a ``datasets.Dataset``.

    They are a list of texts, conversations or dicts, a pandas or pyarrow table, or a dataset. A
    stream, a generator, or a function that returns one is read to its end once, and kept on disk
    in a file without a name.
    """
    import datasets

    if isinstance(prompts, datasets.Dataset):
        return without_format(prompts)
    if hasattr(prompts, "columns"):  # a table, which iterates over the names of its columns
        return _rows_of_table(prompts)
    if isinstance(prompts, datasets.IterableDataset):
        prompts = prompts.with_format(None)
    elif callable(prompts):
        with _errors_by_type():
            prompts = prompts()
    if isinstance(prompts, set | frozenset):
        raise DprlhfError(
            "prompts: a set has no order, so the run could not be resumed: give sorted(…) of it"
        )
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise DprlhfError(
            "prompts: give a list of prompts, a generator, a datasets.Dataset or IterableDataset,"
            " or a pandas table; of a file, what pandas.read_csv and the like read, or its path as"
            " data__path of dprlhf.train"
        )
    try:
        if not isinstance(prompts, Sequence):
            return _kept_on_disk(prompts, column)
        return _rows_of_list(prompts, column)
    except DprlhfError:
        raise
    except Exception as error:  # Arrow quotes the value that it could not convert
        raise DprlhfError(
            f"prompts: could not be read as rows of one kind ({type(error).__name__}): give texts,"
            " conversations or dicts, not a mixture"
        ) from None


def _rows_of_table(table: Any) -> Any:
    import datasets

    converters = {
        "pandas": lambda some: datasets.Dataset.from_pandas(some, preserve_index=False),
        "pyarrow": datasets.Dataset,
    }
    library = type(table).__module__.partition(".")[0]
    if library not in converters:
        raise DprlhfError(
            f"prompts: a table of {library} is not read: give a pandas DataFrame, a pyarrow Table,"
            " a datasets.Dataset, or a list of rows"
        )
    with contextlib.suppress(Exception):
        return converters[library](table)
    try:
        return converters[library](table.map(storable) if library == "pandas" else table)
    except Exception as error:  # Arrow quotes the value that it could not convert
        names = list(table.columns) if library == "pandas" and table.columns.is_unique else []
        with _column_named(names, lambda name: pa.array(table[name], from_pandas=True)):
            raise DprlhfError(
                f"prompts: the table could not be read ({type(error).__name__}): give columns of"
                " one kind each"
            ) from None


def _rows_of_list(items: Sequence[Any], column: str, features: Any = None) -> Any:
    """Return the ``datasets.Dataset`` of a list of texts, conversations or dicts."""
    import datasets

    columns: dict[str, list[Any]] = {column: list(items)}
    in_dicts = bool(items) and isinstance(items[0], dict)
    if in_dicts:
        names = features or dict.fromkeys(name for row in items for name in row)  # of all rows
        columns = {name: [row.get(name) for row in items] for name in names}
    columns = {
        name: [None if too_nested(value) else value for value in values]
        for name, values in columns.items()
    }
    with contextlib.suppress(Exception):
        return datasets.Dataset.from_dict(columns, features=features)
    columns = storable(columns)
    with _column_named(
        columns if in_dicts else (), lambda name: datasets.Dataset.from_dict({name: columns[name]})
    ):
        return datasets.Dataset.from_dict(columns, features=features)


@contextlib.contextmanager
def _column_named(names: Iterable[str], read: Callable[[str], Any]) -> Iterator[None]:
    """Say which column could not be read, by its name alone: Arrow quotes a value."""
    try:
        yield
    except Exception:
        for name in names:
            try:
                read(name)
            except Exception as error:
                large = isinstance(error, OverflowError)
                what = "has a whole number beyond 64 bits" if large else "mixes types"
                raise DprlhfError(
                    f"prompts: could not be read as rows of one kind ({type(error).__name__}): the"
                    f" column {name!r} {what}: write all its values in one type, as text say"
                ) from None
        raise


@contextlib.contextmanager
def _errors_by_type() -> Iterator[None]:
    """Name an error of the program that makes the prompts by its type: its text may quote one."""
    try:
        yield
    except DprlhfError:
        raise
    except Exception as error:
        raise DprlhfError(
            f"prompts: what makes them raised {type(error).__name__}: run it by itself to see where"
        ) from None


def _items(prompts: Iterable[Any]) -> Iterator[Any]:
    with _errors_by_type():
        yield from prompts


def _kept_on_disk(prompts: Iterable[Any], column: str) -> Any:
    """Return the rows of a generator, written to a file without a name as they come.

    Each part of them has types of its own: the first may have whole numbers where a later one has
    fractions, or no value where that has texts. Written once more, all have those of a list.
    """
    import datasets

    features = getattr(prompts, "features", None)
    items, kinds = _items(prompts), set()
    parts: list[pa.Table] = []
    while some := list(itertools.islice(items, ROWS_AT_ONCE)):
        kinds.add(isinstance(some[0], dict))
        if len(kinds) > 1:
            raise TypeError("a mixture")
        rows = _rows_of_list(some, column, features)
        parts.append(_on_disk(rows.features, [rows.data.table]))
    if not parts:
        return datasets.Dataset.from_dict({})
    # A schema's metadata has the types once more, those of a part.
    schemas = [part.schema.remove_metadata() for part in parts]
    names = dict.fromkeys(name for schema in schemas for name in schema.names)
    with _column_named(names if kinds == {True} else (), lambda name: _unified(schemas, name)):
        none = _unified(schemas).empty_table()
    alike = (
        pa.concat_tables([none, part.replace_schema_metadata(None)], promote_options="permissive")
        for part in parts
    )
    return datasets.Dataset(_on_disk(features, alike))


def _on_disk(features: Any, tables: Iterable[pa.Table]) -> pa.Table:
    """Return tables as one, in a file without a name, of which a kill leaves nothing."""
    from datasets.arrow_writer import ArrowWriter

    with tempfile.TemporaryFile(prefix="dprlhf-") as file:
        with ArrowWriter(stream=pa.PythonFile(file, "w"), features=features) as writer:
            for table in tables:
                writer.write_table(table)
            writer.finalize(close_stream=False)
        file.flush()
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return pa.ipc.open_stream(pa.py_buffer(content)).read_all()


def _unified(schemas: Iterable[pa.Schema], column: str | None = None) -> pa.Schema:
    """Return a schema that can hold the values of several, on request of one column alone."""
    if column is not None:
        held = (schema for schema in schemas if column in schema.names)
        schemas = [pa.schema([schema.field(column)]) for schema in held]
    return pa.unify_schemas(list(schemas), promote_options="permissive")
