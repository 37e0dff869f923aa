"""The private users: the rows of a dataset, grouped by user, with a bound on the rows of each.

Only integers are held in memory; the rows stay where ``datasets`` keeps them, memory-mapped.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.boundary import Private
from dprlhf.data.columns import (
    MOST_BYTES,
    ROWS_AT_ONCE,
    answer_columns,
    bounded_images,
    bytes_of,
    check_decodable,
    check_readable,
    is_json,
    is_text,
    listed_names,
    parts_of,
)
from dprlhf.data.messages import TEMPLATE_COLUMNS
from dprlhf.data.spelling import hash_of, known_as, plain, undo_arrow_unification, written
from dprlhf.errors import EXITS, DprlhfError

LOOKED_AT = 20_000
"""Most users whose prompts are tokenized to count those that are cut or cannot be read."""

_AT_ONCE = 500


Prompt = str | list[dict[str, Any]]
"""Plain text, or a conversation as a list of messages."""


@dataclass(frozen=True, repr=False)
class Prompts:
    """The prompts of some users, with the dataset's other columns."""

    prompts: list[Prompt]  # Texts or conversations, truncated to prompt_words
    users: NDArray[np.int64]  # Index of each prompt's user in the whole dataset, [prompts]
    # Index of each prompt among the prompts of its user, in a private round among those that take
    # part in it, [prompts]
    slots: NDArray[np.int64]
    # Values of the other columns, [prompts] each, for rewards that name them
    columns: dict[str, list[Any]]
    in_rows: bool = True  # False where each is an empty message, as an environment gives prompts
    # All users of a private round, [users], whether or not a prompt of theirs is left: they and
    # prompts_a_user fix the place of each prompt. None for public prompts, one after the other
    round_users: NDArray[np.int64] | None = None
    prompts_a_user: int = 1  # The most prompts of a user of the round, a public number

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """What each row has for its chat template, for :func:`template_arguments`."""
        names = [name for name in TEMPLATE_COLUMNS if name in self.columns]
        return [{name: self.columns[name][i] for name in names} for i in range(len(self))]

    def changed(self, **values: Any) -> Prompts:
        """Return the prompts with other values of some attributes."""
        return Prompts(**{**vars(self), **values})

    def take(self, chosen: Sequence[int] | NDArray[np.int64]) -> Prompts:
        """Return the prompts at some positions."""
        places = np.asarray(chosen, dtype=np.int64)
        columns = {name: [values[i] for i in places] for name, values in self.columns.items()}
        prompts = [self.prompts[i] for i in places]
        users, slots = self.users[places], self.slots[places]
        return self.changed(prompts=prompts, users=users, slots=slots, columns=columns)

    @property
    def numbers(self) -> tuple[NDArray[np.int64], int]:
        """The number of each prompt's user among those of the batch, and how many these are."""
        own, number = np.unique(self.users, return_inverse=True)
        if self.round_users is None:
            return number.astype(np.int64), len(own)
        order = np.argsort(self.round_users)
        return order[np.searchsorted(self.round_users[order], self.users)], len(self.round_users)

    @property
    def grid(self) -> NDArray[np.int64]:
        """The number of the prompt at each place, −1 where there is none, ``[users, prompts]``.

        In a private round places follow from the allocation: a user's from its rank among the
        round's users, and a prompt's within it from its number among the user's prompts. Nobody
        else's data, and no prompt that cannot be read, moves it.
        """
        number, users = self.numbers
        if self.round_users is None:
            return in_grid(number, users)
        grid = np.full((users, self.prompts_a_user), -1)
        grid[number, self.slots] = np.arange(len(self))
        return grid

    @property
    def places(self) -> NDArray[np.int64]:
        """The places of :attr:`grid` in a row, ``[places]``; public prompts leave none empty."""
        return np.arange(len(self)) if self.round_users is None else self.grid.ravel()

    def first(self, count: int) -> Prompts:
        """Return the first ``count`` prompts, or all if there are fewer."""
        return self.take(range(min(count, len(self))))


class Users:
    """A prompt dataset grouped by user, the unit of privacy."""

    def __init__(
        self,
        rows: Any,
        spec: recipe.Data,
        *,
        may_lack_prompts: bool = False,
        absent: Collection[int] = (),  # users whose rows have been deleted; they count in N
        groups: Collection[int] | None = None,  # hashes of those of several owners; None: matched
    ) -> None:
        self._given = self._rows = rows
        self._may_lack_prompts = may_lack_prompts
        self._absent = sorted({*absent})
        self._spec = spec
        if len(rows) == 0:
            raise DprlhfError(f"data {spec.path!r}: the dataset is empty")
        check_decodable(rows, f"data {spec.path!r}")
        keys = {n for n in type(spec).model_fields if "_column" in n} - {"user_column"}
        asked = spec.model_dump(include=keys)
        # A column by another name was asked for: without it, its name is misspelt.
        lacking = spec.prompt_column not in rows.column_names
        self.with_prompts = not (may_lack_prompts and lacking and spec.prompt_column == "prompt")
        if not self.with_prompts:
            del asked["prompt_column"]
        self._columns = list(spec.columns if self.with_prompts else rows.column_names)
        for key, column in (*asked.items(), *(("user_column", owner) for owner in spec.owners)):
            wanted = column in spec.columns or key == "user_column"
            if wanted and column is not None and column not in rows.column_names:
                raise DprlhfError(
                    f"data {spec.path!r}: there is no column {column!r} ({key}); the columns are"
                    f" {listed_names(rows.column_names)}"
                )
            if column in self._columns and key not in ("user_column", "label_column"):
                check_readable(rows, column, f"data {spec.path!r}: {key}")
        self._too_large, owner = _too_large(rows), None
        if len(spec.owners) > 1:
            from dprlhf.data.names import matched

            kept, owner = matched(rows, spec, groups)
            self._rows, self._too_large = rows.select(kept), self._too_large[kept]
        # Takes a line about a row that cannot be read, for the operator alone.
        self.tell: Callable[[str], object] = lambda line: None
        self._told: set[int] = set()
        self._order, sizes = _group(self._rows, spec, owner)
        self.count = len(sizes) + len(self._absent)  # N, which is assumed to be public
        if self._absent:
            there = np.delete(np.arange(self.count), self._absent)
            of_those, sizes = sizes, np.zeros(self.count, dtype=np.int64)
            sizes[there] = of_those
        self._starts = np.append(0, np.cumsum(sizes))
        self._kept = np.minimum(sizes, spec.max_prompts_per_user)
        self.dropped_prompts = Private(int((sizes - self._kept).sum()))

    @property
    def conversations(self) -> bool:
        """Whether prompts are lists of messages, by the type of the column."""
        return not self.with_prompts or not is_text(self._prompt_type)

    @property
    def mixes_kinds(self) -> bool:
        """Whether prompts may be texts and conversations, by the type of the column."""
        return self.with_prompts and is_json(self._prompt_type)

    @property
    def _prompt_type(self) -> pa.DataType:
        return self._rows.features.arrow_schema.field(self._spec.prompt_column).type

    @property
    def column_names(self) -> list[str]:
        """Names of all columns, which are public as the recipe is."""
        return list(self._rows.column_names)

    def digest(self) -> Private[str]:
        """Return a SHA-256 digest of the users' names and rows, in order.

        It is private: a published digest would confirm a guess at the data. Where rows are users,
        all columns count, or what a user has beside the prompt could change places unseen.
        """
        state = hashlib.sha256()
        names = [*self._spec.owners, *self._columns]
        names = list(dict.fromkeys(names)) if not self.with_prompts else names
        rows = self._rows
        if self.with_prompts and self._spec.user_column is None:
            names = sorted(rows.column_names)
            rows = rows.with_format("arrow")  # an image, say, would be decoded to an object
        if self._too_large.any() or not self.with_prompts:  # not all can be decoded
            rows = rows.with_format("arrow")
        for batch in rows.select_columns(names).iter(batch_size=1000):
            values = batch.to_pydict() if isinstance(batch, pa.Table) else batch
            state.update(json.dumps(values, sort_keys=True, default=str).encode())
        return Private(state.hexdigest())

    def numbers_of(self, names: Sequence[str]) -> Private[list[int]]:
        """Return the numbers of users, given by their names, or by that of one of their people."""
        columns = self._spec.owners
        if not columns:
            numbers = {str(self._spec.skip + n + 1): n for n in range(self.count)}
        else:
            there = np.flatnonzero(np.diff(self._starts))
            first = self._rows.select(self._order[self._starts[there]])
            numbers = {}
            for column in columns:
                named = first.select_columns([column])[column]
                numbers |= {known_as(one): int(n) for one, n in zip(named, there, strict=True)}
        unknown = [name for name in names if known_as(name) not in numbers]
        if unknown:
            what = f"user in the column {self._spec.unit!r}" if columns else "row"
            raise DprlhfError(f"data {self._spec.path!r}: there is no {what} {unknown[0]!r}")
        return Private([numbers[known_as(name)] for name in names])

    def groups(self) -> list[int]:
        """Return a hash of the people of each user; none where a row has one owner or none."""
        if len(self._spec.owners) < 2:
            return []
        from dprlhf.data.names import groups_in, hash_of_group

        return sorted({hash_of_group(group) for group in groups_in(self._rows, self._spec)[0]})

    def of_groups(self, groups: Collection[int]) -> Users:
        """Return the users with these hashes, whoever else shares rows with whom."""
        lack = self._may_lack_prompts
        return Users(self._given, self._spec, may_lack_prompts=lack, groups=groups)

    def with_gaps(self, absent: Collection[int]) -> Users:
        """Return the users of these rows if those of some numbers have been deleted from them."""
        return Users(self._rows, self._spec, may_lack_prompts=self._may_lack_prompts, absent=absent)

    def without(self, numbers: Collection[int]) -> Users:
        """Return the users when the rows of some are deleted; the others keep their numbers."""
        owner = np.repeat(np.arange(self.count), np.diff(self._starts))
        rows = np.sort(self._order[~np.isin(owner, list(numbers))])
        if not len(rows):
            raise DprlhfError(f"data {self._spec.path!r}: no user would be left")
        return Users(
            self._rows.select(rows),
            self._spec,
            may_lack_prompts=self._may_lack_prompts,
            absent={*self._absent, *numbers},
        )

    def identities(self) -> Private[NDArray[np.uint64]]:
        """Return hashes of each user's name (without a user column: of its prompt), sorted.

        Two datasets in which a user has the same name share a hash, whatever the files' types and
        spellings, as for :meth:`hashed`. The reverse proves nothing: a person may have another
        name, or another prompt, in another dataset.

        Rows without a prompt, whose users contribute nothing, are nobody in particular: they have
        no hash, or all of them would be one person's. They count in N all the same.
        """
        hashes = [hash_of([known_as(value) for value in given]) for given in self._names()]
        return Private(np.unique(np.concatenate([np.empty(0, dtype=np.uint64), *hashes])))

    def hashed(self, by: Callable[[Iterable[str]], set[bytes]]) -> Private[set[bytes]]:
        """Return the keyed hash of each user's name (without a user column: of its prompt).

        A user has the same name as text or as a number, whichever file it comes from. A row without
        a prompt, whose user contributes nothing and so pays nothing, has none.
        """
        hashes: set[bytes] = set()
        for given in self._names():
            hashes |= by({known_as(value) for value in given})
        return Private(hashes)

    def _names(self) -> Iterator[list[Any]]:
        """Yield what users are known by: their name, without one their prompt, or the whole row.

        Only a prompt can be missing: every row has a name (``user_codes``), and an environment
        gives each row its prompt, whatever values the row lacks. Without names a row that is too
        large is nobody's, as one without a prompt is.
        """
        named, rows = self._spec.owners, self._rows
        if not named:
            rows = self._of_bounded_size(rows)
            named = [self._spec.prompt_column] if self.with_prompts else []
        columns = named or sorted(self._columns)
        for batch in _undecoded(rows, columns):
            if named:
                yield [value for column in named for value in batch[column] if value is not None]
            else:
                yield [list(row) for row in zip(*(batch[c] for c in columns), strict=True)]

    def _of_bounded_size(self, rows: Any) -> Any:
        """Return the rows without those that are too large, from the first on."""
        few = self._too_large[: len(rows)]
        return rows.select(np.flatnonzero(~few)) if few.any() else rows

    def traces(
        self, owners: Sequence[str], first: int | None = None
    ) -> Private[dict[str, NDArray[np.uint64]]]:
        """Return hashes by which rows are recognised in another source.

        Case, white space and the way in which Unicode composes letters are ignored. A conversation
        counts as the text of its messages, whether a content is a text or a list of parts. There
        are hashes of each row's ``text`` (prompt and completions), of its ``prompt`` cut to
        ``prompt_words`` (none without that setting) and of its ``user``.
        """
        spec, rows = self._spec, self._rows
        if first is not None:
            rows = rows.select(range(min(first, len(rows))))
        rows = self._of_bounded_size(rows)
        beside = {getattr(spec, key, None) for key in ("label_column", "logprob_column")}
        texts = [c for c in self._columns if c not in beside]
        if not self.with_prompts:  # an environment's name alone is nobody's text
            texts = sorted(set(texts) - {"environment", *owners})
        named = [column for column in owners if column in rows.column_names]
        hashes: dict[str, list[NDArray[np.uint64]]] = {"text": [], "prompt": [], "user": []}
        for batch in _undecoded(rows, [*texts, *named]):
            whole = zip(*(batch[c] for c in texts), strict=True)
            seen = {"text": [plain(list(row)) for row in whole]}
            if spec.prompt_words is not None and self.with_prompts:
                seen["prompt"] = [plain(_shorten(p, spec)) for p in batch[spec.prompt_column]]
            seen["user"] = [written(name) for column in named for name in batch[column]]
            for kind, values in seen.items():
                some = [value for value in values if value]  # "" is nobody's text
                hashes[kind].append(np.unique(hash_of(some)))
        empty = np.empty(0, dtype=np.uint64)
        return Private({k: np.unique(np.concatenate([empty, *v])) for k, v in hashes.items()})

    def has_rows_of(self, other: Users) -> bool:
        """Return whether all rows are those of ``other``, in the same order and in all columns."""
        if len(self._given) != len(other._given) or self.column_names != other.column_names:
            return False
        both = [
            one._given.with_format("arrow").iter(batch_size=ROWS_AT_ONCE) for one in (self, other)
        ]
        # As text, in which a NaN equals a NaN.
        pairs = zip(*both, strict=True)
        return all(a.equals(b) or repr(a.to_pydict()) == repr(b.to_pydict()) for a, b in pairs)

    def select(self, users: NDArray[np.int64], *, missing: bool = True) -> Prompts:
        """Return the prompts of some users, of each the first ``max_prompts_per_user``.

        Which prompts a user keeps depends on that user's own rows alone.
        """
        return self._read(*self._kept_rows(users), missing=missing)

    def _kept_rows(self, users: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the user of each row that some users keep, and its number among that user's."""
        return np.repeat(users, self._kept[users]), _counting_up(self._kept[users])

    def _read(
        self,
        owners: NDArray[np.int64],
        slots: NDArray[np.int64],
        *,
        missing: bool,
        columns: list[str] | None = None,  # None for all of them
    ) -> Prompts:
        places = self._places(owners, slots)
        if self._too_large[places].any():
            raise DprlhfError(
                f"a row takes more than {MOST_BYTES:,} bytes, or has lists in lists too deep"
            )
        with bounded_images():
            read = (self._rows if columns is None else self._rows.select_columns(columns))[places]
        rows = {
            name: [undo_arrow_unification(value) for value in values]
            for name, values in read.items()
        }
        for name in answer_columns(self._spec) & rows.keys():
            rows[name] = [v if v is None or isinstance(v, list) else str(v) for v in rows[name]]
        if not self.with_prompts:
            empty: list[Prompt] = [[{"role": "user", "content": ""}] for _ in slots]
            return Prompts(empty, owners, slots, rows, in_rows=False)
        for name in () if missing else self._columns:
            if any(value is None or value != value for value in rows[name]):
                raise DprlhfError(f"a row has no {name!r}: fill or drop it")
        given = rows.pop(self._spec.prompt_column)
        prompts = [_shorten(p, self._spec) for p in given]
        return Prompts(prompts, owners, slots, rows)

    def readable(self, users: NDArray[np.int64], encode: Callable[[Prompts], Any]) -> Prompts:
        """Return the prompts of some users, without the rows that lack a value or cannot be read.

        A user of whom no row is left contributes zero to its round and still counts in N: the null
        user of zero-out adjacency. A row whose prompt is null makes one on purpose. A chat template
        can refuse a conversation, and a row may not decode. If that ended a run, one user would
        decide whether there is a result, and its round would be known. Which of a user's rows are
        left depends on each of them alone, and all keep their places (:attr:`Prompts.grid`);
        :attr:`tell` is told of the others.
        """
        owners, slots = self._kept_rows(users)

        def read(some: NDArray[np.int64]) -> Prompts | None:
            try:
                prompts = self._read(owners[some], slots[some], missing=False)
                encode(prompts)
            except EXITS:
                raise
            except BaseException as problem:  # a panic in compiled code is no Exception
                if len(some) == 1:
                    place = self._places(owners[some], slots[some])[0]
                    if place not in self._told:
                        self._told.add(place)
                        clear = isinstance(problem, DprlhfError)
                        why = str(problem) if clear else type(problem).__name__
                        self.tell(
                            f"row {self._spec.skip + place + 1} is left out: it cannot be read"
                            f" ({why})"
                        )
                return None
            return prompts

        some = np.arange(len(owners))
        prompts = read(some)
        if prompts is None:
            some = np.array([i for i in some if read(np.array([i])) is not None], dtype=np.int64)
            prompts = self._read(owners[some], slots[some], missing=False)
        most = self._spec.prompts_in_round
        return prompts.changed(slots=slots[some], round_users=users, prompts_a_user=most)

    def left_out(self, cut: Callable[[Prompts], Sequence[bool]]) -> Private[Counter[str]]:
        """Count the rows that a run leaves out, cannot read, or cuts.

        All ``unmatched`` rows, whose people are not a user together; all ``beyond`` the first of
        their user; and of the prompts of the first
        :data:`LOOKED_AT` users those that are ``missing``, ``empty``, ``cut`` or ``unreadable``.
        """
        looked = np.arange(min(self.count, LOOKED_AT))
        counts = Counter(unmatched=len(self._given) - len(self._rows))
        for start in range(0, len(looked), _AT_ONCE):
            counts += self._faults(*self._kept_rows(looked[start : start + _AT_ONCE]), cut)
        return self.dropped_prompts.map(lambda beyond: counts + Counter(beyond=beyond))

    def _faults(
        self,
        owners: NDArray[np.int64],
        slots: NDArray[np.int64],
        cut: Callable[[Prompts], Sequence[bool]],
    ) -> Counter[str]:
        if not self.with_prompts:  # what an environment returns is not known before it runs
            return Counter()
        try:
            # Without what no encoding reads: an image, say, would be decoded.
            names = [*self._columns, *(c for c in TEMPLATE_COLUMNS if c in self.column_names)]
            names = list(dict.fromkeys(names))
            rows = self._rows.select_columns(self._columns)[self._places(owners, slots)]
            values = zip(*rows.values(), strict=True)
            lack = np.array([any(v is None or v != v for v in row) for row in values])
            whole = owners[~lack], slots[~lack]
            return Counter(
                missing=int(lack.sum()),
                empty=sum(prompt in ("", []) for prompt in rows[self._spec.prompt_column]),
                cut=0 if lack.all() else sum(cut(self._read(*whole, missing=False, columns=names))),
            )
        except EXITS:
            raise
        except BaseException:  # a panic in a tokenizer's compiled code is no Exception
            if len(owners) == 1:
                return Counter(unreadable=1)
            alone = (
                self._faults(owners[i : i + 1], slots[i : i + 1], cut) for i in range(len(owners))
            )
            return sum(alone, Counter[str]())

    def _places(self, owners: NDArray[np.int64], slots: NDArray[np.int64]) -> list[int]:
        """Return the rows of prompts, given by their users and by their number in the user."""
        places: list[int] = self._order[self._starts[owners] + slots].tolist()
        return places


def _undecoded(rows: Any, columns: list[str]) -> Iterator[dict[str, list[Any]]]:
    """Yield the values of columns in parts of the rows; an image, say, as its bytes."""
    kinds = rows.features
    rows = rows.select_columns(columns)
    if any(getattr(part, "decode", False) for name in columns for part in parts_of(kinds[name])):
        rows = rows.with_format("arrow")
    for batch in rows.iter(batch_size=ROWS_AT_ONCE):
        yield batch.to_pydict() if isinstance(batch, pa.Table) else batch


def _too_large(rows: Any) -> NDArray[np.bool_]:
    """Return which rows take more than ``MOST_BYTES`` or are nested too deep, ``[rows]``."""
    parts = [np.empty(0, dtype=np.bool_)]
    for batch in rows.with_format("arrow").iter(batch_size=ROWS_AT_ONCE):
        sizes = np.zeros(len(batch), dtype=np.int64)
        for column in batch.columns:
            sizes += np.concatenate([bytes_of(chunk) for chunk in column.chunks])
        parts.append(sizes > MOST_BYTES)
    return np.concatenate(parts)


def _group(
    rows: Any, spec: recipe.Data, owner: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows in the order of their users, and the number of rows of each user."""
    if spec.user_column is None:
        return np.arange(len(rows)), np.ones(len(rows), dtype=np.int64)
    # Users are numbered as they arrive: by the rank of its name one user could move the others,
    # and with them the batches of a stream.
    from dprlhf.data.names import user_codes

    owner = user_codes(rows, spec) if owner is None else owner
    order = np.argsort(owner, kind="stable")
    return order, np.bincount(owner)


def in_grid(group: NDArray[np.int64], groups: int) -> NDArray[np.int64]:
    """Return the numbers of the members of each group, in their order, ``[groups, most]``.

    >>> in_grid(np.array([1, 0, 1]), 3).tolist()
    [[1, -1], [0, 2], [-1, -1]]
    """
    sizes = np.bincount(group, minlength=groups)
    grid = np.full((groups, sizes.max(initial=0)), -1)
    order = np.argsort(group, kind="stable")
    grid[group[order], _counting_up(sizes)] = order
    return grid


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
