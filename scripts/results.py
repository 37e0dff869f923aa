"""Print all measured results (docs/results/*.json) as one table, what falls short first."""

from __future__ import annotations

import json
from pathlib import Path

ORDER = {False: 0, True: 1, None: 2}
WORD = {False: "SHORT", True: "holds", None: ""}


def main() -> None:
    folder = Path(__file__).parent.parent / "docs" / "results"
    rows = [
        (path.stem, row)
        for path in sorted(folder.glob("*.json"))
        for row in json.loads(path.read_text())
    ]
    rows.sort(key=lambda entry: ORDER[entry[1]["holds"]])
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
