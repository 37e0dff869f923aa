"""Reads the structure of a package from its syntax trees: who imports whom, functions, docstrings.

Nothing is imported, so that imports inside functions and under ``TYPE_CHECKING`` are seen, too.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx

ROOT = Path(__file__).parents[2]
SOURCE, PAPERS = ROOT / "src" / "dprlhf", ROOT / "papers"
LEVELS = [
    {"errors", "boundary", "hardware", "hub"},
    *({room} for room in (
        "privacy", "budget", "assets", "recipe", "data", "policies", "rollout", "rewards", "agents",
        "gradients", "updates", "runs", "training", "tuning", "audit", "testing",
        "api", "generation", "stages", "trl", "cli", "__main__", "",
    )),
]  # fmt: skip
"""The rooms from low to high; a module may import what is at its own level or below.

The last one, "", is the package itself: its ``__init__`` offers what the others make.
"""
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}


@dataclass(frozen=True)
class Arrow:
    """One import: ``importer`` needs ``imported``, at this line of its file."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer} (line {self.line}) imports {self.imported}"


def read_modules(source: Path = SOURCE) -> dict[str, ast.Module]:
    """Return the syntax tree of each module of a package, by dotted name."""
    trees = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(), str(path))
    return trees


def room(module: str) -> str:
    """Return the folder below the package that a module is in, or its name at the root."""
    return ([*module.split("."), ""])[1]


def imported_by(node: ast.AST, modules: dict[str, ast.Module]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        if node.level or not node.module:
            raise ValueError(f"line {node.lineno}: write a relative import as from dprlhf...")
        for alias in node.names:  # a module of the package, or a name in its __init__
            whole = f"{node.module}.{alias.name}"
            yield whole if whole in modules else node.module
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if called == "import_module":
            yield str(node.args[0].value)


def read_arrows(modules: dict[str, ast.Module]) -> list[Arrow]:
    """Return every import of a module of the package by another one, each pair once.

    An import of ``a.b`` also loads ``a``; that is no arrow, or every folder would be a circle.
    """
    arrows: dict[tuple[str, str], Arrow] = {}
    for importer, tree in modules.items():
        for node in ast.walk(tree):
            for imported in imported_by(node, modules):
                if imported in modules and imported != importer:
                    arrow = Arrow(importer, imported, getattr(node, "lineno", 0))
                    arrows.setdefault((importer, imported), arrow)
    return list(arrows.values())


def upward(arrows: list[Arrow]) -> list[Arrow]:
    """Return the imports from a lower room to a higher one."""
    return [a for a in arrows if LEVEL[room(a.importer)] < LEVEL[room(a.imported)]]


def circles(arrows: list[Arrow]) -> list[list[str]]:
    """Return each set of modules that import one another in a circle."""
    graph = networkx.DiGraph([(a.importer, a.imported) for a in arrows])
    return [sorted(s) for s in networkx.strongly_connected_components(graph) if len(s) > 1]


@dataclass(frozen=True)
class Function:
    """A function's size.

    Attributes:
        name: Dotted name, ``module.Class.function``.
        lines: Lines from ``def`` to the end, without the docstring.
        with_docstring: The same with the docstring.
        branches: Branches as ruff's PLR0912 counts them.
    """

    name: str
    lines: int
    with_docstring: int
    branches: int


def _branches(statements: list[ast.stmt]) -> int:
    count = 0
    for node in statements:
        if isinstance(node, ast.If | ast.For | ast.AsyncFor | ast.While):
            count += 1 + _branches(node.body)
            is_elif = isinstance(node, ast.If) and [type(n) for n in node.orelse] == [ast.If]
            count += _branches(node.orelse) + (bool(node.orelse) and not is_elif)
        elif isinstance(node, ast.With | ast.AsyncWith):
            count += _branches(node.body)
        elif isinstance(node, ast.Try):
            count += sum(1 + _branches(handler.body) for handler in node.handlers)
            count += _branches(node.body)
            count += sum(1 + _branches(rest) for rest in (node.orelse, node.finalbody) if rest)
        elif isinstance(node, ast.Match):
            count += sum(1 + _branches(case.body) for case in node.cases)
    return count


def read_functions(modules: dict[str, ast.Module]) -> list[Function]:
    """Return all functions and methods, those inside others included."""
    found = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                visit(child, prefix)
                continue
            name = f"{prefix}.{child.name}"
            visit(child, name)
            if not isinstance(child, ast.ClassDef):
                whole = (child.end_lineno or 0) - child.lineno + 1
                documented = ast.get_docstring(child) is not None
                first = child.body[0]
                docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
                found.append(Function(name, whole - docstring, whole, _branches(child.body)))

    for module, tree in modules.items():
        visit(tree, module)
    return found


def _strings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield each docstring, of attributes too, with the name of what it describes."""
    body = getattr(node, "body", [])
    for before, statement in zip(
        [None, *body], body if isinstance(body, list) else [], strict=False
    ):
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if is_text and isinstance(statement.value.value, str):
            target = (
                getattr(before, "target", None) or (getattr(before, "targets", None) or [None])[0]
            )
            yield (
                f"{name}.{target.id}" if isinstance(target, ast.Name) else name,
                statement.value.value,
            )
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _strings(statement, f"{name}.{statement.name}")


def poor_docstrings(modules: dict[str, ast.Module]) -> list[str]:
    """Return what is described by one word, or by a phrase that begins with "of"."""
    found = []
    for module, tree in modules.items():
        for name, text in _strings(tree, module):
            if len(text.split()) == 1 or text.strip().lower().startswith("of "):
                found.append(f"{name}: {text.strip().splitlines()[0]}")
            found += [
                f"{name}: {line.strip()}"
                for line in text.splitlines()
                if re.match(r"\s+\w+: of\b", line, re.IGNORECASE)
            ]
    return found
