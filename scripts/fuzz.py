"""Run the fuzzer of ``tests/helpers/fuzz.py`` for long: a clear error or a correct result.

Can be stopped and called again: ``--cache`` counts the cases that are done. A failing case is
printed, shrunk, and the exit status is 1. Twenty minutes for 100,000 cases on one slow core.

    python scripts/fuzz.py [--cases 100000]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import hypothesis  # noqa: E402

from dprlhf.runs.measurements import Result, write_results  # noqa: E402
from helpers import fuzz, tiny  # noqa: E402

OUT = ROOT / "docs" / "results" / "attack.json"
CHUNK = 500
# Of each target's share in the suite: whole runs cost a hundred times the others.
WEIGHTS = {"run": 0.3}


def chunk(target: str, seed: int, cases: int) -> str | None:
    """Run some cases; return what failed."""
    strategy, check, _ = fuzz.TARGETS[target]

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=cases, deadline=None, database=None, print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(strategy)
    def fuzzed(case: Any) -> None:
        check(case)

    try:
        fuzzed()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return traceback.format_exc()
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "attack" / "fuzz.json")
    parser.add_argument("--only", nargs="+", choices=fuzz.TARGETS)
    given = parser.parse_args()
    given.cache.parent.mkdir(parents=True, exist_ok=True)
    done = json.loads(given.cache.read_text()) if given.cache.exists() else {}
    shares = {name: n * WEIGHTS.get(name, 1.0) for name, (*_, n) in fuzz.TARGETS.items()}
    wanted = {name: -(-given.cases * n // sum(shares.values())) for name, n in shares.items()}
    failed = 0
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=fuzz.MEMORY) as folder:
        os.environ["FUZZ_MODEL"] = str(tiny.save(Path(folder)))
        todo = list(given.only or fuzz.TARGETS)
        while todo:
            # The target that is furthest behind, so that a stop leaves all about as far.
            name = min(todo, key=lambda n: done.get(n, {}).get("cases", 0) / wanted[n])
            counts = done.setdefault(name, {"cases": 0, "failed": 0})
            left = int(wanted[name] - counts["cases"])
            if left <= 0:
                todo.remove(name)
                continue
            cases = min(left, CHUNK if shares[name] > 100 else 20)
            wrong = chunk(name, seed=counts["cases"] + 1, cases=cases)
            counts["cases"] += cases
            if wrong:
                counts["failed"] += 1
                failed += 1
                print(f"{name}, after {counts['cases']} cases:\n{wrong}", flush=True)
            given.cache.write_text(json.dumps(done))
    if given.only is None:
        total = int(sum(c["cases"] for c in done.values()))
        bad = int(sum(c["failed"] for c in done.values()))
        write_results(
            OUT,
            [
                Result("cases fuzzed", total, "cases", "at least 100,000", total >= 100_000),
                Result("cases that failed", bad, f"of {total}", "0", bad == 0),
            ],
        )
    print(done)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
