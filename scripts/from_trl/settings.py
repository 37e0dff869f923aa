"""Counts what the private trainers do with each setting of TRL's configs.

    python scripts/from_trl/settings.py              # writes docs/results/trl.json

The settings themselves, with a sentence each, are in docs/reference/trl.md.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import trl

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))
from dprlhf.runs.measurements import Result, write_results  # noqa: E402
from dprlhf.trl.fields import GRPO, RLOO  # noqa: E402


def results() -> Iterator[Result]:
    """Yield how many settings there are of each kind, and how many the table does not mention."""
    for config, table in ((trl.GRPOConfig, GRPO), (trl.RLOOConfig, RLOO)):
        name = f"settings of TRL's {config.__name__}"
        names = {f.name for f in dataclasses.fields(config)}
        yield Result(name, len(names), "1")
        kinds = Counter(table[n].kind for n in names & table.keys())
        for kind in ("honoured", "mapped", "no effect", "refused"):
            yield Result(f"{name}: {kind}", kinds[kind], "1")
        unmentioned = len(names ^ table.keys())
        yield Result(f"{name}: unmentioned", unmentioned, "1", "0", unmentioned == 0)


if __name__ == "__main__":
    rows = list(results())
    for row in rows:
        print(f"{row.name}: {row.value}")
    write_results(ROOT / "docs/results/trl.json", rows)
