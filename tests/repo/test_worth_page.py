"""The figures behind docs/worth.md are those of docs/results/*.json."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import results  # noqa: E402


def test_the_table_is_what_was_measured() -> None:
    """After a new measurement: python scripts/results.py --tables."""
    assert (ROOT / "docs" / "results" / "worth.md").read_text() == results.worth_table()


def test_the_page_has_no_figures_of_its_own() -> None:
    text = (ROOT / "docs" / "worth.md").read_text()
    assert not re.findall(r"\*\*[+−]?[\d.]+%?\*\*|±", text)
    assert len(text.split()) <= 900
