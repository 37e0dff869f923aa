"""Changes to a recipe's text: only the asked values differ, and comments stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

from dprlhf.tuning.recipe_file import changed_text

RECIPES = sorted(Path(__file__).parents[2].glob("recipes/imdb_*.yaml"))
TEXT = """\
# A recipe.
a: {b: 1}  # flow
block:
  one: 1     # the first
  # before two
  two: [1, 2]
  three:
    - x
    - y

  # after the list
empty:
none: {}
last: 2
"""


def put(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        if values.get(parent) is None:
            values[parent] = {}
        values = values[parent]
    values[last] = value


KEYS = [
    "a.b", "a.c", "block.one", "block.two", "block.three", "block.four", "block.deep.er",
    "empty.x", "none.y", "last", "new", "fresh.section.key", "fresh.other",
]  # fmt: skip
VALUES = st.one_of(
    st.integers(), st.booleans(), st.none(), st.lists(st.integers(), max_size=3),
    st.floats(allow_nan=False, allow_infinity=False), st.text("abc: #-'\"", max_size=6),
)  # fmt: skip


@hypothesis.given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6))
@hypothesis.settings(max_examples=80, deadline=None)
def test_any_changes_are_read_back_and_no_comment_is_lost(changes: dict[str, Any]) -> None:
    expected = yaml.safe_load(TEXT)
    for key, value in changes.items():
        put(expected, key, value)
    text = changed_text(TEXT, changes, dict.fromkeys(changes, "a note"))
    assert yaml.safe_load(text) == expected
    for comment in ("# A recipe.", "# flow", "# the first", "# before two", "# after the list"):
        assert comment in text
    assert text.count("# a note") >= bool(changes)


@pytest.mark.parametrize("file", RECIPES, ids=lambda f: f.stem)
def test_one_value_of_a_recipe(file: Path) -> None:
    text = file.read_text()
    changed = changed_text(text, {"optimizer.learning_rate": 0.375}, {})
    old, new = text.splitlines(), changed.splitlines()
    differs = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
    assert len(differs) == 1
    assert "learning_rate: 0.375" in differs[0][1]
    assert differs[0][0].partition("#")[2] == differs[0][1].partition("#")[2]


def test_a_note_is_above_its_line_and_as_deep() -> None:
    text = changed_text("x:\n  y: 1\n", {"x.y": 2}, {"x.y": "tried\n" + 40 * "word "})
    lines = text.splitlines()
    assert lines[1] == "  # tried"
    assert lines[-1] == "  y: 2"
    assert max(map(len, lines)) <= 100
