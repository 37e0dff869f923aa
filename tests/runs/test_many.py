"""Many measurements side by side: kept as they end, and stopped with the call that asked."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dprlhf.runs.measurements import run_missing
from helpers.marks import slow

CALLER = """
import os, sys, time
from pathlib import Path
from dprlhf.runs.measurements import run_missing

def work(place):
    Path(place).write_text(str(os.getpid()))
    time.sleep(120)

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    jobs = {folder / f"{i}.json": (str(folder / f"{i}.pid"),) for i in range(2)}
    run_missing(work, jobs, side_by_side=2, quiet=True)
"""


def double(value: int) -> int:
    return 2 * value


@pytest.mark.parametrize("side_by_side", [1, slow(2)])
def test_what_is_missing_is_run_and_kept(tmp_path: Path, side_by_side: int) -> None:
    jobs = {tmp_path / f"{value}.json": (value,) for value in range(3)}
    (tmp_path / "1.json").write_text("100")
    found = run_missing(double, jobs, side_by_side=side_by_side, quiet=True)
    assert list(found.values()) == [0, 100, 4]
    assert json.loads((tmp_path / "2.json").read_text()) == 4
    (tmp_path / "0.json").unlink()
    assert list(run_missing(double, jobs, write_only=True, quiet=True)) == [*jobs][1:]


def alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended may wait for its parent to ask."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc")
def test_a_killed_call_leaves_nobody_at_work(tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    with subprocess.Popen([sys.executable, str(script), str(tmp_path)]) as caller:
        files = [tmp_path / "0.pid", tmp_path / "1.pid"]
        deadline = time.monotonic() + 60
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        workers = [int(file.read_text()) for file in files]
        assert all(map(alive, workers))
        caller.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(map(alive, workers)):
        if time.monotonic() > deadline:
            for worker in filter(alive, workers):
                os.kill(worker, signal.SIGKILL)
            pytest.fail("a worker went on without its caller")
        time.sleep(0.1)
