"""No canary leaves ``secret/``, whatever happens; planted leaks are found; sizes tell nothing."""

import contextlib
import functools
import itertools
import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tqdm.auto import tqdm

import dprlhf
from dprlhf.boundary import Private
from dprlhf.rewards.isolation import captured
from dprlhf.training.guidance import Guidance
from dprlhf.training.progress import Progress, _tell_the_time
from dprlhf.training.reinforcement import Reinforcement
from helpers import commands, leaks, tiny
from helpers.runs import run_settings

pytestmark = pytest.mark.slow

SILENT = ["a-careless-reward", *leaks.BAD_DATA, *leaks.CARRIED_ON, *leaks.FAILURES]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("leaks")
    done = commands.python(leaks.__file__, str(folder), timeout=540)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.parametrize("name", SILENT)
def test_no_canary_is_outside_secret(name: str, runs: Path) -> None:
    assert leaks.search(runs / name) == []


@pytest.mark.parametrize("name", leaks.PLANTED)
def test_a_planted_leak_is_found(name: str, runs: Path) -> None:
    assert leaks.PLANTED[name][1] <= set(leaks.search(runs / name))


def test_the_canaries_were_there(runs: Path) -> None:
    """The runs went as far as they should, and secret/ holds what the search would have found."""
    status = {name: (runs / name / "status").read_text() for name in (*SILENT, *leaks.PLANTED)}
    assert {n for n, s in status.items() if s == "2"} == {"a-row-without-a-user", *leaks.FAILURES}
    assert {n for n, s in status.items() if s == "1"} == {"an-exception-with-its-text"}
    said = (runs / "a-careless-reward/run/secret/reward-output.txt").read_text()
    for text in ("scoring", "odd prompts", "cannot score", leaks.TEXT):
        assert text in said
    for name in leaks.FAILURES:
        assert leaks.TEXT in (runs / name / "run/secret/error.txt").read_text()


ANOTHER_EACH_TIME = (
    "dprlhf: time ",  # a measurement on public rows
    "dprlhf: warning: the released gradients of all rounds",  # follows from noised values
)


def shape(folder: Path, name: str) -> dict[str, Any]:
    """Return all of a run's public sizes: files, lines, keys, and the lines on the terminal."""
    found: dict[str, Any] = {}
    for path in sorted((folder / name / "run").rglob("*")):
        inside = path.relative_to(folder / name / "run")
        if path.is_dir() or "secret" in inside.parts:
            continue
        content = path.read_bytes()
        if inside.name == "metrics.jsonl":  # noised numbers have as many digits as they have
            found["metrics"] = [sorted(json.loads(line)) for line in content.splitlines()]
        else:
            found[str(inside)] = len(content.replace(name.encode(), b""))
    output = (folder / name / "output").read_text().replace(name, "")
    found["output"] = [
        line
        for line in re.split(r"[\r\n]", output)
        if line and "|" not in line and not line.startswith(ANOTHER_EACH_TIME)
    ]
    return found


def test_sizes_lines_and_keys_do_not_depend_on_the_data(runs: Path) -> None:
    one, other = shape(runs, "a-careless-reward"), shape(runs, "other-data")
    assert len(one) > 10
    lines, others = one.pop("output"), other.pop("output")
    assert [line for line in lines if line not in others] == []
    assert lines == others
    assert one == other


FRAMES = re.compile(  # public work, before the first round or after the last
    r"(evaluation|scoring|Writing model shards|Loading weights)[^|]*\|[^|]*\|.*"
)


@pytest.mark.parametrize("name", ["a-careless-reward", "other-data"])
def test_a_log_has_no_bar_of_private_work(name: str, runs: Path) -> None:
    output = re.sub(r"\x1b\[A", "\r", (runs / name / "output").read_text())
    frames = [f.rstrip() for f in re.split(r"[\r\n]", output) if "|" in f]
    assert [f for f in frames if not FRAMES.fullmatch(f)] == []
    assert "dprlhf: rounds 1 to 2; until they have ended lines come by the clock" in output


def shown(monkeypatch: pytest.MonkeyPatch, capsys: Any, users: int, *, terminal: bool) -> str:
    """Return what a round of so many users shows, two rows each, in micro-batches of 8 rows."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    every_step = functools.partial(tqdm, mininterval=0)  # not one frame in a tenth of a second
    monkeypatch.setattr("dprlhf.training.progress.tqdm", every_step)
    with Progress(2).round(1) as bar:
        for phase in ("sampling", "gradients"):
            bar.start(phase, Private(np.zeros(users)))
            for done in range(0, 2 * users, 8):
                bar.tick(min(8, 2 * users - done))
    return str(capsys.readouterr().err)


def test_a_log_does_not_show_how_many_users_a_round_has(monkeypatch, capsys):
    """In tens of percent 11 users show 30, 70, 100 and 12 users 30, 60, 100."""
    logs = {shown(monkeypatch, capsys, users, terminal=False) for users in (0, 1, 11, 12, 97)}
    assert logs == {""}


def test_a_log_gets_no_line_between_the_first_round_and_the_last(monkeypatch, capsys):
    """Not even of public work: a collector's time of that line is when the round before ended."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    every_step = functools.partial(tqdm, mininterval=0)
    monkeypatch.setattr("dprlhf.training.progress.tqdm", every_step)

    def evaluation(when: str) -> str:
        with progress.bar(f"evaluation {when}", 4) as tick:
            tick(4)
        return str(capsys.readouterr().err)

    progress = Progress(1)
    progress.expect(90.0)
    progress.total(2, done=0)
    assert "rounds 1 to 2" in capsys.readouterr().err
    for t in (1, 2):
        with progress.round(t) as bar:
            bar.start("sampling", Private(np.zeros(3)))
            bar.tick(3)
            assert evaluation(f"after round {t}") == ""
            progress.show({"public_reward": 1.0})
        assert capsys.readouterr().err == ""
    progress.close()


def test_lines_in_a_log_come_by_the_clock_alone(monkeypatch, capfd):
    """At fixed times, and also while what user code prints is kept secret."""
    monkeypatch.setattr("dprlhf.training.progress.time.monotonic", lambda: 1000.0)
    waited: list[float] = []
    with contextlib.ExitStack() as stack:

        class Clock(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                waited.append(timeout or 0.0)
                if len(waited) == 1:
                    stack.enter_context(captured(None))
                return len(waited) > 2

        _tell_the_time(Clock(), 5400.0)
    assert waited == [600.0, 1200.0, 1800.0]  # from the start: a late line delays no other
    of = "of about 90 minutes, by public rows"
    assert capfd.readouterr().err == f"dprlhf: 10 minutes {of}\ndprlhf: 20 minutes {of}\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_log_gets_no_line_of_the_users_own_code_between_rounds(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """A tool or a metric prints of public rows as it is called, in the middle of a run."""

    def printing(owner: type, method: str) -> None:
        inner = getattr(owner, method)

        def called(*given: Any, **named: Any) -> Any:
            print(f"{method} to stdout")
            os.write(2, f"{method} to stderr\n".encode())
            return inner(*given, **named)

        monkeypatch.setattr(owner, method, called)

    printing(Reinforcement, "public_metrics")
    printing(Guidance, "_fit")
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    public = tmp_path / "public.csv"
    public.write_text("prompt\n" + "".join(f"public {i}\n" for i in range(12)))
    dprlhf.train(
        **run_settings(str(tiny.save(tmp_path / "model")), rounds=2),
        evaluation={"data": {"path": str(public)}, "prompts": 4, "every": 1},
        update__subspace={"rank": 1, "prompts": 4},
        output_dir=tmp_path / "run",
    )
    captured = capfd.readouterr()
    counts = [
        getattr(captured, stream).count(f"{method} to {kind}")
        for method in ("public_metrics", "_fit")
        for stream, kind in (("out", "stdout"), ("err", "stderr"))
    ]
    assert counts == ([1, 1, 2, 2] if terminal else [0] * 4)


def test_a_terminal_shows_tens_of_percent_only(monkeypatch, capsys):
    percents = re.findall(r"(\d+)%", shown(monkeypatch, capsys, 97, terminal=True))
    assert len(percents) > 2
    assert all(int(p) % 10 == 0 for p in percents)


def test_the_time_left_is_not_from_the_clock_of_private_rounds(monkeypatch, capsys):
    """A slow round is a large one: what is left is told from public prompts, or not at all."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    clock = itertools.count(step=10_000)
    monkeypatch.setattr("dprlhf.training.progress.time.perf_counter", lambda: float(next(clock)))
    left = {}
    for expected in (None, 90.0):
        progress = Progress(1)
        if expected is not None:
            progress.expect(expected)
        progress.total(3, done=0)
        for number in range(3):
            with progress.round(number) as bar:
                bar.start("update", Private(np.zeros(2)))
                bar.tick(2)
        progress.close()
        left[expected] = re.findall(r"left=about (\d+) min", capsys.readouterr().err)
    assert left[None] == []
    assert list(dict.fromkeys(left[90.0])) == ["3", "2", "0"]
