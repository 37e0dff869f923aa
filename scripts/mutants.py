"""Planted bugs: each file of ``tests/mutants`` must be caught by a test.

A mutant is a small change to ``src/dprlhf`` or ``papers`` that breaks the privacy guarantee. It is
applied to a copy of both, never to the tree, and the tests that it names run on that copy, up to
the first failure. ``docs/results/attack.json`` says how many are caught.

A test that breaks on its way (a NameError and the like, a failing import) has caught nothing; nor
has one that does not end in time. The test files that caught one run on the unchanged source, too,
as a control.

    python scripts/mutants.py [--jobs 2] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import hashlib
import importlib
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "mutants"
RESULTS = ROOT / "docs" / "results" / "attack.json"
CONTROL = "unchanged source"
HOMES = {"dprlhf": "src", "papers": "."}
"""The packages that mutants change, and the folders that they are in."""


class MutantError(Exception):
    """A mutant is not of the form that is asked for, or the source no longer matches it."""


@functools.cache
def test_file(name: str) -> str:
    """Return the path of a test file below the root, wherever below ``tests`` it is.

    Raises:
        MutantError: there are several of that name.
    """
    found = sorted((ROOT / "tests").rglob(name))
    if len(found) > 1:
        raise MutantError(f"{name}: several test files are called so; give the folder, too")
    return str(found[0].relative_to(ROOT)) if found else f"tests/{name}"


BROKEN = ("ImportError", "ModuleNotFoundError", "SyntaxError", "NameError", "UnboundLocalError")
"""A mutant that raises one of these was badly planted: no test has caught a privacy bug."""


def address(name: str, root: Path) -> tuple[str, str]:
    """Split ``dprlhf.room.module.Class.function`` into the file and ``Class.function``.

    Raises:
        MutantError: no module has this name.
    """
    parts = name.split(".")
    home = Path(HOMES.get(parts[0], "src"))
    for n in range(len(parts), 0, -1):
        for file in (
            home.joinpath(*parts[:n]).with_suffix(".py"),
            home.joinpath(*parts[:n], "__init__.py"),
        ):
            if (root / file).is_file():
                return str(file), ".".join(parts[n:])
    raise MutantError(f"{name}: no such module")


def spans(source: str, name: str) -> list[tuple[int, int]]:
    """Return where a function or class is in a file, as offsets; "" is the whole file.

    One name may be there several times, as a property and its setter.
    """
    return _spans(source).get(name, []) if name else [(0, len(source))]


@functools.cache  # most files have several mutants
def _spans(source: str) -> dict[str, list[tuple[int, int]]]:
    starts = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
    found: dict[str, list[tuple[int, int]]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                dotted = f"{prefix}{child.name}"
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                span = (starts[first - 1], starts[child.end_lineno or first])
                found.setdefault(dotted, []).append(span)
                visit(child, f"{dotted}.")
            else:
                visit(child, prefix)

    visit(ast.parse(source), "")
    return found


@dataclass(frozen=True)
class Mutant:
    """A planted bug.

    Attributes:
        name: of its file.
        bug: in a sentence.
        tests: files of ``tests`` that should catch it, the likeliest first.
        changes: function as ``module.Class.function`` (or module, or class), lines that stand
            in it once, lines in their place.
    """

    name: str
    bug: str
    tests: tuple[str, ...]
    changes: tuple[tuple[str, str, str], ...]

    def applied(self, root: Path) -> dict[str, str]:
        """Return the changed files, by path below the root.

        Raises:
            MutantError: lines that it changes are not in their function exactly once.
        """
        edits: dict[str, list[tuple[int, str, str]]] = {}
        for place, old, new in self.changes:
            file, function = address(place, root)
            source = (root / file).read_text()
            at = [
                start + match.start()
                for start, end in spans(source, function)
                for match in re.finditer(re.escape(old), source[start:end])
            ]
            if len(at) != 1:
                raise MutantError(
                    f"{self.name}: {place} has these lines {len(at)} times, not once;"
                    f" write the mutant anew:\n{old}"
                )
            edits.setdefault(file, []).append((at[0], old, new))
        files = {}
        for file, of_file in edits.items():
            source, before = (root / file).read_text(), len((root / file).read_text())
            for start, old, new in sorted(of_file, reverse=True):
                if start + len(old) > before:
                    raise MutantError(f"{self.name}: two hunks change the same lines of {file}")
                source, before = source[:start] + new + source[start + len(old) :], start
            files[file] = source
        return files


def read_mutant(path: Path) -> Mutant:
    """Read a mutant: two lines of comment (the bug, its tests), then hunks as in a diff.

    A hunk starts with ``@@ dprlhf.privacy.gate.Gate.release``, the function that it changes, so
    that a mutant does not mind where the function's file or its other lines go. A test file needs
    no folder either, where its name is the only one.

    Raises:
        MutantError: it is not of this form.
    """
    lines = path.read_text().splitlines()
    head, body = lines[:2], lines[2:]
    if len(head) < 2 or not head[0].startswith("# ") or not head[1].startswith("# tests: "):
        raise MutantError(f"{path.name}: starts with '# the bug.' and '# tests: test_….py …'")
    changes: list[tuple[str, str, str]] = []
    for line in body:
        mark, text = line[:1], line[1:] + "\n"
        if line.startswith("@@ "):
            changes.append((line[3:], "", ""))
        elif changes and mark in (" ", "-", "+"):
            file, old, new = changes[-1]
            changes[-1] = (file, old + text * (mark != "+"), new + text * (mark != "-"))
        else:
            raise MutantError(f"{path.name}: '{line}' is no line of a hunk")
    if not changes or any(not old or old == new for _, old, new in changes):
        raise MutantError(f"{path.name}: a hunk changes nothing, or there is none")
    named = [name.partition("::") for name in head[1].removeprefix("# tests: ").split()]
    tests = tuple(test_file(file) + mark + test for file, mark, test in named)
    return Mutant(path.stem, head[0].removeprefix("# "), tests, tuple(changes))


def read_mutants(folder: Path = FOLDER) -> list[Mutant]:
    """Read all mutants, in order of their names."""
    return [read_mutant(path) for path in sorted(folder.glob("*.diff"))]


@contextlib.contextmanager
def planted(mutant: Mutant | None, root: Path = ROOT) -> Iterator[Path]:
    """Give a copy of the packages with the mutant in it (None: as they are)."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="mutant-", dir=memory) as folder:
        copy = Path(folder)
        for name in ("src", "papers"):
            shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path, source in (mutant.applied(root) if mutant else {}).items():
            (copy / path).write_text(source)
        yield copy


# --- running ---------------------------------------------------------------------------------


ALWAYS = ("hypothesis", "pydantic", "pytest", "torch", "yaml")
FOR_MANY = (
    "accelerate", "datasets", "dp_accounting.pld.privacy_loss_distribution", "matplotlib.pyplot",
    "opacus", "pandas", "peft", "tokenizers", "tqdm", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama", "typer.testing",
)  # fmt: skip


def preload(tasks: int) -> None:
    """Import the libraries once, here: each mutant's tests run in a fork. Never ``dprlhf``.

    A few tests import less by themselves than many together.
    """
    for name in ALWAYS + FOR_MANY * (tasks > 8):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert not any(name.split(".")[0] == "dprlhf" for name in sys.modules)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:] if log.exists() else ""


@dataclass(frozen=True)
class Task:
    """Some tests against a mutant, or (None) against the source as it is."""

    name: str
    mutant: Mutant | None
    tests: tuple[str, ...]

    @property
    def key(self) -> str:
        """What the verdict depends on: the tests, and the files that change, or all of src."""
        state = hashlib.sha256()
        if self.mutant is None:
            files = sorted(p for name in ("src", "papers") for p in (ROOT / name).rglob("*.py"))
            sources = {str(p): p.read_text() for p in files}
        else:
            sources = self.mutant.applied(ROOT)
        sources |= {name: (ROOT / name.partition("::")[0]).read_text() for name in self.tests}
        for path, source in sorted(sources.items()):
            state.update(f"{path}\n{source}".encode())
        return state.hexdigest()


def _error_of(report: Any) -> str:
    """Return the first line of what a failed test says, which starts with the exception's type."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message).split("\n")[0][:120] if crash else ""


class Verdict:
    """A pytest plugin that writes down the first failure."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = False
        self._started = time.monotonic()

    def write(self, **values: Any) -> None:
        if not self._found:
            seconds = round(time.monotonic() - self._started, 1)
            self._path.write_text(json.dumps({**values, "seconds": seconds}))
            self._found = True

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            test = report.nodeid.split("[")[0]
            self.write(test=test, when=report.when, error=_error_of(report))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.write(test=report.nodeid, when="collect", error=_error_of(report))


def run_tests(copy: Path, tests: tuple[str, ...], report: Path) -> None:
    """Run tests on a copy of the source, in this process (a fork), up to the first failure."""
    import pytest

    os.chdir(ROOT)
    os.setsid()  # what the tests start ends with them
    sys.path[:0] = [str(copy / "src"), str(copy)]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    for name in HOMES:  # before pytest puts the tree's own root first
        assert Path(str(importlib.import_module(name).__file__)).is_relative_to(copy)
    log = os.open(copy / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    verdict = Verdict(report)
    options = ["-x", "-q", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:xdist"]
    options += ["-p", "no:cacheprovider", f"--basetemp={copy / 'tmp'}", "-m", "not gpu"]
    code = int(pytest.main([*options, *tests], plugins=[verdict]))
    verdict.write(test="", when="", error="" if code == 0 else f"pytest exit {code}")


def outcome(found: dict[str, Any]) -> str:
    """Say in a word what became of a mutant."""
    if found.get("timeout"):
        return "not in time"
    error = found["error"]
    if found["when"] == "collect" or error.startswith((*BROKEN, "pytest exit", "no report")):
        return "broken"
    return "caught" if found["test"] else "alive"


@dataclass
class Job:
    """A task that runs."""

    task: Task
    copy: Any
    folder: Path
    pid: int
    until: float


def start(task: Task, timeout: float) -> Job:
    copy = planted(task.mutant)
    folder = copy.__enter__()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run_tests(folder, task.tests, folder / "report.json")
            code = 0
        except BaseException:
            (folder / "log").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    return Job(task, copy, folder, pid, time.monotonic() + timeout)


def finished(job: Job) -> dict[str, Any] | None:
    """Return a job's report once it has ended or its time is over."""
    late = time.monotonic() > job.until
    if late:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        os.waitpid(job.pid, 0)
    elif os.waitpid(job.pid, os.WNOHANG)[0] == 0:
        return None
    report = job.folder / "report.json"
    if late:
        found: dict[str, Any] = {"test": "", "when": "", "error": "", "timeout": True}
    elif report.exists():
        found = json.loads(report.read_text())
    else:
        found = {"test": "", "when": "collect", "error": "no report"}
    if outcome(found) != "caught":
        found["log"] = _tail(job.folder / "log")
    job.copy.__exit__(None, None, None)
    return found


def run(tasks: list[Task], cache: Path, jobs: int, timeout: float) -> dict[str, Any]:
    """Return the reports by name; those in the cache are not run again."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    held: dict[str, Any] = json.loads(cache.read_text()) if cache.exists() else {}
    todo = [task for task in tasks if held.get(task.name, {}).get("key") != task.key]
    print(f"{len(tasks) - len(todo)} of {len(tasks)} known from {cache}", flush=True)
    if todo:
        preload(len(todo))
    running: list[Job] = []
    while todo or running:
        while todo and len(running) < jobs:
            running.append(start(todo.pop(0), timeout))
        time.sleep(0.1)
        for job in list(running):
            found = finished(job)
            if found is None:
                continue
            running.remove(job)
            held[job.task.name] = {"key": job.task.key, **found}
            fresh = cache.with_suffix(".tmp")
            fresh.write_text(json.dumps(held))
            os.replace(fresh, cache)
            how = found["test"] or found["error"]
            seconds = found.get("seconds", "")
            print(
                f"{job.task.name}: {outcome(found)} {how} {found['error']} {seconds}"
                f" ({len(todo)} to come)",
                flush=True,
            )
    return {task.name: held[task.name] for task in tasks}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=900, help="seconds a mutant")
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "attack" / "mutants.json")
    parser.add_argument("--only", nargs="+", default=None, help="names; writes no results")
    given = parser.parse_args()
    mutants = read_mutants()
    chosen = [m for m in mutants if given.only is None or m.name in given.only]
    tasks = [Task(m.name, m, m.tests) for m in chosen]
    found = run(tasks, given.cache, given.jobs, given.timeout)
    wrong = [m.name for m in chosen if outcome(found[m.name]) != "caught"]
    caught = len(chosen) - len(wrong)
    # A test that fails anyway has caught nothing.
    files = sorted({found[m.name]["test"].split("::")[0] for m in chosen if m.name not in wrong})
    unchanged = [Task(f"{CONTROL}, {file}", None, (file,)) for file in files]
    controls = run(unchanged, given.cache, given.jobs, given.timeout)
    failing = [name for name, report in controls.items() if outcome(report) != "alive"]
    print(f"{caught} of {len(chosen)} caught; the unchanged source fails in {len(failing)} files")
    for name in wrong + failing:
        print(f"NOT AS IT SHOULD BE: {name}: {outcome((found | controls)[name])}")
    if given.only is None:
        sys.path.insert(0, str(ROOT / "src"))
        from dprlhf.runs.measurements import Result, at_least, write_results

        number, passing = len(mutants), len(files) - len(failing)
        write_results(
            RESULTS,
            [
                at_least("mutants planted", number, "bugs", 40),
                Result("mutants caught", caught, f"of {number}", "all", caught == number),
                Result(
                    "test files that caught one and pass on the unchanged source", passing,
                    f"of {len(files)}", "all", not failing,
                ),
            ],
        )  # fmt: skip
    return 1 if wrong + failing else 0


if __name__ == "__main__":
    sys.exit(main())
