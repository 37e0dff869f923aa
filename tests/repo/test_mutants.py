"""The planted bugs of ``tests/mutants``: each still fits the source, and some are planted here.

``make mutants`` plants them all; ``docs/mutants.md`` says which test caught which.
"""

from __future__ import annotations

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
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    for line, message in (("x = 1", "2 times"), ("x = 2", "0 times")):
        (tmp_path / "m.diff").write_text(f"# Bug.\n# tests: test_a.py\n@@ a.py\n-{line}\n+y\n")
        with pytest.raises(mutants.MutantError, match=message):
            mutants.read_mutant(tmp_path / "m.diff").applied(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# Bug.\n@@ a.py\n-x\n+y\n",
        "# Bug.\n# tests: test_a.py\n",
        "# Bug.\n# tests: test_a.py\n@@ a.py\n x\n",
        "# Bug.\n# tests: test_a.py\n@@ a.py\nx\n",
    ],
)
def test_a_file_of_another_form_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "m.diff").write_text(text)
    with pytest.raises(mutants.MutantError, match=r"m\.diff"):
        mutants.read_mutant(tmp_path / "m.diff")


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


def test_planted_bugs_are_caught_and_the_source_is_not(tmp_path: Path) -> None:
    """Three of them, each against the first test file that it names, in processes of their own."""
    import subprocess

    chosen = ["one-release-too-many", "charge-not-durable", "shuffle-for-allocation"]
    done = subprocess.run(
        [sys.executable, mutants.__file__, "--hints-only", "--jobs", "1",
         "--cache", str(tmp_path / "found.json"), "--only", *chosen],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "3 of 3 caught; the unchanged source fails in 0 files" in done.stdout, done.stdout
    assert done.returncode == 0, done.stdout
