"""Measure how the code is laid out: imports, sizes, places that an extension touches.

Writes ``docs/results/house.json``. Takes a minute; ``--times`` also runs ``make test-fast`` and
``make test`` and takes their times, which mean something on a quiet machine only.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import extend_page
import house_graph
from dprlhf.runs.measurements import Result, write_results

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "results" / "house.json"

TRAIN = ("api", "cli.train")
"""What ``dprlhf train`` starts from."""


def at_most(name: str, value: float, unit: str, goal: float) -> Result:
    return Result(name, value, unit, f"at most {goal:g}", value <= goal)


def imports() -> Iterator[Result]:
    yield at_most("modules at the root", len(house_graph.at_the_root()), "modules", 9)
    yield at_most("circles of imports", len(house_graph.circles()), "groups of modules", 0)
    yield at_most("imports from a lower to a higher room", len(house_graph.upward()), "imports", 0)
    yield at_most("modules that open Private", len(openers()), "modules", 9)


def openers() -> list[str]:
    """Return the modules of the scan in ``tests/test_boundary.py`` that open Private."""
    sys.path.insert(0, str(ROOT / "tests"))
    import test_boundary

    return [
        module
        for module, source in test_boundary.modules().items()
        if module != "boundary" and "open_private" in set(test_boundary.uses(source))
    ]


def sizes() -> Iterator[Result]:
    files = house_graph.modules()
    lines = {name: len(path.read_text().splitlines()) for name, path in files.items()}
    core = house_graph.reach(TRAIN)
    reached = sum(lines[name] for name in core)
    yield at_most("lines that dprlhf train can reach, with docstrings", reached, "lines", 11_000)
    yield Result("lines of the package, with docstrings", sum(lines.values()), "lines")
    lengths = house_graph.functions().values()
    longest = max(without for _, without in lengths)
    yield at_most("longest function, without its docstring", longest, "lines", 60)
    longest = max(with_ for with_, _ in lengths)
    yield at_most("longest function, with its docstring", longest, "lines", 60)
    yield at_most("most branches in a function", most_branches(), "branches", 10)
    words = len((ROOT / "README.md").read_text().split())
    yield at_most("words in README.md", words, "words", 700)


def most_branches() -> int:
    """Return the largest number of branches in a function, as ruff counts them."""
    told = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "src", "--select", "PLR0912", "--no-cache",
         "--config", "lint.pylint.max-branches=0", "--output-format", "concise"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    return max(int(count) for count in re.findall(r"Too many branches \((\d+) > 0\)", told))


def extensions() -> Iterator[Result]:
    """Build each example of the Extend page, run its test, and count its files."""
    for title, blocks in extend_page.examples().items():
        with tempfile.TemporaryDirectory(prefix="extend-") as folder:
            extend_page.copy_source(Path(folder))
            tests = extend_page.build(blocks, Path(folder))
            works = run_tests(Path(folder), tests)
        count, goal = len(extend_page.places(blocks)), extend_page.GOALS[title]
        yield Result(
            f"places touched: {title[0].lower()}{title[1:]}, beside its test",
            count,
            "files",
            f"at most {goal}, and its test passes",
            works and count <= goal,
        )


def run_tests(root: Path, tests: list[Path]) -> bool:
    """Run the tests of examples that were built in a copy of the source."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, f"--rootdir={root}", *map(str, tests)], cwd=root, env=environment, check=False
    )
    return ran.returncode == 0


def times() -> Iterator[Result]:
    for target, goal in (("test-fast", 120), ("test", 480)):
        start = time.perf_counter()
        passed = subprocess.run(["make", target], cwd=ROOT, check=False).returncode == 0
        seconds = time.perf_counter() - start
        holds = passed and seconds <= goal
        yield Result(f"time of make {target}", seconds, "s", f"at most {goal}, all pass", holds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", action="store_true", help="run the tests, too, and time them")
    for part in (imports, sizes, extensions, *([times] if parser.parse_args().times else [])):
        rows = list(part())
        write_results(OUT, rows)
        for row in rows:
            print(f"{row.value:10.6g} {row.unit:18} {row.goal:34} {row.holds!s:5} {row.name}")


if __name__ == "__main__":
    main()
