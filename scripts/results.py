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

RISE, GAIN = "share of the non-private rise", "share of the non-private gain"
AUC = "largest of the attacks: membership AUC"
WORTH = {
    "Gain: 1,500 users of a community, no privacy (small)": (
        "worth",
        "worth (small): community, 1500 users, no privacy: gain",
    ),
    "Gain: the same at ε = 1": ("worth", "worth (small): community, 1500 users, epsilon 1: gain"),
    "Gain: 100 rated public reviews in their place": (
        "worth",
        "worth (small): community, 1500 users, public prompts, 100 reviews: gain",
    ),
    "Share kept: 300 users of a community at ε = 1 (SmolLM2)": (
        "noise",
        f"grid (smollm2): community, axis, epsilon 1, 300 users: {RISE}",
    ),
    "Share kept: 1,500 users at ε = 0.3 (SmolLM2)": (
        "noise",
        f"grid (smollm2): community, axis, epsilon 0.3, 1500 users: {RISE}",
    ),
    "Share kept: praise, 300 users at ε = 1 (SmolLM2)": (
        "noise",
        f"grid (smollm2): demo, subspace, epsilon 1, 300 users: {RISE}",
    ),
    "Share kept: praise, 1,500 users at ε = 0.3 (SmolLM2)": (
        "noise",
        f"grid (smollm2): demo, subspace, epsilon 0.3, 1500 users: {RISE}",
    ),
    "Share kept: community, 300 users at ε = 0.3 (small)": (
        "worth",
        f"worth (small): community, 300 users, epsilon 0.3: {GAIN}",
    ),
    "Share kept: secret answers, 6,000 users at ε = 1 (small)": (
        "worth",
        "private answers (small): epsilon 1, 6000 users: share of the gain without privacy",
    ),
    "Share kept: secret answers, 1,500 users at ε = 1 (small)": (
        "worth",
        "private answers (small): epsilon 1, 1500 users: share of the gain without privacy",
    ),
    "Share kept: a secret style, 3,000 users at ε = 1 (small)": (
        "worth",
        f"worth (small): house-style, 3000 users, epsilon 1: {GAIN}",
    ),
    "Gain: praise, 1,500 users at ε = 1 (small)": (
        "worth",
        "worth (small): praise, 1500 users, epsilon 1: gain",
    ),
    "Gain: praise, 1,500 public sentences (small)": (
        "worth",
        "worth (small): praise, 1500 users, public prompts, sentences: gain",
    ),
    "Membership attack without noise: AUC (small, own answers)": (
        "worth",
        f"harm (small model, own answers): no noise, {AUC}",
    ),
    "Membership attack at ε = 1: AUC": (
        "worth",
        f"harm (small model, own answers): epsilon 1, {AUC}",
    ),
}
"""The lines of ``docs/results/worth.md``: text, file, and name of the row."""


def read() -> list[tuple[str, dict[str, Any]]]:
    """Return all rows with the names of their files."""
    return [
        (path.stem, row)
        for path in sorted(FOLDER.glob("*.json"))
        for row in json.loads(path.read_text(encoding="utf-8"))
    ]


def worth_table() -> str:
    """Return ``docs/results/worth.md``."""
    values = {(file, row["name"]): row["value"] for file, row in read()}
    lines = [
        f"| {text} | {values[place]:.2f} | `{place[0]}.json` |" for text, place in WORTH.items()
    ]
    return "\n".join(["| what | value | from |", "|---|---|---|", *lines, ""])


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
