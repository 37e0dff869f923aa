"""Where a budget book is stored: its tables, its place, its key, transactions that never overlap.

A writing transaction holds the whole book: in SQLite through ``BEGIN IMMEDIATE``, in PostgreSQL
through a lock on the book's one row. What a reservation has read is still true when it commits.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import (
    Boolean,
    Column,
    Float,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from dprlhf.budget.spending import BookError, BrokenOffError
from dprlhf.errors import extra, one_line

VERSION = 1
"""Version of the layout; a book of a later version is refused."""

METADATA = MetaData()

BOOK = Table(
    "dprlhf_book",
    METADATA,
    Column("one", Integer, primary_key=True, autoincrement=False),  # always 1: a single row
    Column("id", String, nullable=False),
    Column("version", Integer, nullable=False),
    Column("counter", Integer, nullable=False),  # rises with every change
    Column("key_check", String, nullable=False),
)
"""The book itself; writers lock its one row."""

DATASETS = Table(
    "dprlhf_datasets",
    METADATA,
    Column("name", String, primary_key=True),
    Column("epsilon", Float, nullable=False),
    Column("delta", Float, nullable=False),
    Column("unit", String),  # the user column; NULL where each row is a user
    Column("adaptive", Boolean, nullable=False),  # plans may follow from earlier runs' results
    Column("date", String, nullable=False),
)
"""The data sets and their lifetime budgets."""

RESERVATIONS = Table(
    "dprlhf_reservations",
    METADATA,
    Column("number", Integer, primary_key=True, autoincrement=False),  # 1, 2, 3, ...
    Column("run", String, nullable=False, unique=True),  # commitment to the run's key
    Column("name", String, nullable=False),
    Column("stage", String, nullable=False),
    Column("dataset", String, ForeignKey(DATASETS.c.name), nullable=False),
    Column("mechanism", String, nullable=False),  # JSON
    Column("times", Integer, nullable=False),
    Column("epsilon", Float, nullable=False),  # of this run alone, at the data set's δ
    Column("users", Integer, nullable=False),
    Column("earlier", Boolean, nullable=False),  # taken from a later run's ``previous``
    Column("date", String, nullable=False),
)
"""What each run costs every one of its users."""

HISTORIES = Table(
    "dprlhf_histories",
    METADATA,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("reservations", String, nullable=False, unique=True),  # "1,4,7", increasing
)
"""The sets of reservations that users have; those with the same set share a row: their joint cost
is composed once. A reservation moves each of its users to another row."""

PEOPLE = Table(
    "dprlhf_people",
    METADATA,
    Column("person", LargeBinary, primary_key=True),  # HMAC-SHA256 of the user's name
    Column("history", Integer, ForeignKey(HISTORIES.c.number), nullable=False, index=True),
)
"""The users, by keyed hash."""

INCOMING = Table(
    "dprlhf_incoming",
    MetaData(),
    Column("person", LargeBinary, primary_key=True),
    prefixes=["TEMPORARY"],
)
"""The users of the run that asks, for the length of one connection."""


T = TypeVar("T")

KEY_BYTES = 32
PATIENCE = 60.0
"""Seconds to wait for other runs that write to the book."""
_ATTEMPTS = 5
_IDLE = 600
"""Seconds after which PostgreSQL ends a transaction whose client hangs."""

KEY_VARIABLE = "DPRLHF_BOOK_KEY"
KEY_FILE_VARIABLE = "DPRLHF_BOOK_KEY_FILE"

_FIRST_BYTES = b"SQLite format 3\0"
"""With which every SQLite file begins."""


@dataclass(frozen=True)
class Storage:
    """A book's database."""

    engine: sa.Engine  # The database, without a pool: each transaction has a connection of its own
    label: str  # The place for messages: a path, or a URL without user and password
    path: Path | None  # The SQLite file; None for PostgreSQL

    @contextlib.contextmanager
    def transaction(self, *, write: bool, commit: bool = True) -> Iterator[sa.Connection]:
        """Yield a connection whose changes are committed at the end, all of them or none."""
        with self._one_line(), self.engine.connect() as connection:
            if self.path is not None:
                connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
            else:
                if not write:  # one snapshot, or a reader would see half of a reservation
                    connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                milliseconds = round(1000 * PATIENCE)
                for setting in (
                    f"lock_timeout = {milliseconds}",
                    f"idle_in_transaction_session_timeout = {1000 * _IDLE}",
                    "synchronous_commit = on",
                ):
                    connection.exec_driver_sql(f"SET LOCAL {setting}")
            try:
                yield connection
                self._end(connection, "COMMIT" if commit else "ROLLBACK")
            except BaseException:
                with contextlib.suppress(SQLAlchemyError):
                    self._end(connection, "ROLLBACK")
                raise

    def _end(self, connection: sa.Connection, word: str) -> None:
        if self.path is not None:
            connection.exec_driver_sql(word)
        elif word == "COMMIT":
            connection.commit()
        else:
            connection.rollback()

    def check_pages(self, connection: sa.Connection) -> None:
        """Read a SQLite file through, so that a damaged page is found before it is needed."""
        answer = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
        if answer != "ok":
            raise BookError(
                f"budget book {self.label}: damaged; restore it from its newest backup. Nothing was"
                " spent"
            )

    def attempt(self, action: Callable[[], T]) -> T:
        """Repeat a transaction that another one upset, or that lost its connection."""
        # Also where it is not known whether it committed: the action must bear that.
        for attempt in range(_ATTEMPTS):
            try:
                return action()
            except BookError as error:
                if attempt == _ATTEMPTS - 1 or not isinstance(error, BrokenOffError):
                    raise
                time.sleep(random.uniform(0, 0.2 * 2**attempt))
        raise AssertionError("the last attempt returns or raises")

    @contextlib.contextmanager
    def _one_line(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            raise problem(error, self.label) from None


def has_book(storage: Storage) -> bool:
    """Return whether a book has been made in the database."""
    with storage.transaction(write=False) as connection:
        made = sa.inspect(connection).has_table(BOOK.name)
        return made and connection.execute(sa.select(BOOK.c.id)).first() is not None


def problem(error: SQLAlchemyError, label: str) -> BookError:
    """Return the one line for a database's error; it quotes neither values nor a password."""
    cause = getattr(error, "orig", None)
    state = getattr(cause, "sqlstate", None) or ""
    text = one_line(cause if cause is not None else type(error).__name__, 200).lower()
    if "locked" in text or "busy" in text or state == "55P03":
        said = f"locked by another process for more than {PATIENCE:g} s; try again later"
    elif "readonly" in text or "read-only" in text or state in ("25006", "42501"):
        said = "read-only; a run must be able to write down what it spends"
    elif "unable to open" in text:
        said = "cannot be opened"
    elif state.startswith(("40", "57", "08")):
        return BrokenOffError(f"budget book {label}: the database broke off, try again")
    elif isinstance(error, DBAPIError) and error.connection_invalidated:
        return BrokenOffError(f"budget book {label}: the connection was lost, try again")
    elif state == "42P01" or "no such table" in text:
        said = "there is no book in it; make one with: dprlhf budget create"
    elif state.startswith("28") or "authentication" in text:
        said = "the database refuses this user or password"
    elif isinstance(error, sa.exc.ProgrammingError) and not state and "://" in label:
        said = "its URL has an option that PostgreSQL does not know"
    elif isinstance(error, sa.exc.OperationalError) and not state and "sqlite" not in text:
        said = "the database does not answer" if "://" in label else "cannot be read"
    else:
        said = f"damaged ({type(cause or error).__name__}); restore it, or ask who keeps it"
    return BookError(f"budget book {label}: {said}. Nothing was spent")


def open_storage(name: str, *, create: bool = False) -> Storage:
    """Return the database of a book."""
    if "://" not in name:
        return _sqlite(Path(name), create)
    try:
        url = make_url(name)
    except (ArgumentError, ValueError):
        raise BookError("budget book: the URL cannot be read (postgresql://HOST/NAME)") from None
    if url.get_backend_name() == "sqlite" and url.database:
        return _sqlite(Path(url.database), create)
    if url.get_backend_name() != "postgresql":
        raise BookError(
            f"budget book: {url.get_backend_name()} is not supported: give the path of a SQLite"
            " file, or postgresql://HOST/NAME"
        )
    with extra("postgres", "a budget book in PostgreSQL"):
        engine = sa.create_engine(
            url.set(drivername="postgresql+psycopg"),
            poolclass=sa.pool.NullPool,
            isolation_level="READ COMMITTED",
            hide_parameters=True,
            connect_args={"connect_timeout": 10},
        )
    host = (url.host or "localhost").rpartition("@")[2]  # a password may hold a stray @
    return Storage(engine, f"postgresql://{host}/{url.database or ''}", None)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what the system says of a file, such as that it is another account's, into one line."""
    try:
        yield
    except OSError as error:
        raise BookError(
            f"budget book: {path} cannot be read or made ({error.strerror}). Nothing was spent"
        ) from None


def _sqlite(path: Path, create: bool) -> Storage:
    with _readable(path):
        if create and not path.exists():
            if Path(f"{path}.key").exists():
                raise BookError(
                    f"budget book {path}: gone, and its key is still there. Restore the book; to"
                    " start another one, which knows nothing of what was spent, take another name"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        if not path.is_file():
            raise BookError(
                f"budget book {path}: there is no such file; make a book with: dprlhf budget"
                " create, or restore the one that was there"
            )
        with path.open("rb") as file:
            start = file.read(len(_FIRST_BYTES))
        if start not in (b"", _FIRST_BYTES):
            raise BookError(
                f"budget book {path}: no SQLite file, so no book, or a damaged one: name a book,"
                " make one with dprlhf budget create, or restore it from a backup. Nothing was"
                " spent"
            )
        check_mode(path)
    where = URL.create(
        "sqlite",
        database=f"file:{quote(str(path.absolute()))}",
        query={"mode": "rw", "uri": "true"},  # never made by accident
    )
    engine = sa.create_engine(
        where,
        poolclass=sa.pool.NullPool,
        isolation_level="AUTOCOMMIT",  # transactions are begun and ended here, in so many words
        hide_parameters=True,
        connect_args={"timeout": PATIENCE},
    )
    sa.event.listen(engine, "connect", _careful)
    return Storage(engine, str(path), path)


def _careful(connection: Any, _: Any) -> None:
    for setting in ("foreign_keys = ON", "synchronous = FULL"):
        connection.execute(f"PRAGMA {setting}")


def lock(connection: sa.Connection) -> sa.Row[Any]:
    """Lock the book's row until the transaction ends, and return it."""
    row = connection.execute(sa.select(BOOK).with_for_update()).one_or_none()
    if row is None:
        raise BookError("budget book: damaged (it has no number). Nothing was spent")
    return row


# --- the key ------------------------------------------------------------------------------------


def read_key(storage: Storage, *, create: bool = False) -> tuple[bytes, Path | None]:
    """Return the key that users are hashed with, and the file that it is from."""
    # DPRLHF_BOOK_KEY (64 hexadecimal digits), DPRLHF_BOOK_KEY_FILE, or NAME.key (SQLite).
    given = os.environ.get(KEY_VARIABLE)
    if given:
        return _from_hex(given, KEY_VARIABLE), None
    named = os.environ.get(KEY_FILE_VARIABLE)
    if named is None and storage.path is None:
        raise BookError(
            f"budget book {storage.label}: its key is missing; name its file in"
            f" {KEY_FILE_VARIABLE}, or give its {2 * KEY_BYTES} hexadecimal digits in"
            f" {KEY_VARIABLE}"
        )
    path = Path(named) if named else Path(f"{storage.path}.key")
    with _readable(path):
        if create and not path.exists():
            _write_key(path)
        if not path.is_file():
            raise BookError(
                f"{path}: the key of the budget book is missing; without it nobody can tell who its"
                " users are. Restore it from a backup"
            )
        check_mode(path)
        return _from_hex(path.read_text("utf-8", errors="replace").strip(), str(path)), path


def _write_key(path: Path) -> None:
    """Write a new key to a file; another process that was first has made it already."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(KEY_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)  # whole or not at all
        fresh.unlink()
    except OSError as error:
        raise BookError(f"{path}: {error.strerror}") from None


def check_mode(path: Path) -> None:
    """Refuse a file that everybody on the machine can read."""
    if path.stat().st_mode & 0o007:
        raise BookError(f"{path}: everybody can read it, and it is secret: chmod 600 {path}")


def _from_hex(text: str, place: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise BookError(f"{place}: not a key ({2 * KEY_BYTES} hexadecimal digits)")
    return key
