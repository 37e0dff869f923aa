"""Many processes that reserve in one budget book at once, some of them killed on the way.

The processes are forks of this one, which has loaded everything: they start within milliseconds of
one another. Used by the tests and by ``scripts/soundness/budget.py``.
"""

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import sqlalchemy as sa

from dprlhf.budget import Book, Spending
from dprlhf.budget.storage import HISTORIES, PEOPLE, Storage, open_storage
from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Mechanism
from dprlhf.privacy.composition import total_epsilon

DELTA = 1e-5
RESERVED, REFUSED, FAILED = 0, 1, 2


def mechanism(noise: float = 8.0) -> Mechanism:
    """Return a run whose cost has a closed form, so that nothing waits for the accountant."""
    return Mechanism(noise, 10, "fixed", "zero-out")


def cost(runs: int, noise: float = 8.0) -> float:
    """Return the ε of this many such runs on the same user."""
    return total_epsilon([mechanism(noise)], DELTA, times=[runs]).epsilon if runs else 0.0


@dataclass
class Race:
    """What became of the processes of a race, and how long it took."""

    reserved: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0


def race(
    place: str,
    names: list[str],
    users: Callable[[int], tuple[str, range]],
    *,
    kills: int,
    seed: int,
    within: float = 2.0,
) -> Race:
    """Let a process for each name reserve in a book at once, and kill some at random moments.

    Args:
        place: The book.
        names: The runs.
        users: Returns the data set and the users of the run with this index.
        kills: Number of processes that get SIGKILL, unless they end before.
        seed: Seed of who is killed when.
        within: Seconds over which the kills are spread.
    """
    gate, opened = os.pipe()
    children: dict[int, str] = {}
    for index, name in enumerate(names):
        pid = os.fork()
        if pid == 0:
            os.close(opened)
            os.read(gate, 1)  # ends when the parent closes its side
            os._exit(_reserve(place, name, *users(index)))
        children[pid] = name
    os.close(gate)
    draw = random.Random(seed)
    victims = draw.sample(sorted(children), kills)
    moments = sorted((draw.uniform(0, within), pid) for pid in victims)
    os.close(opened)
    start = time.monotonic()
    for moment, pid in moments:
        time.sleep(max(0.0, start + moment - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    found = Race()
    lists = {RESERVED: found.reserved, REFUSED: found.refused, -signal.SIGKILL: found.killed}
    for pid, name in children.items():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        lists.get(code, found.failed).append(name)
    found.seconds = time.monotonic() - start
    return found


def _reserve(place: str, name: str, dataset: str, users: range) -> int:
    try:
        book = Book(place)
        people = book.hashed(f"user {i}" for i in users)
        spending = Spending(name, name, "rl", mechanism())
        book.reserve(spending, people, dataset=dataset, unit="user")
    except DprlhfError as error:
        return REFUSED if "refused" in str(error) else FAILED
    except BaseException:
        return FAILED
    return RESERVED


def runs_of_each_user(place: str) -> list[int]:
    """Return how many reservations each user has, read past the book's own code."""
    with _storage(place).transaction(write=False) as connection:
        rows = connection.execute(
            sa.select(HISTORIES.c.reservations).join(PEOPLE, PEOPLE.c.history == HISTORIES.c.number)
        ).all()
    return [len(row[0].split(",")) for row in rows]


def _storage(place: str) -> Storage:
    return open_storage(place)


def killed_at_each_statement(place: str, name: str, users: range) -> Iterator[int]:
    """Let a process reserve, and kill it before its first, second, third, ... statement.

    Yields the exit code of each process; the last one is not killed.
    """
    for last in range(1, 200):
        pid = os.fork()
        if pid == 0:
            statements = itertools.count(1)

            def count(*_: object, numbers: Iterator[int] = statements, stop: int = last) -> None:
                if next(numbers) == stop:
                    os.kill(os.getpid(), signal.SIGKILL)

            sa.event.listen(sa.Engine, "before_cursor_execute", count)
            sa.event.listen(sa.Engine, "commit", count)
            os._exit(_reserve(place, name, "clinic", users))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        yield code
        if code != -signal.SIGKILL:
            return
