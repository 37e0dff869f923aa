"""Reservations in a budget book: asked for, refused or written in one transaction.

A user's cost is the joint privacy loss of all its reservations, and it must stay within the budget
of every data set that one of them was made for: the smallest counts.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from dprlhf.budget.spending import (
    BookError,
    Cost,
    Mark,
    Question,
    Reservation,
    Spending,
    cost_the_same,
    largest,
)
from dprlhf.budget.state import (
    FOLLOWED,
    State,
    check_book,
    costs_of,
    enrolled_as,
    groups_of,
    key_check,
    owed_by,
    read_state,
    today,
    write_head,
    write_reservation,
)
from dprlhf.budget.storage import (
    BOOK,
    DATASETS,
    INCOMING,
    METADATA,
    VERSION,
    has_book,
    lock,
    open_storage,
    read_key,
)
from dprlhf.errors import DprlhfError, unit_in_words

_CREATING = 0x6470_726C  # of the advisory lock that one creator of tables holds in PostgreSQL
_AT_ONCE = 10_000


class Book:
    """A budget book that is open: its database, its identifier and its key."""

    def __init__(self, name: str) -> None:
        self.storage = open_storage(name)
        self.key, self.key_file = read_key(self.storage)
        with self.storage.transaction(write=False) as connection:
            if self.storage.path is not None:
                self.storage.check_pages(connection)
            self.id: str = read_state(connection, self.key, self.storage.label).book.id

    # --- making one -----------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        name: str,
        dataset: str,
        *,
        epsilon: float,
        delta: float,
        unit: str | None,
        adaptive: bool = False,  # a filter, which holds even if plans follow earlier results
    ) -> Book:
        """Give a data set its lifetime budget; the first data set makes the book and its key."""
        if not 0 < epsilon < float("inf"):
            raise DprlhfError(f"--epsilon must be a positive number, not {epsilon}")
        if not 0 < delta < 1:
            raise DprlhfError(f"--delta must be above 0 and below 1, not {delta}")
        if not dataset.strip() or len(dataset) > 200:
            raise DprlhfError("the name of a data set has 1 to 200 characters")
        storage = open_storage(name, create=True)
        # A new key beside an old book would be a wrong one.
        key, _ = read_key(storage, create=not has_book(storage))
        with storage.transaction(write=True) as connection:
            if storage.path is None:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATING)))
            METADATA.create_all(connection)
            if connection.execute(sa.select(BOOK.c.id)).first() is None:
                values = {"one": 1, "id": secrets.token_hex(8), "version": VERSION, "counter": 0}
                connection.execute(BOOK.insert().values(**values, key_check=key_check(key)))
            row = lock(connection)
            check_book(row, key, storage.label)
            if connection.execute(sa.select(DATASETS).where(DATASETS.c.name == dataset)).first():
                raise DprlhfError(
                    f"budget book {storage.label}: the data set {dataset!r} has its budget, which"
                    " is for life"
                )
            connection.execute(
                DATASETS.insert().values(
                    name=dataset,
                    epsilon=epsilon,
                    delta=delta,
                    unit=unit,
                    adaptive=adaptive,
                    date=today(),
                )
            )
            connection.execute(BOOK.update().values(counter=row.counter + 1))
        return cls(name)

    # --- users ----------------------------------------------------------------------------------

    def hashed(self, names: Iterable[str]) -> set[bytes]:
        """Return the keyed hashes (HMAC-SHA256) of users' names."""
        key = self.key
        return {hmac.digest(key, b"user\0" + name.encode(), "sha256") for name in names}

    def enrol(
        self, users: Collection[bytes], name: str, *, dataset: str | None, unit: str | None
    ) -> Reservation:
        """Make users known as a data set's before its first run: its budget protects them."""
        if not users:
            raise DprlhfError(f"{name}: none of the rows has a prompt, so there is nobody to enrol")
        enrolled = Spending(f"users {secrets.token_hex(16)}", name, "users", None, times=0)
        return self.reserve(enrolled, users, dataset=dataset, unit=unit)

    # --- reservations ---------------------------------------------------------------------------

    def reserve(
        self,
        spending: Spending,
        users: Collection[bytes],
        *,
        dataset: str | None,
        unit: str | None,
        earlier: Sequence[Spending] = (),  # written down for these users where not in this book
        marks: Sequence[Mark] = (),  # of the book, in the ledgers at hand
        commit: bool = True,  # False only asks whether it would be refused
    ) -> Reservation:
        """Reserve the whole cost of a run for its users once and for good, or refuse it."""
        question = Question(spending, dataset, unit, earlier, marks)
        passed: set[Cost] = set()
        while True:
            # Repeated even where a lost connection hides whether it committed: a run pays once.
            reservation = self.storage.attempt(
                lambda: self._transact(question, users, passed, commit)
            )
            if isinstance(reservation, Reservation):
                return reservation
            # Composed while others may reserve, whom the book would otherwise keep waiting. What
            # they add is asked for in the next turn, so there are no more turns than other runs.
            costs, alone = reservation
            passed.update(costs)
            for cost in largest(passed):
                _check_budget(cost, adds=spending.mechanism is not None)
            for cost in alone:
                cost.epsilon()  # is kept, for the row that the next turn writes

    def _transact(
        self, question: Question, users: Collection[bytes], passed: set[Cost], commit: bool
    ) -> Reservation | tuple[set[Cost], list[Cost]]:
        """Write what the run owes, or return costs to compose first: its users', each run's."""
        # Read under the lock held until the commit: no two runs take the last of a budget.
        with self.storage.transaction(write=True, commit=commit) as connection:
            INCOMING.create(connection, checkfirst=False)
            rows = [{"person": person} for person in users]
            for start in range(0, len(rows), _AT_ONCE):
                connection.execute(INCOMING.insert(), rows[start : start + _AT_ONCE])
            lock(connection)
            state = read_state(connection, self.key, self.storage.label)
            self._check_age(state, question.marks)
            dataset = self._dataset(state, question)
            groups = groups_of(connection)
            owed = {h: owed_by(state, state.histories[h], question, dataset.name) for h in groups}
            spending, counter = question.spending, state.book.counter
            number = state.numbers.get(spending.run)
            unpaid = number is not None and state.reservations[number].earlier
            if number is not None:
                self._check_same(state, number, question, owed)
            elif spending.mechanism is None and not any(owed.values()):
                number = enrolled_as(state, groups, dataset.name)
            if number is None or unpaid:
                costs = costs_of(state, owed, dataset)
                if not costs <= passed:
                    due = {s for spendings in owed.values() for s in spendings}
                    return costs, [state.cost((), [s], dataset) for s in due]
                number = write_reservation(connection, state, question, dataset, groups, owed)
                counter += 1
                connection.execute(BOOK.update().values(counter=counter))
        return Reservation(self.id, number, counter, dataset.name, dataset.epsilon, dataset.delta)

    def follow(self, run: str, hashes: Sequence[str]) -> None:
        """Keep how far a run's ledger has got, and refuse one that lacks what the book has seen."""
        # Of two copies of a run folder only one may go on: the run has reserved for once.
        self.storage.attempt(lambda: self._follow(run, hashes))

    def _follow(self, run: str, hashes: Sequence[str]) -> None:
        with self.storage.transaction(write=True) as connection:
            lock(connection)
            state = read_state(connection, self.key, self.storage.label)
            if run not in state.numbers:
                raise BookError(
                    f"budget book {self.storage.label}: it has no reservation of this run, which"
                    " reserved before it began: the book has lost entries, as one restored from an"
                    " older copy has, and what the run spent is in no budget. Bring back the newest"
                    " copy of the book"
                )
            seen = state.head(run)
            if seen is not None and seen not in hashes:
                raise BookError(
                    f"budget book {self.storage.label}: this run has gone on from another copy of"
                    " its folder, whose ledger has entries that this one lacks: rounds would"
                    " release twice about their users, and were reserved once. Continue that copy,"
                    " or start a new run"
                )
            if seen != hashes[-1]:
                write_head(connection, state, run, hashes[-1])

    # --- checks ---------------------------------------------------------------------------------

    def _check_age(self, state: State, marks: Sequence[Mark]) -> None:
        """Refuse a book that is older than a ledger: it has forgotten what was spent since."""
        for mark in marks:
            if mark.book != self.id:
                continue
            known = state.numbers.get(mark.run) == mark.reservation
            if not known or state.book.counter < mark.counter:
                raise BookError(
                    f"budget book {self.storage.label}: older than a run's ledger (counter"
                    f" {state.book.counter}, the ledger has {mark.counter}): it was restored from a"
                    " backup, and has forgotten what was spent since. Restore a newer one"
                )

    def _dataset(self, state: State, question: Question) -> sa.Row[Any]:
        label, names = self.storage.label, ", ".join(sorted(state.datasets)) or "none"
        held = state.numbers.get(question.spending.run)
        asked = question.dataset or (state.reservations[held].dataset if held else None)
        if asked is None and len(state.datasets) != 1:
            raise DprlhfError(
                f"privacy.dataset: say which data set of the budget book {label} the users are in"
                f" ({names})"
            )
        name = asked or next(iter(state.datasets))
        if name not in state.datasets:
            raise DprlhfError(
                f"privacy.dataset {name!r}: the budget book {label} has no such data set (it has:"
                f" {names}); make it with: dprlhf budget create {name}"
            )
        dataset = state.datasets[name]
        if dataset.unit != question.unit:
            raise DprlhfError(
                f"data set {name!r} has its budget for {unit_in_words(dataset.unit)}, and this run"
                f" protects {unit_in_words(question.unit)}: give it the same data.user_column"
            )
        return dataset

    def _check_same(
        self,
        state: State,
        number: int,
        question: Question,
        owed: Mapping[int, Sequence[Spending]],
    ) -> None:
        """Check that a run in the book is the one written down, and its users have paid."""
        # Users of an earlier run that a later one wrote down may have yet to pay. How many users a
        # reservation has proves nothing: those of several runs can be in an earlier run's.
        row, spending = state.reservations[number], question.spending
        asked = question.dataset or row.dataset
        if row.earlier and row.dataset != asked:
            raise DprlhfError(
                f"privacy.dataset {asked!r}: a later run wrote this run down in data set"
                f" {row.dataset!r} of the budget book (reservation {number}): name that one"
            )
        same = (row.times, row.dataset) == (spending.times, asked)
        same = same and cost_the_same(state.mechanisms[number], spending.mechanism)
        paid = row.earlier or not any(spending in spendings for spendings in owed.values())
        if not (same and paid):
            raise DprlhfError(
                f"this run reserved another cost in the budget book (reservation {number}): its"
                " data set, users or plan changed. Start a new run"
            )

    # --- what is in it --------------------------------------------------------------------------

    def read(self) -> dict[str, Any]:
        """Return the data sets and reservations, JSON-ready and secret, without users' hashes."""
        # `used` is the largest share of its budget that a user has taken up, `spent` the largest ε,
        # stated only where plans were settled. Both depend on who is in several data sets.
        with self.storage.transaction(write=False) as connection:
            state = read_state(connection, self.key, self.storage.label)
        return {
            "book": self.id,
            "counter": state.book.counter,
            "users": sum(state.sizes.values()),
            "datasets": [self._summary(state, row) for row in state.datasets.values()],
            "reservations": [
                {
                    **row._asdict(),
                    "delta": state.datasets[row.dataset].delta,
                    "mechanism": json.loads(row.mechanism),
                }
                for _, row in sorted(state.reservations.items())
                if row.stage != FOLLOWED
            ],
        }

    @staticmethod
    def _summary(state: State, row: sa.Row[Any]) -> dict[str, Any]:
        runs = {n for n, r in state.reservations.items() if r.dataset == row.name}
        taken = {state.histories[h] for h in state.sizes if state.histories[h] & runs}
        costs = {state.cost(numbers, (), row) for numbers in taken}
        most = largest(costs)
        used = max((cost.share() for cost in most), default=0.0)
        spent = None if row.adaptive else max((cost.epsilon() for cost in most), default=0.0)
        return {
            **row._asdict(),
            "used": used,
            "spent": spent,
            "remaining": None if spent is None else max(0.0, row.epsilon - spent),
            "runs": sum(state.reservations[n].times > 0 for n in runs),
            "users": sum(n for h, n in state.sizes.items() if state.histories[h] & runs),
        }


def _check_budget(cost: Cost, *, adds: bool) -> None:
    """Refuse the run if a user would exceed the budget of a data set."""
    name = cost.dataset
    try:
        within = cost.within()
    except DprlhfError as error:
        raise DprlhfError(f"budget of data set {name!r}: {error}") from None
    budget = f"the budget of data set {name!r} (epsilon {cost.budget:g} at delta {cost.delta:g}"
    if not within and not adds:
        raise DprlhfError(
            f"refused: a user has spent more than {budget}) already, in other data sets"
        )
    if not within:
        raise DprlhfError(
            f"refused: with this run a user would exceed {budget}, for all runs together); nothing"
            " was spent. What is left: dprlhf budget show"
        )
