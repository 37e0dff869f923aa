"""Every proof note names functions that it covers, and they exist."""

import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

NOTES = sorted((Path(__file__).parents[2] / "docs" / "proofs").glob("*.md"))


def covered(note: Path) -> list[str]:
    """Return the functions and classes that a note names under 'Covers'."""
    return re.findall(r"^- (\S+)$", note.read_text().partition("\n## Covers\n")[2], re.MULTILINE)


def find(name: str) -> object:
    """Import ``package.module.Class.function``."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[end:], module)
    raise LookupError(name)


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.stem)
def test_what_a_note_covers_exists(note: Path) -> None:
    assert covered(note), f"{note.name} names no function under '## Covers'"
    for name in covered(note):
        assert find(name) is not None, name
