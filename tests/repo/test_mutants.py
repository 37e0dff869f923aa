"""The planted bugs of ``tests/mutants``: each still fits the source, and some are planted here.

``make mutants`` plants them all; ``tests/mutants/README.md`` says how to plant one.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import mutants

ALL = mutants.read_mutants()


def test_there_are_enough_and_none_is_there_twice() -> None:
    assert len(ALL) >= 40
    assert len({m.bug for m in ALL}) == len({m.changes for m in ALL}) == len(ALL)


@pytest.mark.parametrize("mutant", ALL, ids=lambda m: m.name)
def test_it_fits_the_source(mutant: mutants.Mutant) -> None:
    for path, source in mutant.applied(mutants.ROOT).items():
        compile(source, path, "exec")
    assert all((mutants.ROOT / name.split("::")[0]).is_file() for name in mutant.tests)


def test_what_no_longer_fits_is_an_error(tmp_path: Path) -> None:
    module = tmp_path / "src/room/a.py"
    module.parent.mkdir(parents=True)
    module.write_text("x = 1\nx = 1\n")
    for place, line, message in (
        ("room.a", "x = 1", "2 times"),
        ("room.a", "x = 2", "0 times"),
        ("room.a.f", "x = 1", "0 times"),
        ("rooms.a", "x = 1", "no such module"),
    ):
        (tmp_path / "m.diff").write_text(f"# Bug.\n# tests: test_a.py\n@@ {place}\n-{line}\n+y\n")
        with pytest.raises(mutants.MutantError, match=message):
            mutants.read_mutant(tmp_path / "m.diff").applied(tmp_path)


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ({"test": "t", "when": "call", "error": "AssertionError"}, "caught"),
        ({"test": "t", "when": "setup", "error": "DprlhfError"}, "caught"),
        ({"test": "t", "when": "call", "error": "NameError: x"}, "broken"),
        ({"test": "t", "when": "collect", "error": ""}, "broken"),
        ({"test": "", "when": "", "error": "pytest exit 4"}, "broken"),
        ({"test": "", "when": "", "error": ""}, "alive"),
        ({"test": "", "when": "", "error": "", "timeout": True}, "not in time"),
    ],
)
def test_only_a_failing_test_counts(report: dict[str, str], expected: str) -> None:
    assert mutants.outcome(report) == expected


@pytest.mark.slow
def test_planted_bugs_are_caught_and_the_source_is_not(tmp_path: Path) -> None:
    """One of a test file, which also runs on the source, each in a process of its own."""
    import subprocess

    done = subprocess.run(
        [sys.executable, mutants.__file__, "--jobs", "1",
         "--cache", str(tmp_path / "found.json"), "--only", "charge-not-durable"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "1 of 1 caught; the unchanged source fails in 0 files" in done.stdout, done.stdout
    assert done.returncode == 0, done.stdout
