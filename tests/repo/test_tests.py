"""The tests' own order: what tests share is in ``tests/helpers``, and no test imports another."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]


def imported_tests(source: str) -> list[str]:
    """Return the test modules that a file imports, also inside functions."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{name.name}" for name in node.names]
        found += [n for n in names if any(part.startswith("test_") for part in n.split("."))]
    return found


def test_no_test_imports_a_test_module() -> None:
    found = {
        str(path.relative_to(TESTS)): names
        for path in sorted(TESTS.rglob("*.py"))
        if (names := imported_tests(path.read_text()))
    }
    assert not found, f"move what is shared to tests/helpers: {found}"
