"""Both kinds of budget book: a SQLite file, and a PostgreSQL server of the tests' own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers import postgres


@pytest.fixture(scope="session")
def databases() -> Iterator[Callable[[], str]]:
    if reason := postgres.missing():
        pytest.skip(reason)
    with postgres.server() as new:
        yield new


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "book.db")
    monkeypatch.setenv("DPRLHF_BOOK_KEY_FILE", str(tmp_path / "key"))
    new: Callable[[], str] = request.getfixturevalue("databases")
    return new()
