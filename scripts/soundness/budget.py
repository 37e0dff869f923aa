"""Measure that a budget book is never overspent: many processes at once, killed at random.

A trial is one process that tries to reserve a run's cost. In each race twenty of them start at once
on one book, for two data sets that share users, and eight get SIGKILL at a random moment. Then the
tables are read past the book's own code: no user may have more runs than the budget allows, and no
reservation may be there in part, or be lost after it was confirmed.

    python -m scripts.soundness.budget [--races 50] [--users 100000] [--only sqlite]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dprlhf.budget import Book, Spending
from dprlhf.errors import DprlhfError
from dprlhf.runs.measurements import Result, write_results
from helpers import postgres, races

OUT = Path(__file__).resolve().parents[2] / "docs" / "results" / "soundness.json"

PROCESSES, KILLS, ALLOWED = 20, 8, 7


@dataclass
class Count:
    """What the races of one database came to."""

    trials: int = 0
    killed: int = 0
    reserved: int = 0
    refused: int = 0
    failed: int = 0
    killed_after_commit: int = 0
    overspent: int = 0
    half_written: int = 0
    lost: int = 0


def overlapping(index: int) -> tuple[str, range]:
    """Return the data set and the users of a run: 30 people, of whom 10 are in both data sets."""
    return ("clinic", range(20)) if index % 2 else ("ward", range(10, 30))


def run_races(new: Callable[[], str], number: int) -> Count:
    found, seconds = Count(), 1.0
    for seed in range(number):
        place = new()
        for name in ("clinic", "ward"):
            book = Book.create(
                place, name, epsilon=races.cost(ALLOWED), delta=races.DELTA, unit="user"
            )
        names = [f"run {n}" for n in range(PROCESSES)]
        race = races.race(place, names, overlapping, kills=KILLS, seed=seed, within=seconds)
        seconds = race.seconds  # the kills are spread over as long as the last race took
        found.trials += PROCESSES
        for kind in ("killed", "reserved", "refused", "failed"):
            setattr(found, kind, getattr(found, kind) + len(getattr(race, kind)))
        found.overspent += sum(n > ALLOWED for n in races.runs_of_each_user(place))
        try:
            held = {row["run"]: row["users"] for row in book.read()["reservations"]}
        except DprlhfError:
            found.half_written += 1
            continue
        found.half_written += sum(users != 20 for users in held.values())
        found.killed_after_commit += len(held.keys() & set(race.killed))
        found.lost += len(set(race.reserved) - held.keys())
    return found


def rows_of(engine: str, found: Count, number: int) -> list[Result]:
    how = (
        f"{found.trials:,} attempts in {number} races of {PROCESSES} processes, {KILLS} of each"
        f" race sent SIGKILL, {engine}"
    )
    return [
        *(
            Result(f"budget: {what}", count, unit, "0", count == 0)
            for what, count, unit in (
                (f"users over their budget, {how}", found.overspent, "users"),
                (f"reservations half written or lost, {how}", found.half_written + found.lost,
                 "reservations"),
                (f"attempts that ended otherwise than reserved, refused or killed, {engine}",
                 found.failed, "attempts"),
            )
        ),
        Result(f"budget: attempts killed before their answer, {engine}", found.killed, "attempts"),
        Result(f"budget: of these, killed when their reservation was written, {engine}",
               found.killed_after_commit, "attempts"),
    ]  # fmt: skip


def seconds_to_reserve(place: str, users: int, runs: int = 10) -> float:
    """Return how long the last of several reservations for many users takes."""
    epsilon = races.cost(2 * runs)
    book = Book.create(place, "large", epsilon=epsilon, delta=races.DELTA, unit="user")
    people = book.hashed(f"user {i}" for i in range(users))
    for n in range(runs):
        start = time.perf_counter()
        spending = Spending(f"run {n}", "run", "rl", races.mechanism())
        book.reserve(spending, people, dataset="large", unit="user")
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--races", type=int, default=50)
    parser.add_argument("--users", type=int, default=100_000)
    parser.add_argument("--only", choices=["sqlite", "postgresql"])
    given = parser.parse_args()
    os.nice(10)

    def measure(engine: str, new: Callable[[], str]) -> None:
        rows = rows_of(engine, run_races(new, given.races), given.races)
        name = f"budget: a reservation for {given.users:,} users, {engine}"
        rows.append(Result(name, seconds_to_reserve(new(), given.users), "seconds"))
        write_results(OUT, rows, show=True)

    with tempfile.TemporaryDirectory() as folder:
        numbers = iter(range(10**9))
        if given.only != "postgresql":
            measure("SQLite", lambda: f"{folder}/{next(numbers)}.db")
        if given.only != "sqlite":
            if reason := postgres.missing():
                sys.exit(f"PostgreSQL was not measured: {reason}")
            os.environ["DPRLHF_BOOK_KEY_FILE"] = f"{folder}/key"
            with postgres.server(durable=True) as new:
                measure("PostgreSQL", new)


if __name__ == "__main__":
    main()
