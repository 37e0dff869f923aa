"""The figures on docs/worth.md are those of docs/results/*.json, rounded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "worth.md").read_text()
TEXT, SOURCES = PAGE.split("## Where the figures come from")
ROWS = {
    number: (shown, file, name)
    for number, shown, file, name in re.findall(
        r"^\| (\d+) \| (\S+) \| \[`([\w.]+)`\]\(results/[\w.]+\) \| `(.+)` \|$", SOURCES, re.M
    )
}


def value_of(shown: str) -> tuple[float, float]:
    """Return a figure as it is shown, and half a unit of its last digit; a bare 0 is exact."""
    if shown == "0":
        return 0.0, 0.0
    plain = shown.replace("−", "-").replace(",", "").replace("+", "")
    scale = 0.01 if plain.endswith("%") else 1.0
    digits = plain.rstrip("%")
    places = len(digits.partition(".")[2])
    return float(digits) * scale, 0.5 * scale * 10.0**-places


@pytest.mark.parametrize("number", ROWS)
def test_a_figure_is_what_was_measured(number: str) -> None:
    shown, file, name = ROWS[number]
    measured = {r["name"]: r["value"] for r in json.loads((DOCS / "results" / file).read_text())}
    value, half = value_of(shown)
    assert abs(measured[name] - value) <= half * (1 + 1e-9), (measured[name], shown)


def test_every_figure_in_the_text_has_its_source() -> None:
    assert len(ROWS) > 10
    pieces = TEXT.split("**")  # what is bold is every second one
    bold = {
        (shown, re.match(r" \[(\d+)\]", after))
        for shown, after in zip(pieces[1::2], pieces[2::2], strict=True)
        if re.fullmatch(r"[+−]?[\d.,]+%?", shown)
    }
    bare = [shown for shown, source in bold if source is None]
    assert not bare, f"figures without a source: {bare}"
    assert {(source[1], shown) for shown, source in bold if source} == {
        (number, shown) for number, (shown, _, _) in ROWS.items()
    }


def test_rounding_is_recognised() -> None:
    assert value_of("−1.34") == pytest.approx((-1.34, 0.005))
    assert value_of("+98%") == pytest.approx((0.98, 0.005))
    assert value_of("1,500") == pytest.approx((1500, 0.5))
