"""The planted bugs of ``tests/mutants``: each still fits the source, and some are planted here.

``make mutants`` plants them all; ``tests/mutants/README.md`` says which test caught which.
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


def test_lines_are_looked_for_in_their_function_only(tmp_path: Path) -> None:
    source = """class A:
    @property
    def f(self):
        return 1

    def g(self):
        return 1


def f():
    def g():
        return 1
    return 2
"""
    (tmp_path / "src/room").mkdir(parents=True)
    (tmp_path / "src/room/__init__.py").write_text(source)
    for place, index in (("A.f", 0), ("A.g", 1), ("f", 2), ("f.g", 2)):
        (tmp_path / "m.diff").write_text(
            f"# Bug.\n# tests: test_a.py\n@@ room.{place}\n-        return 1\n+        return 5\n"
        )
        changed = mutants.read_mutant(tmp_path / "m.diff").applied(tmp_path)
        pieces = source.split("return 1")
        expected = (
            "return 1".join(pieces[: index + 1]) + "return 5" + "return 1".join(pieces[index + 1 :])
        )
        assert changed == {"src/room/__init__.py": expected}


def test_hunks_of_one_file_are_found_in_the_unchanged_one(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("def f():\n    if x:\n        y\n        z\n")
    head = "# Bug.\n# tests: test_a.py\n"
    hunks = "@@ a.f\n-        z\n+    z\n@@ a.f\n-    if x:\n-        y\n"
    (tmp_path / "m.diff").write_text(head + hunks)
    changed = mutants.read_mutant(tmp_path / "m.diff").applied(tmp_path)
    assert changed == {"src/a.py": "def f():\n    z\n"}
    (tmp_path / "m.diff").write_text(head + "@@ a.f\n-        y\n-        z\n@@ a.f\n-        z\n")
    with pytest.raises(mutants.MutantError, match="two hunks"):
        mutants.read_mutant(tmp_path / "m.diff").applied(tmp_path)


def test_a_test_file_is_found_wherever_it_is() -> None:
    assert mutants.test_file("test_mutants.py") == "tests/repo/test_mutants.py"
    assert mutants.test_file("repo/test_mutants.py") == "tests/repo/test_mutants.py"
    assert mutants.test_file("test_nothing.py") == "tests/test_nothing.py"


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


@pytest.mark.slow
def test_planted_bugs_are_caught_and_the_source_is_not(tmp_path: Path) -> None:
    """One of a test file, which also runs on the source, each in a process of its own."""
    import subprocess

    done = subprocess.run(
        [sys.executable, mutants.__file__, "--hints-only", "--jobs", "1",
         "--cache", str(tmp_path / "found.json"), "--only", "charge-not-durable"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "1 of 1 caught; the unchanged source fails in 0 files" in done.stdout, done.stdout
    assert done.returncode == 0, done.stdout
