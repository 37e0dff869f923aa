"""The budget book on SQLite and PostgreSQL: what is refused, what is kept, what is noticed."""

import hashlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from dprlhf.budget import Book, BookError, Mark, Reservation, Spending
from dprlhf.budget import spending as spending_module
from dprlhf.budget.storage import BrokenOffError, lock, open_storage
from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Mechanism
from dprlhf.privacy.composition import filter_share, total_epsilon

DELTA = 1e-5
PASSWORD = "hunter2"


def mechanism(noise: float = 8.0) -> Mechanism:
    """Of closed form, so that a test takes no time."""
    return Mechanism(noise, 10, "fixed", "zero-out")


ONE = total_epsilon([mechanism()], DELTA).epsilon
TWO = total_epsilon([mechanism()] * 2, DELTA).epsilon
THREE = total_epsilon([mechanism()] * 3, DELTA).epsilon


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "book.db"


def make(place: str | Path, name: str = "clinic", epsilon: float = 4.0, **more: Any) -> Book:
    values = {"epsilon": epsilon, "delta": DELTA, "unit": "user"} | more
    return Book.create(str(place), name, **values)


def ask(book: Book, run: str, users: range, dataset: str | None = None, **more: Any) -> Reservation:
    unit = more.pop("unit", "user")
    spending = Spending(run, run, "rl", more.pop("mechanism", mechanism()), more.pop("times", 1))
    names = book.hashed(f"user {i}" for i in users)
    return book.reserve(spending, names, dataset=dataset, unit=unit, **more)


def spent(book: Book) -> dict[str, float]:
    return {d["name"]: d["spent"] for d in book.read()["datasets"]}


@pytest.mark.slow
def test_runs_on_the_same_users_compose_until_the_budget_is_spent(place: str) -> None:
    book = make(place, epsilon=TWO)
    first = ask(book, "a", range(20))
    second = ask(book, "b", range(20))
    assert (first.number, second.number) == (1, 2)
    assert first.counter < second.counter
    before = book.read()
    with pytest.raises(DprlhfError, match=r"refused: .* exceed the budget of data set 'clinic'"):
        ask(book, "c", range(20))
    assert book.read() == before  # a refusal leaves nothing
    assert spent(book) == {"clinic": pytest.approx(TWO)}
    ask(book, "d", range(20, 40))  # others have their own budget


def test_overlapping_data_sets_compose_for_those_whom_they_share(place: str) -> None:
    book = make(place, "left", TWO)
    make(place, "right", TWO)
    ask(book, "a", range(0, 20), "left")
    ask(book, "b", range(10, 30), "right")
    assert spent(book) == {"left": pytest.approx(TWO), "right": pytest.approx(TWO)}
    with pytest.raises(DprlhfError, match="refused"):
        ask(book, "c", range(19, 21), "right")  # user 19 is in both
    ask(book, "d", range(20, 30), "right")
    with pytest.raises(DprlhfError, match="refused"):
        ask(book, "e", range(1), "left", times=2)
    ask(book, "f", range(10), "left")
    groups = {d["name"]: d["users"] for d in book.read()["datasets"]}
    assert groups == {"left": 20, "right": 20}


def test_whoever_is_in_two_data_sets_keeps_to_the_smaller_budget(place: str) -> None:
    book = make(place, "small", ONE)
    make(place, "large", THREE)
    ask(book, "a", range(10), "small")
    ask(book, "b", range(10, 20), "large")
    with pytest.raises(DprlhfError, match="'small'"):
        ask(book, "c", range(9, 20), "large")
    ask(book, "c", range(10, 20), "large")
    with pytest.raises(DprlhfError, match="'small'"):
        ask(book, "d", range(10, 11), "small")  # has spent more elsewhere already


def test_enrolled_users_are_protected_in_other_data_sets_from_the_start(place: str) -> None:
    book = make(place, "small", ONE)
    make(place, "large", THREE)
    people = book.hashed(f"user {i}" for i in range(10))
    book.enrol(people, "recipe.yaml", dataset="small", unit="user")
    ask(book, "a", range(5, 15), "large")
    with pytest.raises(DprlhfError, match="'small'"):
        ask(book, "b", range(9, 15), "large")
    ask(book, "b", range(10, 15), "large")
    with pytest.raises(DprlhfError, match="has spent more than the budget of data set 'small'"):
        book.enrol(book.hashed(["user 12"]), "more.yaml", dataset="small", unit="user")
    book.enrol(book.hashed(["user 30"]), "more.yaml", dataset="small", unit="user")
    found = {d["name"]: (d["runs"], d["users"]) for d in book.read()["datasets"]}
    assert found == {"small": (0, 11), "large": (2, 10)}
    assert spent(book) == {"small": pytest.approx(ONE), "large": pytest.approx(TWO)}


def test_users_who_are_enrolled_already_are_not_enrolled_again(place: str) -> None:
    book = make(place, "small", ONE)
    make(place, "large", THREE)
    people = book.hashed(f"user {i}" for i in range(10))
    first = book.enrol(people, "recipe.yaml", dataset="small", unit="user")
    before = book.read()
    assert book.enrol(people, "recipe.yaml", dataset="small", unit="user") == first
    assert book.enrol(list(people)[:3], "other.yaml", dataset="small", unit="user") == first
    assert book.read() == before
    more = book.hashed(f"user {i}" for i in range(5, 12))
    assert book.enrol(more, "recipe.yaml", dataset="small", unit="user").number == 2
    ask(book, "a", range(20), "large")
    before = book.read()
    assert [r["users"] for r in before["reservations"]] == [10, 2, 20]
    book.enrol(book.hashed(["user 15"]), "more.yaml", dataset="large", unit="user")
    assert book.read() == before  # whoever was in a run of a data set is known as one of its users
    book.enrol(people, "recipe.yaml", dataset="large", unit="user")
    assert book.read() == before
    book.enrol(book.hashed(["user 15"]), "more.yaml", dataset="small", unit="user")
    assert [r["users"] for r in book.read()["reservations"]] == [10, 2, 20, 1]
    again = Spending("users again", "more.yaml", "users", None, times=0)
    asked = [book.hashed(["user 15", "user 16"])] * 2  # the second after a lost connection, say
    found = [book.reserve(again, some, dataset="small", unit="user") for some in asked]
    assert found[0] == found[1]
    assert [r["users"] for r in book.read()["reservations"]] == [10, 2, 20, 1, 1]
    with pytest.raises(DprlhfError, match="nobody to enrol"):
        book.enrol([], "recipe.yaml", dataset="small", unit="user")


def test_a_run_that_comes_back_finds_its_reservation_and_pays_once(place: str) -> None:
    book = make(place, epsilon=ONE)
    first = ask(book, "a", range(20))
    again = ask(Book(place), "a", range(20))
    assert again == first
    assert len(book.read()["reservations"]) == 1
    assert ask(book, "a", range(19)) == first  # all of them have paid
    for changed in ({"users": range(21)}, {"users": range(1, 21)}, {"mechanism": mechanism(9)}):
        with pytest.raises(DprlhfError, match="reserved another cost"):
            ask(book, "a", **({"users": range(20)} | changed))
    make(place, "second")
    assert ask(book, "a", range(20)).dataset == "clinic"  # which of them need not be said again
    with pytest.raises(DprlhfError, match="reserved another cost"):
        ask(book, "a", range(20), "second")


def test_a_question_writes_nothing(place: str) -> None:
    book = make(place, epsilon=ONE)
    before = book.read()
    ask(book, "", range(20), commit=False)
    assert book.read() == before
    ask(book, "a", range(20))
    with pytest.raises(DprlhfError, match="refused"):
        ask(book, "", range(20), commit=False)
    ask(book, "a", range(20), commit=False)  # the run that has it


def test_tuning_runs_and_earlier_runs_are_paid_for_once(place: str) -> None:
    book = make(place, epsilon=THREE)
    old = Spending("old", "old", "sft", mechanism())
    ask(book, "a", range(20), earlier=[old])
    assert spent(book)["clinic"] == pytest.approx(TWO)
    ask(book, "b", range(10, 30), earlier=[old, Spending("a", "a", "rl", mechanism())])
    assert spent(book)["clinic"] == pytest.approx(THREE)  # old, a, b for users 10 to 19
    found = {r["run"]: (r["users"], r["earlier"]) for r in book.read()["reservations"]}
    assert found == {"old": (30, True), "a": (20, False), "b": (20, False)}
    with pytest.raises(DprlhfError, match="refused"):
        ask(book, "c", range(30, 40), times=4)
    ask(book, "c", range(30, 40), times=3)


def test_an_earlier_run_that_is_resumed_pays_for_the_users_who_have_not(place: str) -> None:
    book = make(place, epsilon=THREE)
    ask(book, "a", range(20), earlier=[Spending("old", "old", "sft", mechanism())])
    first = ask(book, "old", range(10, 30))
    found = {r["run"]: (r["users"], r["earlier"]) for r in book.read()["reservations"]}
    assert found == {"old": (30, False), "a": (20, False)}
    assert spent(book)["clinic"] == pytest.approx(TWO)
    assert ask(book, "old", range(10, 30)) == first  # and again, and pays nothing
    with pytest.raises(DprlhfError, match="reserved another cost"):
        ask(book, "old", range(10, 31))


def test_a_plan_that_another_processor_rounds_otherwise_is_the_same_plan(place: str) -> None:
    book = make(place, epsilon=TWO)
    first = ask(book, "a", range(20))
    old = Spending("old", "old", "sft", mechanism())
    ask(book, "b", range(20, 30), earlier=[old])
    for noise in (8.0 * (1 + 1e-12), 8.0 * (1 - 5e-7)):
        again = ask(book, "a", range(20), mechanism=mechanism(noise))
        assert again.number == first.number
        ask(book, "old", range(20, 30), mechanism=mechanism(noise))
    for other in (
        mechanism(8.0 * (1 + 2e-6)),
        Mechanism(8.0, 11, "fixed", "zero-out"),
        Mechanism(8.0, 10, "stream", "zero-out"),
        Mechanism(8.0, 10, "fixed", "replace-one"),
        Mechanism(8.0, 10, "fixed", "zero-out", releases_per_round=2),
    ):
        with pytest.raises(DprlhfError, match="reserved another cost"):
            ask(book, "a", range(20), mechanism=other)


def test_an_earlier_run_that_is_resumed_is_the_one_that_was_written_down(place: str) -> None:
    book = make(place, epsilon=THREE)
    make(place, "ward")
    ask(book, "a", range(20), "clinic", earlier=[Spending("old", "old", "sft", mechanism())])
    for changed in ({"times": 2}, {"mechanism": mechanism(9)}):
        with pytest.raises(DprlhfError, match="reserved another cost"):
            ask(book, "old", range(20), "clinic", **changed)
    with pytest.raises(DprlhfError, match=r"wrote this run down in data set 'clinic'"):
        ask(book, "old", range(20, 30), "ward")  # whose budget would not protect them
    first = ask(book, "old", range(20), "clinic")  # of whom all have paid
    assert ask(book, "old", range(20)) == first
    assert [r["earlier"] for r in book.read()["reservations"]] == [False, False]


def test_a_run_whose_users_all_lack_a_prompt_is_written_down_and_costs_nobody(place: str) -> None:
    book = make(place, epsilon=ONE)
    assert ask(book, "a", range(0)).number == 1
    assert ask(book, "b", range(20)).number == 2
    assert ask(book, "a", range(0)).number == 1
    found = {r["run"]: r["users"] for r in book.read()["reservations"]}
    assert found == {"a": 0, "b": 20}
    assert spent(book) == {"clinic": pytest.approx(ONE)}


def composing(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], Any]) -> list[int]:
    """Call something whenever ε of several runs is composed, and list how many runs each has."""
    composed: list[int] = []
    real = spending_module.total_epsilon

    def compose(mechanisms: Any, delta: float, *, times: Any) -> Any:
        composed.append(sum(times))
        meanwhile()
        return real(mechanisms, delta, times=times)

    spending_module.joint_epsilon.cache_clear()
    monkeypatch.setattr(spending_module, "total_epsilon", compose)
    return composed


def test_the_book_is_free_while_costs_are_composed(place, monkeypatch):
    monkeypatch.setattr("dprlhf.budget.storage.PATIENCE", 0.5)
    book = make(place, epsilon=THREE)
    ask(book, "a", range(20))

    def write() -> None:
        with open_storage(place).transaction(write=True) as connection:
            lock(connection)
            connection.execute(sa.text("UPDATE dprlhf_book SET counter = counter + 1"))

    composed = composing(monkeypatch, write)
    old = Spending("old", "old", "sft", mechanism())
    ask(book, "b", range(10, 30), earlier=[old])
    assert max(composed) == 3
    with pytest.raises(DprlhfError, match="refused"):
        ask(book, "c", range(30), times=4)


def test_what_others_reserve_while_costs_are_composed_is_counted(place, monkeypatch):
    book = make(place, epsilon=TWO)
    ask(book, "a", range(20))
    waiting = [("b", range(10, 30))]

    def reserve() -> None:
        if waiting:
            ask(Book(place), *waiting.pop())

    composing(monkeypatch, reserve)
    with pytest.raises(DprlhfError, match="refused"):
        ask(book, "c", range(15))  # users 10 to 14 have spent it all by now
    assert [r["run"] for r in book.read()["reservations"]] == ["a", "b"]
    waiting.append(("d", range(35, 45)))
    spending_module.joint_epsilon.cache_clear()
    ask(book, "e", range(30, 40))  # has its place behind the other, and users 35 to 39 both
    assert [r["run"] for r in book.read()["reservations"]] == ["a", "b", "d", "e"]
    assert spent(book) == {"clinic": pytest.approx(TWO)}


def test_many_cheap_runs_do_not_stand_for_a_dear_one(place: str) -> None:
    book = make(place, epsilon=total_epsilon([mechanism()], DELTA, times=[5]).epsilon)
    ask(book, "a", range(10), times=3)
    ask(book, "b", range(10, 20), mechanism=mechanism(4.0))  # costs as much as four of them
    with pytest.raises(DprlhfError, match="refused"):
        ask(book, "c", range(20), times=2)
    ask(book, "c", range(20))


def test_runs_with_other_neighbours_are_refused(place: str) -> None:
    book = make(place)
    ask(book, "a", range(20))
    other = Mechanism(8.0, 10, "fixed", "replace-one")
    with pytest.raises(DprlhfError, match="different neighbours"):
        ask(book, "b", range(20), mechanism=other)


@pytest.mark.slow
def test_an_adaptive_budget_is_a_filter(file: Path) -> None:
    """What settled plans would cost is no bound on plans that follow from results."""
    run = Mechanism(2.0, 16, "random-allocation", "zero-out")
    budget = total_epsilon([run], DELTA, times=[2]).epsilon * 1.01
    plain = make(file.with_name("plain.db"), epsilon=budget)
    book = make(file, epsilon=budget, adaptive=True)
    for made in (plain, book):
        ask(made, "a", range(20), mechanism=run)
    ask(plain, "b", range(20), mechanism=run)
    with pytest.raises(DprlhfError, match="would exceed the budget"):
        ask(book, "b", range(20), mechanism=run)
    ask(book, "c", range(20, 30), mechanism=Mechanism(9.0, 16, "random-allocation", "zero-out"))
    summary = book.read()["datasets"][0]
    assert summary["spent"] is summary["remaining"] is None
    assert summary["used"] == filter_share({run: 1}, budget, DELTA) < 1
    with pytest.raises(DprlhfError, match="different neighbours"):
        ask(book, "d", range(20), mechanism=Mechanism(80.0, 10, "fixed", "replace-one"))


def test_users_are_kept_as_keyed_hashes(file: Path) -> None:
    book = make(file)
    ask(book, "a", range(20))
    content = file.read_bytes()
    assert b"user 7" not in content
    for plain in (b"user 7", b"user\0user 7"):
        assert hashlib.sha256(plain).digest() not in content
        assert next(iter(book.hashed([plain.decode()]))) not in {hashlib.sha256(plain).digest()}
    assert next(iter(book.hashed(["user 7"]))) in content
    other = make(file.with_name("other.db"))
    assert book.hashed(["user 7"]).isdisjoint(other.hashed(["user 7"]))
    assert b"user" not in json.dumps(book.read()["reservations"]).encode().replace(b'"users"', b"")


def test_book_and_key_are_the_owners_alone(file: Path) -> None:
    make(file)
    assert {p.name: p.stat().st_mode & 0o777 for p in file.parent.iterdir()} == {
        "book.db": 0o600,
        "book.db.key": 0o600,
    }
    for path in (file, Path(f"{file}.key")):
        path.chmod(0o604)
        with pytest.raises(BookError, match="everybody can read it"):
            Book(str(file))
        path.chmod(0o600)


def test_a_wrong_or_lost_key_is_refused(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make(place)
    monkeypatch.setenv("DPRLHF_BOOK_KEY", "ab" * 32)
    with pytest.raises(BookError, match="not its key"):
        Book(place)
    with pytest.raises(BookError, match="not its key"):
        make(place, "other")
    monkeypatch.setenv("DPRLHF_BOOK_KEY", "ab")
    with pytest.raises(BookError, match="not a key"):
        Book(place)
    monkeypatch.delenv("DPRLHF_BOOK_KEY")
    monkeypatch.setenv("DPRLHF_BOOK_KEY_FILE", "/nowhere/key")
    with pytest.raises(BookError, match="missing"):
        Book(place)
    monkeypatch.delenv("DPRLHF_BOOK_KEY_FILE")
    if "://" in place:
        with pytest.raises(BookError, match="DPRLHF_BOOK_KEY_FILE"):
            Book(place)


def test_a_database_that_is_down_or_empty_stops_in_one_line(databases, monkeypatch):
    monkeypatch.setenv("DPRLHF_BOOK_KEY", "ab" * 32)
    with pytest.raises(BookError, match="there is no book in it"):
        Book(databases())
    for url in (
        f"postgresql://me:{PASSWORD}@127.0.0.1:9/book",
        f"postgresql://me:{PASSWORD}@no-such-host.invalid/book",
        f"postgresql://me:{PASSWORD[:3]}@{PASSWORD[3:]}@127.0.0.1:9/book",
        f"postgresql://me:{PASSWORD}@127.0.0.1:port/book",
        f"postgresql://me@127.0.0.1:9/book?passwort={PASSWORD}",
    ):
        said = "does not answer|cannot be read|does not know"
        with pytest.raises(BookError, match=said) as caught:
            Book(url)
        assert "ter2" not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_book_that_is_locked_too_long(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dprlhf.budget.storage.PATIENCE", 0.3)
    book = make(place)
    holder = open_storage(place)
    with holder.transaction(write=True, commit=False) as connection:
        connection.execute(sa.text("UPDATE dprlhf_book SET counter = counter + 1"))
        with pytest.raises(BookError, match="locked by another process"):
            ask(book, "a", range(20))
    ask(book, "a", range(20))


def test_a_role_that_trains_needs_few_rights(databases, tmp_path, monkeypatch):
    """As docs/budget.md lists them."""
    monkeypatch.setenv("DPRLHF_BOOK_KEY_FILE", str(tmp_path / "key"))
    url = databases()
    make(url)
    with open_storage(url).transaction(write=True) as connection:
        connection.execute(sa.text("CREATE ROLE trainer LOGIN"))
        for table in ("book", "datasets", "reservations", "histories", "people"):
            rights = f"GRANT SELECT, INSERT, UPDATE ON dprlhf_{table} TO trainer"
            connection.execute(sa.text(rights))
    book = Book(url.replace("dprlhf@", "trainer@"))
    assert ask(book, "a", range(20)).number == 1
    book.follow("a", ["open", "one"])
    with (
        pytest.raises(sa.exc.ProgrammingError),
        open_storage(url.replace("dprlhf@", "trainer@")).engine.begin() as connection,
    ):
        connection.execute(sa.text("DELETE FROM dprlhf_people"))


def test_damage_is_noticed(file: Path) -> None:
    book = make(file)
    for n in range(3):
        ask(book, f"run {n}", range(300))
    good = file.read_bytes()

    def refused() -> None:
        with pytest.raises(BookError, match=r"damaged|layout") as caught:
            ask(Book(str(file)), "next", range(300))
        assert "\n" not in str(caught.value)

    file.write_bytes(b"not a database at all" * 100)
    refused()
    file.write_bytes(good[: len(good) // 2])
    refused()
    middle = len(good) // 2
    file.write_bytes(good[:middle] + bytes(4096) + good[middle + 4096 :])
    refused()
    for statement in (
        "DELETE FROM dprlhf_reservations WHERE number = 2",
        "DELETE FROM dprlhf_reservations",
        "DELETE FROM dprlhf_people WHERE rowid = 1",
        "DELETE FROM dprlhf_histories",
        "UPDATE dprlhf_histories SET reservations = 'x' WHERE number = 1",
        "UPDATE dprlhf_reservations SET users = 1",
        "UPDATE dprlhf_reservations SET times = -1",
        "UPDATE dprlhf_reservations SET times = 'x'",
        "UPDATE dprlhf_reservations SET mechanism = '{' WHERE number = 1",
        "UPDATE dprlhf_reservations SET mechanism = '7' WHERE number = 1",
        "UPDATE dprlhf_reservations SET mechanism = '{}' WHERE number = 1",
        "UPDATE dprlhf_reservations SET mechanism = replace(mechanism, 'fixed', 'mixed')",
        "UPDATE dprlhf_reservations SET mechanism = replace(mechanism, '8.0', '-8.0')",
        "UPDATE dprlhf_reservations SET mechanism = replace(mechanism, '8.0', '\"8\"')",
        "DELETE FROM dprlhf_book",
        "DROP TABLE dprlhf_datasets",
        "UPDATE dprlhf_book SET version = 2",
    ):
        file.write_bytes(good)
        with sqlite3.connect(file) as connection:
            connection.execute(statement)
        connection.close()
        if "DROP" in statement:
            with pytest.raises(BookError):
                Book(str(file))
        else:
            refused()
    file.write_bytes(good)
    ask(Book(str(file)), "next", range(300))


def mark(run: str, found: Reservation) -> Mark:
    return Mark(run, found.book, found.number, found.counter)


def test_a_book_from_a_backup_is_refused(file: Path) -> None:
    book = make(file)
    marks = [mark("a", ask(book, "a", range(20)))]
    backup = file.read_bytes()
    marks.append(mark("b", ask(book, "b", range(20), marks=marks)))
    file.write_bytes(backup)
    ask(book, "c", range(20), commit=False)  # nobody told
    with pytest.raises(BookError, match="restored from a backup"):
        ask(book, "c", range(20), marks=marks)
    ask(book, "d", range(20))  # by somebody without ledgers: the counter is as high as it was
    with pytest.raises(BookError, match="older than a run's ledger"):
        ask(book, "c", range(20), marks=marks)
    ask(book, "c", range(20), marks=[Mark("x", "another book", 9, 99)])


def test_a_ledger_that_lacks_what_was_seen_is_refused(place: str) -> None:
    """By rows of the tables that each book has, so that one of before goes on as it is."""
    book = make(place)
    first = ask(book, "a", range(20))
    book.follow("a", ["open", "one"])
    book.follow("a", ["open", "one"])
    book.follow("a", ["open", "one", "two"])
    for lacking in (["open", "one"], ["open", "one", "other"]):
        with pytest.raises(BookError, match="gone on from another copy of its folder") as caught:
            book.follow("a", lacking)
        assert "\n" not in str(caught.value)
    before = spent(book)
    marks = [mark("a", ask(book, "a", range(20)))]
    assert marks == [mark("a", first)]
    ask(book, "b", range(20), marks=marks)
    book.follow("b", ["open", "else"])
    book.follow("a", ["open", "one", "two", "three"])
    found = Book(place).read()
    assert [row["name"] for row in found["reservations"]] == ["a", "b"]
    assert found["datasets"][0]["runs"] == 2
    assert spent(book)["clinic"] > before["clinic"]


def test_a_book_that_lost_a_reservation_is_named_when_its_run_goes_on(place: str) -> None:
    book = make(place)
    ask(book, "a", range(20))
    with pytest.raises(BookError, match="no reservation of this run") as caught:
        book.follow("b", ["open", "one"])
    assert "\n" not in str(caught.value)
    book.follow("a", ["open", "one"])


def test_the_counter_alone_shows_a_backup(file: Path) -> None:
    """A run that was resumed has seen a counter above that of its own reservation."""
    book = make(file)
    ask(book, "a", range(20))
    backup = file.read_bytes()
    ask(book, "b", range(20))
    seen = mark("a", ask(book, "a", range(20)))
    file.write_bytes(backup)
    with pytest.raises(BookError, match="older than a run's ledger"):
        ask(book, "a", range(20), marks=[seen])


def test_an_earlier_run_brings_its_data_set_to_whoever_pays_for_it(place: str) -> None:
    book = make(place, "small", epsilon=TWO)
    make(place, "big", epsilon=10 * THREE)
    early = Spending("early", "early", "sft", mechanism(), 1)
    ask(book, "a", range(20), "small", earlier=[early])
    with pytest.raises(DprlhfError, match="would exceed the budget of data set 'small'"):
        ask(book, "b", range(20, 40), "big", earlier=[early], mechanism=mechanism(4.0))
    ask(book, "c", range(20, 40), "big", earlier=[early])
    assert spent(book)["small"] <= TWO


def test_a_second_data_set_makes_no_new_key_for_a_book_whose_key_is_lost(file: Path) -> None:
    make(file)
    key = Path(f"{file}.key")
    key.rename(file.parent / "backup")
    with pytest.raises(BookError, match="key of the budget book is missing"):
        make(file, "ward")
    assert not key.exists()


def test_a_transaction_whose_connection_broke_is_tried_again(file, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    tried: list[int] = []

    def act(failures: int) -> int:
        tried.append(1)
        if len(tried) <= failures:
            raise BrokenOffError("x")
        return 7

    storage = make(file).storage
    assert storage.attempt(lambda: act(2)) == 7
    tried.clear()
    with pytest.raises(BrokenOffError):
        storage.attempt(lambda: act(100))
    assert len(tried) == 5
