"""Many users and rounds: memory a user, and work a round, do not grow.

Memory is what Python and Arrow allocate and work is the number of bytecodes, so nothing here
depends on the machine. ``scripts/scaling_results.py`` takes the times.
"""

import ctypes
import math
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pytest

from dprlhf.boundary import open_private
from dprlhf.data.loading import load_rows
from dprlhf.data.names import user_codes
from dprlhf.data.users import Users
from dprlhf.privacy.ledger import Ledger
from dprlhf.privacy.partition import allocate
from dprlhf.privacy.plan import Plan, make_plan
from dprlhf.recipe import Data

USERS, ROUNDS, LEDGER = 200_000, 2_000, 1_000
MECHANISM: dict[str, Any] = {"noise_multiplier": 0.8, "clip_norm": 1.0, "releases_per_round": 1}


def plan(users: int, kind: str = "random-allocation", epsilon: float = math.inf) -> Plan:
    return make_plan(
        users=users, rounds=ROUNDS, delta=1e-7, epsilon=epsilon, partition=kind  # type: ignore[arg-type]
    )  # fmt: skip


class Bytes(NamedTuple):
    python: int
    arrow: int
    held: int

    @property
    def peak(self) -> int:
        """The most at once, or more: the two need not have their peaks together."""
        return self.python + self.arrow


def bytes_of(action: Callable[[], Any]) -> Bytes:
    """Return the bytes of Python and of Arrow at their peaks, and those that the result keeps."""
    default = pa.default_memory_pool()
    arrow = pa.proxy_memory_pool(default)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(arrow))  # it must outlive what it allocates
    pa.set_memory_pool(arrow)
    tracemalloc.start()
    try:
        kept = action()
        held, python = tracemalloc.get_traced_memory()
        held += arrow.bytes_allocated()
        del kept
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(default)
    return Bytes(python, arrow.max_memory(), held)


def bytecodes(action: Callable[[], object]) -> int:
    """Return how many bytecodes run: the work, but for loops inside C."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("kind", ["random-allocation", "poisson", "fixed", "stream"])
def test_a_partition_takes_below_200_bytes_a_user(kind: str) -> None:
    allocate(plan(ROUNDS, kind), bytes(32))  # modules that it needs first
    taken = bytes_of(lambda: allocate(plan(USERS, kind), bytes(32)))
    assert taken.peak / USERS < 200
    assert taken.held / USERS < 20  # one 64-bit index a user, and where each round starts
    twice = bytes_of(lambda: allocate(plan(2 * USERS, kind), bytes(32)))
    assert twice.peak < 2.1 * taken.peak


def test_a_round_of_the_partition_is_a_view_whatever_the_number_of_users() -> None:
    allocation = open_private(allocate(plan(USERS), bytes(32)))
    small = open_private(allocate(plan(ROUNDS), bytes(32)))
    assert np.shares_memory(allocation.round(ROUNDS // 2), allocation.order)
    assert bytecodes(lambda: allocation.round(ROUNDS)) == bytecodes(lambda: small.round(ROUNDS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prompt dataset on disk: 36 bytes of name and 200 of prompt a user, out of order."""
    made = tmp_path_factory.mktemp("rows")
    numbers = np.random.default_rng(0).permutation(USERS).tolist()
    table = pa.table(
        {
            "user": [f"{n:08x}-0000-4000-8000-{n:012x}" for n in numbers],
            "prompt": [str(n).ljust(200, "x") for n in numbers],
        }
    )
    datasets.disable_progress_bars()
    datasets.Dataset(table).save_to_disk(made)
    return made


@pytest.mark.slow
def test_grouping_by_a_column_takes_below_200_bytes_a_user(folder: Path) -> None:
    data = Data(path=str(folder), user_column="user")
    rows = load_rows(data)
    numbering = bytes_of(lambda: user_codes(rows, data))
    made = bytes_of(lambda: Users(rows, data))
    assert numbering.peak / USERS < 200
    assert numbering.held / USERS < 10  # no name is kept, so what follows is Python's alone
    assert made.python / USERS < 200
    assert made.held / USERS < 30
    half = rows.select(range(USERS // 2))
    assert made.peak < 2.2 * bytes_of(lambda: Users(half, data)).peak


@pytest.mark.slow
def test_prompts_are_streamed_from_disk(folder: Path) -> None:
    data = Data(path=str(folder), user_column="user")
    made = Users(load_rows(data), data)
    some = np.random.default_rng(1).choice(USERS, 100, replace=False)
    for action in (lambda: load_rows(data), lambda: made.select(some), made.digest):
        assert bytes_of(action).peak < 4e6  # of 47 MB on disk
    assert len(set(made.select(some).prompts)) == len(some)


@pytest.mark.slow
def test_a_round_costs_the_ledger_the_same_at_the_end_as_at_the_start(tmp_path: Path) -> None:
    path, terms = tmp_path / "ledger.jsonl", {"rounds": LEDGER, **MECHANISM}
    ledger = Ledger(path, terms)

    def rounds(first: int, last: int) -> None:
        for t in range(first, last + 1):
            assert ledger.next_round == t
            assert t not in ledger.charged
            ledger.charge(t, **MECHANISM)
            ledger.commit(t)

    def reopen() -> None:
        nonlocal ledger
        ledger.close()
        ledger = Ledger(path, terms)
        ledger.confirm(ledger.next_round - 1)

    early = bytecodes(lambda: rounds(1, 1))
    rounds(2, 250)
    reading, size = bytecodes(reopen), path.stat().st_size
    rounds(251, 500)
    assert bytecodes(reopen) < 2.1 * reading
    held = bytes_of(lambda: rounds(501, LEDGER - 1)).held
    assert bytecodes(lambda: rounds(LEDGER, LEDGER)) == early
    assert path.stat().st_size < 1.1 * LEDGER / 250 * size
    assert held / LEDGER < 4000
    ledger.close()
