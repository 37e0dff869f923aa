"""Run the control tables; write the results, and a table beside the papers' figures.

    python -m papers.control --table hz --seeds 10 --jobs 2

Finished runs are kept: a second call continues there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from papers.control.results import write
from papers.control.run_rows import run_table
from papers.control.tables import TABLES

ROOT = Path(__file__).resolve().parents[2]


def main(words: Sequence[str] | None = None) -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser("python -m papers.control", description=__doc__)
    parser.add_argument("--table", choices=[*TABLES, "all"], default="all")
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds for each row")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--only", default="", help="run only rows whose name contains this text")
    parser.add_argument("--recipes", type=Path, default=ROOT / "recipes" / "control")
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "control")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="has the folder results/")
    parser.add_argument("--write-only", action="store_true", help="write what is finished")
    given = parser.parse_args(words)
    if min(given.seeds, given.jobs) < 1:
        parser.error("--seeds and --jobs are 1 or more")
    shared = {"seeds": given.seeds, "recipes": given.recipes, "cache": given.cache}
    if not given.write_only:
        for name in TABLES if given.table == "all" else [given.table]:
            run_table(name, jobs=given.jobs, only=given.only, **shared)
    finished = {name: run_table(name, write_only=True, quiet=True, **shared) for name in TABLES}
    command = f"python -m papers.control --table {given.table} --seeds {given.seeds}"
    (given.out / "results").mkdir(parents=True, exist_ok=True)
    print(write(finished, given.out, command, given.seeds))


if __name__ == "__main__":
    main()
