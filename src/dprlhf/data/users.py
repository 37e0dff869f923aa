"""The private users: rows of a prompt dataset, grouped, and bounded in what one of them brings.

Only integers are held in memory; the rows stay where ``datasets`` keeps them, memory-mapped.
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.boundary import Private
from dprlhf.errors import DprlhfError, one_line
from dprlhf.hub import pinned

_ROWS_AT_ONCE = 10_000
_SHOWN = 5
_NAMES = (
    pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view,
    pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean,
)  # fmt: skip

Prompt = str | list[dict[str, Any]]
"""Plain text, or a conversation as a list of messages."""


@dataclass(frozen=True, repr=False)
class Prompts:
    """Prompts of one batch, one entry for each.

    Attributes:
        prompts: text or conversations, truncated to ``prompt_words``.
        users: the index of each prompt's user within the whole dataset, ``[prompts]``.
        slots: the index of each prompt among its user's prompts, ``[prompts]``.
        columns: the dataset's other columns, for rewards that name them.
    """

    prompts: list[Prompt]
    users: NDArray[np.int64]
    slots: NDArray[np.int64]
    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, chosen: Sequence[int] | NDArray[np.int64]) -> Prompts:
        """Return some of them, by number."""
        places = np.asarray(chosen, dtype=np.int64)
        columns = {name: [values[i] for i in places] for name, values in self.columns.items()}
        prompts = [self.prompts[i] for i in places]
        return Prompts(prompts, self.users[places], self.slots[places], columns)

    def first(self, count: int) -> Prompts:
        """Return the first so many of them."""
        return self.take(range(min(count, len(self))))


class Users:
    """A prompt dataset seen as users.

    Args:
        rows: a ``datasets.Dataset``.
        spec: which columns, and the bound on one user's prompts.

    Attributes:
        count: N, the number of users; public by assumption.

    Raises:
        DprlhfError: no rows, or a column is missing.
    """

    def __init__(self, rows: Any, spec: recipe.Data) -> None:
        self._rows = rows
        self._spec = spec
        if len(rows) == 0:
            raise DprlhfError(f"data {spec.path!r}: the dataset is empty")
        asked = spec.model_dump(include={n for n in type(spec).model_fields if "_column" in n})
        for key, column in asked.items():
            wanted = column in spec.columns or key == "user_column"
            if wanted and column is not None and column not in rows.column_names:
                raise DprlhfError(
                    f"data {spec.path!r}: there is no column {column!r} ({key}); the columns are"
                    f" {', '.join(rows.column_names)}"
                )
        self._order, self._starts = _group(rows, spec)
        self.count = len(self._starts) - 1
        sizes = np.diff(self._starts)
        self._kept = np.minimum(sizes, spec.max_prompts_per_user)
        self.dropped_prompts = Private(int((sizes - self._kept).sum()))

    @property
    def conversations(self) -> bool:
        """Whether prompts are lists of messages: what the column is made of, not what is in it."""
        import datasets

        return not isinstance(self._rows.features[self._spec.prompt_column], datasets.Value)

    def digest(self) -> Private[str]:
        """Return a digest of who the users are and what they bring, in order.

        It is private: a digest of data, published, would confirm a guess at the data.
        """
        state = hashlib.sha256()
        names = [c for c in (self._spec.user_column, *self._spec.columns) if c is not None]
        for batch in self._rows.select_columns(names).iter(batch_size=1000):
            state.update(json.dumps(batch, sort_keys=True, default=str).encode())
        return Private(state.hexdigest())

    def identities(self) -> Private[NDArray[np.uint64]]:
        """Return a hash of who each user is, sorted: its name, or else its row's prompt.

        Two datasets that name a user alike have a hash in common. Nothing else follows: a person
        may go by another name, or have written another row.
        """
        from pandas.util import hash_array

        column = self._spec.user_column or self._spec.prompt_column
        found = [np.empty(0, dtype=np.uint64)]
        for batch in self._rows.select_columns([column]).iter(batch_size=_ROWS_AT_ONCE):
            names = [v if isinstance(v, str) else json.dumps(v, default=str) for v in batch[column]]
            found.append(hash_array(np.array(names, dtype=object), categorize=False))
        return Private(np.unique(np.concatenate(found)))

    def select(self, users: NDArray[np.int64]) -> Prompts:
        """Return the prompts of some users, at most ``max_prompts_per_user`` of each.

        Which prompts a user keeps depends on that user's own rows alone: the first ones.
        """
        slots = _counting_up(self._kept[users])
        owners = np.repeat(users, self._kept[users])
        rows = self._rows[self._order[self._starts[owners] + slots].tolist()]
        prompts = [_shorten(p, self._spec) for p in rows.pop(self._spec.prompt_column)]
        return Prompts(prompts, owners, slots, rows)

    def readable(self, users: NDArray[np.int64], encode: Callable[[Prompts], Any]) -> Prompts:
        """Return the prompts of those of some users that can all be read; the rest bring nothing.

        A chat template can refuse a conversation, and a row may not decode. If that ended a run,
        one user would decide whether there is a result, and its round would be known.

        Args:
            users: ``[users]``.
            encode: raises where it meets a prompt that cannot be read.
        """

        def read(some: NDArray[np.int64]) -> Prompts | None:
            try:
                prompts = self.select(some)
                encode(prompts)
            except Exception:
                return None
            return prompts

        everyone = read(users)
        if everyone is not None:
            return everyone
        return self.select(np.array([u for u in users if read(np.array([u]))], dtype=np.int64))


def load_rows(spec: recipe.Data) -> Any:
    """Load a prompt dataset through ``datasets``.

    Raises:
        DprlhfError: it cannot be found or read. What can only be a file of one's own is not looked
            for on the hub, which would tell its name.
    """
    import datasets

    from dprlhf.assets import resolve

    path = resolve(spec.path)
    revision = pinned(spec.path, spec.revision, "data.revision")
    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)  # its log lines quote the value that it stumbles over
    try:
        if (folder := Path(path)).is_dir():
            rows = _load_folder(folder, spec)
        elif (file := Path(path)).suffix in FORMATS:
            if not file.is_file():
                raise DprlhfError(f"data {spec.path!r}: there is no such file")
            rows = datasets.load_dataset(
                FORMATS[file.suffix], data_files={"train": str(file)}, split="train"
            )
        elif file.exists():
            raise DprlhfError(
                f"data {spec.path!r}: not a kind of file that is read: use {', '.join(FORMATS)}"
            )
        elif not _HUB_ID.fullmatch(path) or file.suffix.lower() in _FILE_SUFFIXES:
            raise DprlhfError(f"data {spec.path!r}: there is no such file or folder")
        else:
            rows = datasets.load_dataset(path, spec.name, split=spec.split, **revision)
    except DprlhfError:
        raise
    except OSError as error:  # no such dataset, no connection: names places, not rows
        raise DprlhfError(
            f"data {spec.path!r}: could not be loaded ({one_line(error, 200)})"
        ) from None
    except Exception as error:  # a parser's message may quote a row
        broken = _broken_lines(Path(path)) if Path(path).is_file() else []
        where = f"; broken: {_listed(broken, 'line')}" if broken else ""
        raise DprlhfError(
            f"data {spec.path!r}: could not be loaded ({type(error).__name__}){where}; check the"
            f" file, its format, and the split {spec.split!r}"
        ) from None
    finally:
        logger.setLevel(level)
    if not spec.skip and spec.limit is None:
        return rows
    end = len(rows) if spec.limit is None else min(spec.skip + spec.limit, len(rows))
    if spec.skip and spec.skip >= end:
        raise DprlhfError(f"data {spec.path!r}: skip {spec.skip} leaves none of {len(rows)} rows")
    return rows.select(range(spec.skip, end))


def check_present(rows: Any, spec: recipe.Data) -> None:
    """Refuse rows that lack a value in a column that is learnt from; names the rows (from 1).

    Raises:
        DprlhfError: a value is missing.
    """
    for name in spec.columns:
        batches = rows.select_columns([name]).with_format("arrow").iter(_ROWS_AT_ONCE)
        column = pa.chunked_array([chunk for batch in batches for chunk in batch.column(0).chunks])
        if missing := _missing(column):
            raise DprlhfError(
                f"data {spec.path!r}: column {name!r} is empty in {_listed(missing, 'row')}: fill"
                " or drop them"
            )


def _broken_lines(file: Path) -> list[int]:
    """Return the lines of a text file (from 1) that cannot be read as its rows; quotes none."""
    broken: list[int] = []
    if file.suffix in (".json", ".jsonl"):
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    broken.append(number)
            except ValueError:
                broken.append(number)
    elif file.suffix == ".csv":
        width, start = None, 1
        with open(file, encoding="utf-8", errors="replace", newline="") as lines:
            reader = csv.reader(lines)
            try:
                for fields in reader:
                    width = width or len(fields)
                    if (fields and len(fields) != width) or any("\ufffd" in f for f in fields):
                        broken.append(start)
                    start = reader.line_num + 1
            except csv.Error:
                broken.append(start)
    return broken


def _listed(numbers: Sequence[int], what: str) -> str:
    """Return "lines 3, 7 and 12 more"."""
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}{more}"


def rows_from(prompts: Any, column: str) -> Any:
    """Turn prompts that the program holds into rows.

    Args:
        prompts: a list of texts, conversations or dicts; a ``datasets.Dataset``, returned as it is;
            or, read to the end once and kept on disk while the process lives: an
            ``IterableDataset`` (streaming), a generator, or a function that returns one.
        column: what texts and conversations are called.

    Raises:
        DprlhfError: none of these, or the items differ in kind.
    """
    import datasets

    if isinstance(prompts, datasets.Dataset):
        return prompts
    if callable(prompts) and not isinstance(prompts, datasets.IterableDataset):
        prompts = prompts()
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise DprlhfError(
            "prompts: give a list of prompts, a generator, a datasets.Dataset or IterableDataset"
        )
    try:
        if not isinstance(prompts, Sequence):
            return _kept_on_disk(prompts, column)
        if prompts and isinstance(prompts[0], dict):
            return datasets.Dataset.from_list(list(prompts))
        return datasets.Dataset.from_dict({column: list(prompts)})
    except Exception as error:  # Arrow quotes the value that it could not convert
        raise DprlhfError(
            f"prompts: could not be read as rows of one kind ({type(error).__name__}): give texts,"
            " conversations or dicts, not a mixture"
        ) from None


def _kept_on_disk(prompts: Iterable[Any], column: str) -> Any:
    import datasets
    from datasets.arrow_writer import ArrowWriter

    folder = tempfile.TemporaryDirectory(prefix="dprlhf-")  # mode 0700
    _FOLDERS.append(folder)
    file = Path(folder.name) / "rows.arrow"
    features = getattr(prompts, "features", None)
    kinds = set()
    with ArrowWriter(path=str(file), features=features) as writer:
        for prompt in prompts:
            kinds.add(tuple(sorted(prompt)) if isinstance(prompt, dict) else type(prompt))
            if len(kinds) > 1:
                raise TypeError("a mixture")
            writer.write(prompt if isinstance(prompt, dict) else {column: prompt})
        if kinds:
            writer.finalize()
    return datasets.Dataset.from_file(str(file)) if kinds else datasets.Dataset.from_dict({})


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when the process ends."""

FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
"""The files that are read, by what their names end in."""

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")

_FILE_SUFFIXES = {
    *FORMATS, ".tsv", ".txt", ".ndjson", ".arrow", ".feather", ".xls", ".xlsx", ".db", ".sqlite",
    ".pkl", ".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz",
}  # fmt: skip
"""Of names that are those of files, wherever they are: a dataset on the hub has none of them."""


def _load_folder(folder: Path, spec: recipe.Data) -> Any:
    import datasets

    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        loaded = datasets.load_from_disk(str(folder))
        return loaded[spec.split] if isinstance(loaded, datasets.DatasetDict) else loaded
    for file in sorted(folder.glob(f"{spec.split}.*")):
        if file.suffix in FORMATS:
            return datasets.load_dataset(
                FORMATS[file.suffix], data_files={"train": str(file)}, split="train"
            )
    return datasets.load_dataset(str(folder), spec.name, split=spec.split)


def _group(rows: Any, spec: recipe.Data) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if spec.user_column is None:
        return np.arange(len(rows)), np.arange(len(rows) + 1)
    # Users are numbered as they arrive: by the rank of its name one user could move the others,
    # and with them the batches of a stream.
    owner = _codes(rows, spec)
    order = np.argsort(owner, kind="stable")
    return order, np.append(0, np.cumsum(np.bincount(owner)))


def _codes(rows: Any, spec: recipe.Data) -> NDArray[np.int64]:
    """Number the values of the user column in the order of their first rows, ``[rows]``.

    The column stays in Arrow's memory, where a text costs its bytes and no Python object.
    """
    batches = rows.select_columns([spec.user_column]).with_format("arrow").iter(_ROWS_AT_ONCE)
    names = pa.chunked_array([chunk for batch in batches for chunk in batch.column(0).chunks])
    if pa.types.is_dictionary(names.type):  # each file may come with a dictionary of its own
        names = names.cast(names.type.value_type)
    known = any(is_kind(names.type) for is_kind in _NAMES)
    missing = _missing(names) if known else []
    if not known or len(missing):
        where = f" ({_listed(missing, 'row')} have none)" if known else ""
        raise DprlhfError(
            f"data {spec.path!r}: user_column {spec.user_column!r} must hold a text or a number in"
            f" every row{where}: rows without a user are nobody's privacy unit; fill or drop them"
        )
    codes = [chunk.indices.to_numpy() for chunk in names.dictionary_encode().chunks]
    return np.concatenate(codes).astype(np.int64)


def _missing(names: pa.ChunkedArray) -> list[int]:
    """Return the rows (from 1) without a value."""
    found: list[int] = pc.indices_nonzero(pc.is_null(names, nan_is_null=True)).to_pylist()
    return [row + 1 for row in found]


def _counting_up(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0..n−1 for each size n, one after the other."""
    ends = np.cumsum(sizes)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - sizes, sizes)


def _shorten(prompt: Any, spec: recipe.Data) -> Prompt:
    if prompt is None:
        return ""
    if isinstance(prompt, list):
        return prompt
    text = str(prompt)
    return text if spec.prompt_words is None else " ".join(text.split()[: spec.prompt_words])
