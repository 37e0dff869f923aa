"""The map of the folders: the same in docs/architecture.md, in the package's docstring, on disk."""

import ast
import re
import sys
from pathlib import Path

import dprlhf
from helpers import house

PACKAGE = Path(dprlhf.__file__).parent
PAGE = (PACKAGE.parents[1] / "docs/architecture.md").read_text()
ROOMS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def test_the_page_and_the_docstring_have_the_same_map() -> None:
    listed = re.findall(r"^- ``(\w+)/``: (.+?)\.$", dprlhf.__doc__ or "", re.MULTILINE)
    drawn = re.findall(r"^\| `(\w+)/` \| (.+?) \|$", PAGE, re.MULTILINE)
    assert [(name, about.replace("``", "`")) for name, about in listed] == drawn
    assert sorted(name for name, _ in drawn) == sorted(ROOMS)


def test_the_package_imports_nothing_that_is_not_installed_with_it() -> None:
    """The papers' tables, the scripts and the tests use the package, never the other way round."""
    beside = {path.name for path in PACKAGE.parents[1].iterdir() if any(path.glob("*.py"))}
    assert {"papers", "scripts", "tests"} <= beside
    modules = house.read_modules()
    imported = {
        f"{name} imports {module}"
        for name, tree in modules.items()
        for node in ast.walk(tree)
        for module in house.imported_by(node, modules)
        if module.partition(".")[0] in beside
    }
    assert not imported


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import results  # noqa: E402


def test_the_table_is_what_was_measured() -> None:
    """After a new measurement: python scripts/results.py --tables."""
    assert (ROOT / "docs" / "results" / "worth.md").read_text() == results.worth_table()
