"""The tables of a budget book as one transaction sees them, and the rows that it writes."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from dprlhf.budget.spending import BookError, Cost, Question, Spending
from dprlhf.budget.storage import (
    BOOK,
    DATASETS,
    HISTORIES,
    INCOMING,
    PEOPLE,
    RESERVATIONS,
    VERSION,
    problem,
)
from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Mechanism

FOLLOWED = "ledger"
"""Stage of a row that reserves nothing and says how far a run's ledger had got. No table or column
is new, so that books and rights that are there go on as they are."""


@dataclass(frozen=True)
class State:
    """The small tables, as a transaction sees them."""

    book: sa.Row[Any]
    datasets: dict[str, sa.Row[Any]]
    reservations: dict[int, sa.Row[Any]]
    mechanisms: dict[int, Mechanism | None]  # of each reservation; None where users are enrolled
    histories: dict[int, frozenset[int]]
    sizes: dict[int, int] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, int]:
        """The number of each run's reservation."""
        return {row.run: number for number, row in self.reservations.items()}

    def head(self, run: str) -> str | None:
        """Return the hash of the last entry that the book has seen in a run's ledger, if any."""
        seen = [
            (number, row.run.split()[1])
            for number, row in self.reservations.items()
            if row.stage == FOLLOWED and row.run.split()[0] == run
        ]
        return max(seen)[1] if seen else None

    def cost(self, taken: Collection[int], more: Iterable[Spending], budget: sa.Row[Any]) -> Cost:
        """Return what some reservations and further spendings cost, and a data set's budget."""
        terms: Counter[Mechanism] = Counter()
        for number in taken:
            if (held := self.mechanisms[number]) is not None:
                terms[held] += self.reservations[number].times
        for spending in more:
            if spending.mechanism is not None:
                terms[spending.mechanism] += spending.times
        held_to = (budget.name, budget.epsilon, budget.delta, budget.adaptive)
        return Cost(frozenset(terms.items()), *held_to)


def read_state(connection: sa.Connection, key: bytes, label: str) -> State:
    """Read the small tables, and check that they agree with one another and with the key."""
    try:
        book = connection.execute(sa.select(BOOK)).one()
        check_book(book, key, label)
        datasets = {row.name: row for row in connection.execute(sa.select(DATASETS)).all()}
        reservations = {
            row.number: row for row in connection.execute(sa.select(RESERVATIONS)).all()
        }
        histories = {
            row.number: frozenset(int(n) for n in row.reservations.split(","))
            for row in connection.execute(sa.select(HISTORIES)).all()
        }
        counted = sa.select(PEOPLE.c.history, sa.func.count()).group_by(PEOPLE.c.history)
        sizes = {row[0]: row[1] for row in connection.execute(counted).all()}
    except SQLAlchemyError as error:
        raise problem(error, label) from None
    except DprlhfError:  # which is a ValueError, too
        raise
    except (ValueError, TypeError, AttributeError):
        raise _damaged(label) from None
    try:
        terms = {number: json.loads(row.mechanism) for number, row in reservations.items()}
        mechanisms = {n: None if own is None else Mechanism(**own) for n, own in terms.items()}
    except (ValueError, TypeError, DprlhfError):
        raise _damaged(label) from None
    users: Counter[int] = Counter()
    for history, count in sizes.items():
        users.update(dict.fromkeys(histories.get(history, ()), count))
    agree = (
        sizes.keys() <= histories.keys()
        and reservations.keys() == set(range(1, len(reservations) + 1))
        and users.keys() <= reservations.keys()
        and all(row.users == users[number] for number, row in reservations.items())
        and all(isinstance(row.times, int) and row.times >= 0 for row in reservations.values())
        and {row.dataset for row in reservations.values()} <= datasets.keys()
    )
    if not agree:
        raise _damaged(label)
    return State(book, datasets, reservations, mechanisms, {0: frozenset()} | histories, sizes)


def groups_of(connection: sa.Connection) -> dict[int, int]:
    """Return how many of the run's users have each history; history 0 is that of the others."""
    joined = INCOMING.outerjoin(PEOPLE, INCOMING.c.person == PEOPLE.c.person)
    history = sa.func.coalesce(PEOPLE.c.history, 0)
    counts = sa.select(history, sa.func.count()).select_from(joined).group_by(history)
    return {row[0]: row[1] for row in connection.execute(counts).all()}


def owed_by(
    state: State, taken: frozenset[int], question: Question, dataset: str
) -> list[Spending]:
    """Return the runs not yet recorded for users with this set of reservations."""
    # The new run, and declared earlier runs without a reservation. Users known in the data set that
    # they are to be enrolled in owe nothing.
    numbers = state.numbers
    if question.spending.mechanism is None and _known_in(state, taken, dataset):
        return []
    reserved = {run for run, n in numbers.items() if not state.reservations[n].earlier}
    unpaid = [e for e in question.earlier if e.run not in reserved]
    return [s for s in (*unpaid, question.spending) if numbers.get(s.run) not in taken]


def costs_of(
    state: State, owed: Mapping[int, Sequence[Spending]], dataset: sa.Row[Any]
) -> set[Cost]:
    """Return what users would have spent, for each data set that they are or would be in."""
    costs = set()
    for history, spendings in owed.items():
        taken = state.histories[history]
        # An earlier run may have its reservation already: its users are in that data set, then.
        held = [state.numbers[s.run] for s in spendings if s.run in state.numbers]
        names = {state.reservations[number].dataset for number in (*taken, *held)} | {dataset.name}
        if spendings:
            costs |= {state.cost(taken, spendings, state.datasets[name]) for name in names}
    return costs


def enrolled_as(state: State, groups: Collection[int], dataset: str) -> int:
    """Return the first reservation by which users with these histories are in a data set."""
    return min(n for h in groups for n in _known_in(state, state.histories[h], dataset))


def _known_in(state: State, taken: frozenset[int], dataset: str) -> list[int]:
    """Return the reservations of this history that were made for a data set."""
    return [number for number in taken if state.reservations[number].dataset == dataset]


def write_reservation(
    connection: sa.Connection,
    state: State,
    question: Question,
    dataset: sa.Row[Any],
    groups: Mapping[int, int],
    owed: Mapping[int, Sequence[Spending]],
) -> int:
    """Write the reservations that users owe, and return the number of the run's own."""
    numbers = dict(state.numbers)
    # The run's own is written down even if none of its users has a prompt, and so owes anything.
    due = [*(s for spendings in owed.values() for s in spendings), question.spending]
    for spending in dict.fromkeys(due):
        own = spending is question.spending
        added = sum(count for history, count in groups.items() if spending in owed[history])
        if spending.run in numbers:  # written down as an earlier run, for other users
            row = RESERVATIONS.c.number == numbers[spending.run]
            grown = RESERVATIONS.update().where(row).values(users=RESERVATIONS.c.users + added)
            connection.execute(grown.values(earlier=False) if own else grown)
            continue
        numbers[spending.run] = len(numbers) + 1
        connection.execute(
            RESERVATIONS.insert().values(
                number=numbers[spending.run],
                run=spending.run,
                name=spending.name,
                stage=spending.stage,
                dataset=dataset.name,
                mechanism=_as_json(spending.mechanism),
                times=spending.times,
                epsilon=state.cost((), [spending], dataset).epsilon(),
                users=added,
                earlier=not own,
                date=today(),
            )
        )
    for history, spendings in owed.items():
        if spendings:
            taken = state.histories[history] | {numbers[s.run] for s in spendings}
            _move(connection, state, history, taken)
    return numbers[question.spending.run]


def write_head(connection: sa.Connection, state: State, run: str, head: str) -> None:
    """Write down the hash of the last entry in the ledger of a run that has its reservation."""
    row = state.reservations[state.numbers[run]]
    connection.execute(
        RESERVATIONS.insert().values(
            number=len(state.reservations) + 1,
            run=f"{run} {head}",
            name=row.name,
            stage=FOLLOWED,
            dataset=row.dataset,
            mechanism=_as_json(None),
            times=0,
            epsilon=0.0,
            users=0,
            earlier=False,
            date=today(),
        )
    )


def _move(connection: sa.Connection, state: State, old: int, taken: frozenset[int]) -> None:
    """Give the run's users with the history ``old`` the history ``taken``."""
    number = next((n for n, known in state.histories.items() if known == taken), None)
    if number is None:
        number = max(state.histories) + 1
        state.histories[number] = taken
        text = ",".join(map(str, sorted(taken)))
        connection.execute(HISTORIES.insert().values(number=number, reservations=text))
    if old:
        asking = PEOPLE.c.person.in_(sa.select(INCOMING.c.person))
        moved = PEOPLE.update().where(PEOPLE.c.history == old, asking)
        connection.execute(moved.values(history=number))
        return
    known = sa.exists().where(PEOPLE.c.person == INCOMING.c.person)
    new = sa.select(INCOMING.c.person, sa.literal(number)).where(~known)
    connection.execute(PEOPLE.insert().from_select(["person", "history"], new))


def check_book(row: sa.Row[Any], key: bytes, label: str) -> None:
    """Refuse a book of another layout, or of another key."""
    if row.version != VERSION:
        raise BookError(
            f"budget book {label}: of layout {row.version}, and this dprlhf knows {VERSION};"
            " install the version that wrote it"
        )
    if not hmac.compare_digest(row.key_check, key_check(key)):
        raise BookError(
            f"budget book {label}: this is not its key, so its users would not be known again;"
            " nothing was spent"
        )


def key_check(key: bytes) -> str:
    """Return what a book keeps of its key, by which another key is noticed."""
    return hmac.new(key, b"check", hashlib.sha256).hexdigest()


def _damaged(label: str) -> BookError:
    """Return the error of a book whose tables contradict one another."""
    return BookError(
        f"budget book {label}: damaged (its tables contradict one another); restore it from its"
        " newest backup. Nothing was spent"
    )


def _as_json(mechanism: Mechanism | None) -> str:
    if mechanism is None:
        return "null"
    fields = asdict(mechanism)
    if mechanism.bands == 1:  # as in the rows of books from before bands had a cost
        del fields["bands"]
    if mechanism.rate is None:
        del fields["rate"]
    return json.dumps(fields, sort_keys=True)


def today() -> str:
    """Return the date and time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
