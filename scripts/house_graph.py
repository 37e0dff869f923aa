"""The import graph of ``src/dprlhf``, read from the syntax trees: rooms, circles, reach.

A room is a folder, or one of the modules at the root. Imports inside functions and under
``TYPE_CHECKING`` count as well, and so do dotted names in strings ("dprlhf.updates.pg:policy"), by
which a table may load a module late. ``tests/repo/test_house.py`` keeps the graph as it should be,
and ``scripts/house.py`` writes what it measures.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "dprlhf"

ROOMS = (
    "errors", "boundary", "hardware", "hub", "privacy", "assets", "recipe", "data", "policies",
    "rollout", "rewards", "gradients", "updates", "runs", "training", "audit", "papers", "api",
    "cli", "testing", "__main__",
)  # fmt: skip
"""From low to high: a room may import those before it. ``dprlhf/__init__`` loads lazily."""

_DOTTED = re.compile(r"dprlhf(\.\w+)+(:\w+)?")


@functools.cache
def modules(source: Path = SOURCE) -> dict[str, Path]:
    """Return the file of each module, by its dotted name below ``dprlhf``."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


def room(module: str) -> str:
    """Return the folder of a module, or a root module itself."""
    return module.split(".")[0]


def imports(module: str, source: Path = SOURCE) -> set[str]:
    """Return the project's modules that a module imports, anywhere in it, by name."""
    known, found = modules(source), set()
    path = known[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".")
            if node.level:
                base = ["dprlhf", *package[: len(package) + 1 - node.level], *filter(None, base)]
            names = [".".join([*base, alias.name]) for alias in node.names]
            found |= {_module_of(name, known) for name in names}
        elif isinstance(node, ast.Import):
            found |= {_module_of(alias.name, known) for alias in node.names}
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and _DOTTED.fullmatch(node.value)
        ):
            found.add(_module_of(node.value.replace(":", "."), known))
    return found - {"", module}


def _module_of(name: str, known: Iterable[str]) -> str:
    """Return the longest module that a dotted name begins with; empty outside the project."""
    if not name.startswith("dprlhf."):
        return ""
    parts = name.split(".")[1:]
    ends = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((module for module in ends if module in known), "")


def graph(source: Path = SOURCE) -> dict[str, set[str]]:
    """Return what each module imports."""
    return {module: imports(module, source) for module in modules(source)}


def upward(source: Path = SOURCE) -> list[str]:
    """Return the imports from a lower room to a higher one, as "importer -> imported"."""
    rank = {name: place for place, name in enumerate(ROOMS)}
    return [
        f"{importer} -> {imported}"
        for importer, found in graph(source).items()
        for imported in sorted(found)
        if rank[room(importer)] < rank[room(imported)]
    ]


def circles(source: Path = SOURCE) -> list[list[str]]:
    """Return groups of modules that import each other, directly or through others."""
    arrows = graph(source)
    reached = {module: _follow(arrows, arrows[module]) for module in arrows}
    groups = {
        tuple(sorted(m for m in reached[module] if module in reached[m]))
        for module in arrows
        if module in reached[module]
    }
    return [list(group) for group in sorted(groups)]


def reach(starts: Iterable[str], source: Path = SOURCE) -> set[str]:
    """Return the modules that some modules load, themselves and all packages included."""
    known = modules(source)
    arrows = {
        module: found | {parent for parent in _parents(module) if parent in known}
        for module, found in graph(source).items()
    }
    return _follow(arrows, set(starts))


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _follow(arrows: dict[str, set[str]], starts: set[str]) -> set[str]:
    seen, waiting = set(starts), list(starts)
    while waiting:
        new = arrows[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def at_the_root(source: Path = SOURCE) -> list[str]:
    """Return the modules at the root of the package, ``__init__`` included."""
    return sorted(path.stem for path in source.glob("*.py"))


def functions(source: Path = SOURCE) -> dict[str, tuple[int, int]]:
    """Return the lines of each function, with and without its docstring, by dotted name."""
    found = {}
    for module, path in modules(source).items():
        waiting = [(module, node) for node in ast.parse(path.read_text()).body]
        while waiting:
            outer, node = waiting.pop()
            name = f"{outer}.{node.name}" if isinstance(node, _NAMED) else outer
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines, words = (node.end_lineno or 0) - node.lineno + 1, 0
                first = node.body[0]
                if ast.get_docstring(node) is not None:
                    words = (first.end_lineno or 0) - first.lineno + 1
                found[name] = (lines, lines - words)
            waiting += [(name, child) for child in ast.iter_child_nodes(node)]
    return found


_NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
