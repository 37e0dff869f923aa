"""The tables of a budget book, the same in SQLite and PostgreSQL.

Users with the same set of reservations share one row of ``histories``, so that their joint cost is
composed once. A reservation moves each of its users to another history.
"""

from __future__ import annotations

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
"""The sets of reservations that users have."""

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
