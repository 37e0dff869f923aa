"""Print all measured results (docs/results/*.json) as one table, what falls short first.

``--tables`` also writes the tables of documentation pages from them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "results"
ORDER = {False: 0, True: 1, None: 2}
WORD = {False: "SHORT", True: "holds", None: ""}


def read() -> list[tuple[str, dict[str, Any]]]:
    """Return all rows with the names of their files."""
    return [
        (path.stem, row)
        for path in sorted(FOLDER.glob("*.json"))
        for row in json.loads(path.read_text(encoding="utf-8"))
    ]


def worth_table() -> str:
    """Return ``docs/results/worth.md``: the rows that it names, with their values of today."""
    values = {(f"`{file}.json`", row["name"]): row["value"] for file, row in read()}
    head, rule, *lines = (FOLDER / "worth.md").read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines]
    lines = [f"| {name} | {values[file, name]:.2f} | {file} |" for name, _, file in rows]
    return "\n".join([head, rule, *lines, ""])


def main() -> None:
    if "--tables" in sys.argv[1:]:
        (FOLDER / "worth.md").write_text(worth_table(), encoding="utf-8")
    rows = sorted(read(), key=lambda entry: ORDER[entry[1]["holds"]])
    name_width = max((len(row["name"]) for _, row in rows), default=0)
    for file, row in rows:
        value = row["value"]
        shown = f"{value:.5g}" if isinstance(value, int | float) else str(value)
        print(
            f"{WORD[row['holds']]:<6} {file:<12} {row['name']:<{name_width}} {shown:>10}"
            f" {row['unit']:<18} {row['goal']}"
        )
    short = sum(row["holds"] is False for _, row in rows)
    print(f"{len(rows)} figures, {short} short of their goal")


if __name__ == "__main__":
    main()
