"""Measure how the code is laid out: imports, sizes, places that an extension touches.

Writes ``docs/results/house.json``. Takes a minute; ``--times`` also runs ``make test-fast`` and
``make test``, or the one that is named, and takes their times, which mean something on a quiet
machine only.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import extend_page
from dprlhf.runs.measurements import Result, write_results

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "results" / "house.json"

TRAIN = ("dprlhf.api", "dprlhf.cli.train")
"""What ``dprlhf train`` starts from."""

sys.path.insert(0, str(ROOT / "tests"))  # what reads the structure, and the scan of the boundary
house, test_boundary = map(importlib.import_module, ("helpers.house", "test_boundary"))


read_modules = functools.cache(house.read_modules)  # a second each time


@functools.cache
def arrows() -> list[house.Arrow]:
    return house.read_arrows(read_modules())


def at_most(name: str, value: float, unit: str, goal: float) -> Result:
    return Result(name, value, unit, f"at most {goal:g}", value <= goal)


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


def reach(starts: Iterable[str]) -> set[str]:
    """Return the modules that some modules load, imports inside functions and packages included.

    The package's own ``__init__`` counts as a module, but not what it offers lazily.
    """
    modules = read_modules()
    needs: dict[str, set[str]] = {name: set() for name in modules}
    for arrow in arrows():
        needs[arrow.importer].add(arrow.imported)
    for name in modules:
        needs[name].add(name.rpartition(".")[0] or name)
    needs["dprlhf"] = set()
    seen, waiting = set(starts), list(starts)
    while waiting:
        new = needs[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def sizes() -> Iterator[Result]:
    lines = {}
    for path in house.SOURCE.rglob("*.py"):
        parts = path.relative_to(house.SOURCE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        lines[name] = len(path.read_text().splitlines())
    reached = sum(lines[name] for name in reach(TRAIN))
    yield at_most("lines that dprlhf train can reach, with docstrings", reached, "lines", 11_000)
    yield Result("lines of the package, with docstrings", sum(lines.values()), "lines")
    functions = house.read_functions(read_modules())
    longest = max(f.lines for f in functions)
    yield at_most("longest function, without its docstring", longest, "lines", 120)
    longest = max(f.with_docstring for f in functions)
    yield at_most("longest function, with its docstring", longest, "lines", 160)
    most = max(f.branches for f in functions)
    yield at_most("most branches in a function", most, "branches", 15)
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


TARGETS = {"test-fast": 120, "test": 480}
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
    given = parser.parse_args().times
    targets = TARGETS if given == [] else given or []
    for part in (imports, sizes, extensions, functools.partial(times, targets)):
        rows = list(part())
        write_results(OUT, rows)
        for row in rows:
            print(f"{row.value:10.6g} {row.unit:18} {row.goal:34} {row.holds!s:5} {row.name}")


if __name__ == "__main__":
    main()
