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


def test_the_map_has_every_folder_once() -> None:
    drawn = re.findall(r"^\| `(\w+)/` \|", PAGE, re.MULTILINE)
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == ROOMS


def test_every_folder_says_what_it_is_for() -> None:
    for room in PACKAGE.rglob("__init__.py"):
        sentence = (ast.get_docstring(ast.parse(room.read_text())) or "").partition("\n")[0]
        assert len(sentence.split()) >= 4, f"{room.parent.name}/__init__.py"


def test_the_page_names_the_modules_at_the_root() -> None:
    modules = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    assert {name for name in modules if f"`{name}`" not in PAGE} == set()


def test_what_the_page_names_exists() -> None:
    for name in re.findall(r"`(\w+/\w+\.py)`", PAGE):
        assert (PACKAGE / name).is_file() or (PACKAGE.parents[1] / name).is_file(), name


def test_the_page_orders_the_rooms_as_the_imports_do() -> None:
    (order,) = re.findall(r"From low to high: ([\w,\s]+)\.", PAGE)
    rooms = re.split(r",\s+", order)
    assert set(rooms) == house.LEVEL.keys() - {"__main__", ""}
    assert rooms == sorted(rooms, key=lambda room: house.LEVEL[room])


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
