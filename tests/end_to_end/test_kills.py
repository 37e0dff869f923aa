"""SIGKILL at named points and in between, once or twice, then resume: nothing promised is broken.

What each life must leave is in ``kills.py``. Damaged, cut and full files are in ``test_folder.py``
and ``test_ledger.py``; a dead process of several is in ``test_processes.py``.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from helpers import commands, kills

pytestmark = pytest.mark.slow

CASES: list[dict[str, Any]] = [
    {"kill": [["point", "ledger opened", 1]]},
    {"kill": [["point", "noise drawn", 2]]},
    {"kill": [["point", "before the commit", 2]]},
    {"kill": [["point", "a rename done", 7]]},  # between the two of a checkpoint
    {"kill": [["point", "after the charge", 1], ["point", "released", 1]]},
    {"kill": [["call", 0.9], ["call", 0.3]]},
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kills")
    done = commands.python(kills.__file__, str(folder), text=json.dumps(CASES), timeout=540)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def test_no_kill_breaks_a_promise(killed: Path) -> None:
    report = json.loads((killed / "report.json").read_text())
    assert len(report) == len(CASES)
    assert {case: wrong for case, wrong in report.items() if wrong} == {}


def test_lives_end_where_they_should(killed: Path) -> None:
    """The cases are what they say: rounds were lost where the charge came before the end."""

    def rounds(number: int, kind: str) -> list[int]:
        entries = kills.read_ledger(killed / f"run-{number}" / "ledger.jsonl")
        return [e.body["round"] for e in entries if e.kind == kind]

    assert rounds(0, "commit") == [1, 2, 3]
    assert rounds(1, "charge") == [1, 2, 3]
    assert rounds(1, "commit") == [1, 3]
    assert rounds(2, "commit") == [1, 2, 3]
    assert rounds(4, "charge") == [1, 2, 3]
    assert rounds(4, "commit") == [3]


def forge(change: Callable[[list[Any]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        notes = folder / "whole-notes"
        events = [json.loads(line) for line in notes.read_text().splitlines()]
        change(events)
        notes.write_text("".join(json.dumps(event) + "\n" for event in events))

    return apply


def reused_noise(events: list[Any]) -> None:
    events.append(["noise", events[0][1], "another sum", []])


def user_drawn_twice(events: list[Any]) -> None:
    events[1][3].append(events[0][3][0])


def round_released_twice(events: list[Any]) -> None:
    first = events[0]
    events.append(["noise", [*first[1][:3], "another charge", 0], first[2], first[3]])


def lowered_epsilon(folder: Path) -> None:
    card = folder / "whole/privacy.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "epsilon": 7.0}))


def lost_line(folder: Path) -> None:
    ledger = folder / "whole/ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[:-2]))


def moved_policy(folder: Path) -> None:
    path = folder / "whole/checkpoint/policy.safetensors"
    save_file({name: w + 1e-3 for name, w in load_file(path).items()}, path)


def metrics_written_twice(folder: Path) -> None:
    path = folder / "whole/metrics.jsonl"
    path.write_text(path.read_text() * 2)


SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "nothing": (lambda folder: None, ""),
    "reused noise": (forge(reused_noise), "a noise key served two sums"),
    "user drawn twice": (forge(user_drawn_twice), "a user is in two rounds"),
    "round released twice": (forge(round_released_twice), "more releases than charged for"),
    "lowered epsilon": (lowered_epsilon, "states epsilon 7.0"),
    "lost line": (lost_line, "noise without a charge"),
    "moved policy": (moved_policy, "the policy is not that of an undisturbed run"),
    "metrics written twice": (metrics_written_twice, "a round has two lines"),
}


@pytest.mark.parametrize("bug", SPOILT)
def test_the_verdict_sees(bug: str, killed: Path, tmp_path: Path) -> None:
    import shutil

    for name in ("whole", "whole-notes", "whole-output"):
        source = killed / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    whole = {"weights": load_file(killed / "whole/checkpoint/policy.safetensors")}
    spoil, expected = SPOILT[bug]
    spoil(tmp_path)
    wrong = kills.verdict(tmp_path, "whole", 0, whole)
    assert any(expected in line for line in wrong) if expected else wrong == []
