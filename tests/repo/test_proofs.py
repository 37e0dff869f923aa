"""Proof notes name the functions that they cover; a changed function asks for another look.

After looking: python tests/repo/test_proofs.py, which rewrites tests/proof_hashes.json.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTES = sorted((ROOT / "docs" / "proofs").glob("*.md"))
HASHES = Path(__file__).with_name("proof_hashes.json")


def covered(note: Path) -> list[str]:
    """The functions and classes that a note names under 'Covers'."""
    _, found, listed = note.read_text().partition("\n## Covers\n")
    return re.findall(r"^- (\S+)$", listed, re.MULTILINE) if found else []


def tree_of(name: str) -> ast.AST:
    """The syntax tree of ``package.module.Class.function``."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        node: ast.AST = ast.parse(inspect.getsource(module))
        for part in parts[end:]:
            node = next(n for n in ast.iter_child_nodes(node) if getattr(n, "name", None) == part)
        return node
    raise LookupError(name)


def code_hash(tree: ast.AST) -> str:
    """A hash of the code, without comments and docstrings."""
    for node in ast.walk(tree):
        match getattr(node, "body", None):
            case [ast.Expr(value=ast.Constant(value=str())), *_]:
                del node.body[0]  # type: ignore[attr-defined]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def current() -> dict[str, dict[str, str]]:
    return {note.name: {name: code_hash(tree_of(name)) for name in covered(note)} for note in NOTES}


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.stem)
def test_what_a_note_covers_has_not_changed_since_it_was_looked_at(note: Path) -> None:
    names = covered(note)
    assert names, f"{note.name} names no function under '## Covers'"
    seen = json.loads(HASHES.read_text()).get(note.name, {})
    changed = [name for name in names if seen.get(name) != code_hash(tree_of(name))]
    assert not changed, (
        f"docs/proofs/{note.name} covers {', '.join(changed)}, which changed: read the note against"
        " the code, mend it where it no longer holds, then run python tests/repo/test_proofs.py"
    )
    assert set(seen) == set(names)


def test_a_changed_constant_changes_the_hash_and_a_docstring_does_not() -> None:
    source = 'def f(x):\n    """Say."""\n    return x / 2  # why\n'

    def hash_of(text: str) -> str:
        return code_hash(ast.parse(text))

    assert hash_of(source) == hash_of(source.replace("Say.", "Tell.").replace("why", "because"))
    assert hash_of(source) != hash_of(source.replace("2", "3"))


if __name__ == "__main__":
    HASHES.write_text(json.dumps(current(), indent=2) + "\n")
