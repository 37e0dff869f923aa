"""Many processes at once, killed at random: nobody overspends, and nothing is half written."""

import signal

import pytest

from dprlhf.budget import Book
from helpers import races


def make(place: str, runs: float, *names: str) -> Book:
    for name in names:
        book = Book.create(place, name, epsilon=races.cost(7), delta=races.DELTA, unit="user")
    return book


def overlapping(index: int) -> tuple[str, range]:
    """Users 0 to 29 in two data sets, of which 10 to 19 are in both."""
    return ("clinic", range(20)) if index % 2 else ("ward", range(10, 30))


@pytest.mark.slow
def test_many_processes_at_once_never_overspend(place: str) -> None:
    make(place, 7, "clinic", "ward")
    names = [f"run {n}" for n in range(12)]
    found = races.race(place, names, overlapping, kills=0, seed=0)
    assert (len(found.reserved), len(found.refused)) == (7, 5), found
    assert max(races.runs_of_each_user(place)) == 7
    again = races.race(place, names, overlapping, kills=0, seed=0)
    assert sorted(again.reserved) == sorted(found.reserved)  # each finds its own, and pays once
    assert max(races.runs_of_each_user(place)) == 7


@pytest.mark.slow
def test_processes_that_are_killed_leave_whole_reservations_or_none(place: str) -> None:
    book = make(place, 7, "clinic", "ward")
    names = [f"run {n}" for n in range(12)]  # of which seven live
    killed = 0
    # A machine at rest is done with all twelve in a quarter of a second, a busy one in seconds.
    for seed, within in enumerate((0.1, 0.6)):
        found = races.race(place, names, overlapping, kills=5, seed=seed, within=within)
        killed += len(found.killed)
        held = {row["run"]: row for row in book.read()["reservations"]}  # checks the tables
        assert held.keys() >= set(found.reserved)
        assert held.keys() <= set(names) - set(found.refused)
        assert {row["users"] for row in held.values()} <= {20}
        assert max(races.runs_of_each_user(place), default=0) <= 7
        assert not found.failed
    assert killed
    assert len(held) == 7


@pytest.mark.slow
def test_a_reservation_is_whole_wherever_the_process_is_killed(place: str) -> None:
    book = make(place, 7, "clinic")
    before = book.read()
    *killed, last = races.killed_at_each_statement(place, "run", range(20))
    assert len(killed) > 10
    assert set(killed) == {-signal.SIGKILL}
    assert last == races.RESERVED
    (row,) = book.read()["reservations"]
    assert (row["number"], row["users"]) == (1, 20)
    assert book.read()["counter"] == before["counter"] + 1
    assert races.runs_of_each_user(place) == [1] * 20
