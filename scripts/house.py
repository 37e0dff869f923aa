"""Measure how the code is laid out: imports, sizes, places that an extension touches.

Writes ``docs/results/house.json``, and lowers the ceilings in ``tests/repo/ceilings.json`` to what
is counted; ``--ceilings`` does that alone, ``--results`` all but the ceilings, the extensions and
the tests. Takes minutes; ``--golden FILE`` compares the bits of short runs with those that
``helpers.golden`` has written for an earlier state of the source, and ``--times`` runs
``make test-fast`` and ``make test``, or the one that is named, and takes their times, which mean
something on a quiet machine only.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import extend_page
from dprlhf.recipe import STAGES, Recipe, known_keys
from dprlhf.runs.measurements import Result, at_least, at_most, write_results

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "results" / "house.json"

CEILINGS = ROOT / "tests" / "repo" / "ceilings.json"

sys.path.insert(0, str(ROOT / "tests"))  # what reads the structure, and the scan of the boundary
house, test_boundary = map(importlib.import_module, ("helpers.house", "test_boundary"))


read_modules = functools.cache(house.read_modules)  # a second each time


@functools.cache
def arrows() -> list[house.Arrow]:
    return house.read_arrows(read_modules())


def imports() -> Iterator[Result]:
    root = len(list(house.SOURCE.glob("*.py")))
    yield at_most("modules at the root", root, "modules", 9)
    yield at_most("circles of imports", len(house.circles(arrows())), "circles", 0)
    yield at_most("imports to a higher room", len(house.upward(arrows())), "imports", 0)
    yield at_most("modules that open Private", len(openers()), "modules", 9)


def openers() -> list[str]:
    """Return the modules that open Private, by the scan in ``tests/test_boundary.py``."""
    return [
        module
        for module, names in test_boundary.modules().items()
        if module != "boundary" and "open_private" in names
    ]


def lines_in(folder: str, kind: str = "*.py") -> int:
    """Return the lines of a folder's files."""
    return sum(len(p.read_text("utf-8").splitlines()) for p in (ROOT / folder).rglob(kind))


def counted() -> dict[str, int]:
    """Count what ``tests/repo/ceilings.json`` bounds and needs no run."""
    keys = {key for kind in (Recipe, *STAGES.values()) for key in known_keys(kind)}
    sections = {key.rpartition(".")[0] for key in keys}
    pages = {ROOT / "README.md", *(ROOT / "docs").rglob("*.md")}
    # Pages that `make docs` has written are those of the reference that git ignores.
    pages -= {ROOT / line[1:] for line in (ROOT / ".gitignore").read_text("utf-8").split()}
    return {
        "lines of src": lines_in("src"),
        "lines of papers (not installed)": lines_in("papers"),
        "lines of tests": lines_in("tests"),
        "lines of scripts": lines_in("scripts"),
        "leaf settings": len(keys - sections),
        "words of README and docs": sum(len(p.read_text("utf-8").split()) for p in pages),
        "dependencies": len(
            tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
        ),
    }


ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
}


def plain_run(*options: str) -> dict[str, int]:
    """Count what a plain ``dprlhf train`` loads, by a run in a process of its own."""
    run = [sys.executable, "-W", "ignore", "-m", "helpers.plain_run", *options]
    done = subprocess.run(run, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        "lines that a plain run loads": sum(found["lines"].values()),
        "files from the command line to a step": len(found["chain"]),
        **({"functions before the first round": found["functions"]} if options else {}),
    }


GOALS = {
    "lines that a plain run loads": 20_000,
    "lines of src": 38_000,
    "lines of papers (not installed)": 3_000,
    "lines of tests": 32_000,
    "lines of scripts": 7_000,
    "words of README and docs": 45_000,
    "leaf settings": 110,
    "files from the command line to a step": 12,
    "functions before the first round": 300,
    "dependencies": 18,
    "lines of the kernel": 6_000,
}
"""What the counts should be at most."""

STARTS = {
    "import dprlhf": (["-c", "import dprlhf"], 0.05),
    "dprlhf --help": (["-m", "dprlhf", "--help"], 0.25),
}
"""Calls of Python, each with the seconds of processor time that it may take: of the help half of
what it took when all commands were loaded for it."""


def goals() -> Iterator[Result]:
    """Compare sizes and starts with their goals."""
    kernel = importlib.import_module("repo.test_kernel").kernel()
    found = counted() | plain_run("--functions")
    found["lines of the kernel"] = sum(map(lines_of, kernel))
    for name, goal in GOALS.items():
        yield at_most(name, found[name], "", goal)
    for name, (words, goal) in STARTS.items():
        yield at_most(f"processor time of {name}", processor_time(words), "s", goal)
    planted = len(list((ROOT / "tests" / "mutants").glob("*.diff")))
    yield at_least("planted bugs", planted, "bugs", 350)


def lines_of(module: str) -> int:
    """Return the lines of a module of the package."""
    path = house.SOURCE / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return len(path.read_text("utf-8").splitlines())


def processor_time(words: list[str]) -> float:
    """Return the least processor time of five calls of Python, in seconds."""
    taken = []
    for _ in range(5):
        before = os.times()
        subprocess.run([sys.executable, *words], env=ENVIRONMENT, capture_output=True, check=True)
        after = os.times()
        taken.append(sum(after[2:4]) - sum(before[2:4]))
    return min(taken)


def golden(file: Path) -> Iterator[Result]:
    """Compare the bits of short runs with those of an earlier state of the source."""
    run = [sys.executable, "-W", "ignore", "-m", "helpers.golden", str(file.resolve())]
    same = subprocess.run(run, env=ENVIRONMENT, capture_output=True, check=False).returncode == 0
    runs = len(json.loads(file.read_text("utf-8")))
    yield Result("short runs whose bits were compared", runs, "runs", "all are equal", same)


def lower_ceilings() -> None:
    """Lower the ceilings to what is counted now; none is raised."""
    kept = json.loads(CEILINGS.read_text("utf-8")) if CEILINGS.exists() else {}
    found = counted() | plain_run()
    lowered = {name: min(count, kept.get(name, count)) for name, count in found.items()}
    CEILINGS.write_text(json.dumps(lowered, indent=2) + "\n", "utf-8")


def sizes() -> Iterator[Result]:
    functions = house.read_functions(read_modules())
    for name, of, unit, goal in (
        ("longest function, without its docstring", "lines", "lines", 120),
        ("longest function, with its docstring", "with_docstring", "lines", 160),
        ("most branches in a function", "branches", "branches", 15),
    ):
        yield at_most(name, max(getattr(f, of) for f in functions), unit, goal)
    words = len((ROOT / "README.md").read_text().split())
    yield at_most("words in README.md", words, "words", 700)


def extensions() -> Iterator[Result]:
    """Build each example of the Extend page, run its test, and count its files."""
    for title, blocks in extend_page.examples().items():
        with tempfile.TemporaryDirectory(prefix="extend-") as folder:
            extend_page.copy_source(Path(folder))
            tests = extend_page.build(blocks, Path(folder))
            works = extend_page.run_tests(Path(folder), tests).returncode == 0
        count, goal = len(extend_page.places(blocks)), extend_page.GOALS[title]
        yield Result(
            f"places touched: {title[0].lower()}{title[1:]}, beside its test",
            count,
            "files",
            f"at most {goal}, and its test passes",
            works and count <= goal,
        )


TARGETS = {"test-fast": 120, "test": 360}
"""Targets of make that run tests, and the seconds that each should take at most."""


def times(targets: Iterable[str]) -> Iterator[Result]:
    for target in targets:
        start = time.perf_counter()
        passed = subprocess.run(["make", target], cwd=ROOT, check=False).returncode == 0
        seconds = time.perf_counter() - start
        goal = TARGETS[target]
        holds = passed and seconds <= goal
        yield Result(f"time of make {target}", seconds, "s", f"at most {goal}, all pass", holds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--times", nargs="*", choices=TARGETS, metavar="TARGET",
        help="run these targets of make, too (all without a name), and time them",
    )  # fmt: skip
    parser.add_argument("--ceilings", action="store_true", help="lower the ceilings, nothing else")
    parser.add_argument("--results", action="store_true", help="count sizes and starts alone")
    parser.add_argument("--golden", type=Path, metavar="FILE", help="compare the bits of runs")
    given = parser.parse_args()
    targets = TARGETS if given.times == [] else given.times or []
    parts = [extensions, functools.partial(times, targets), goals, imports, sizes]
    if given.golden:
        parts.append(functools.partial(golden, given.golden))
    if not given.results:
        lower_ceilings()
    for part in [] if given.ceilings else parts[2 * given.results :]:
        write_results(OUT, part(), show=True)


if __name__ == "__main__":
    main()
