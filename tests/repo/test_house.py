"""The order of the house: no circle, no arrow upward, short functions, whole sentences.

``docs/architecture.md`` shows the rooms; ``tests/helpers/house.py`` reads them.
"""

import ast
import json
import sys
from pathlib import Path

import pytest

from helpers import house

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import house as figures

MOST_LINES, MOST_BRANCHES = 120, 15


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    """The package, and the papers' tables beside it."""
    return house.read_modules() | house.read_modules(house.PAPERS)


@pytest.fixture(scope="module")
def arrows(modules: dict[str, ast.Module]) -> list[house.Arrow]:
    return house.read_arrows(modules)


def test_few_modules_stand_at_the_root() -> None:
    loose = sorted(p.stem for p in house.SOURCE.glob("*.py"))
    assert len(loose) <= 9, f"put it into a room: {loose}"


def test_every_room_has_a_level_and_says_what_it_is_for(modules: dict[str, ast.Module]) -> None:
    rooms = {p.name for p in house.SOURCE.iterdir() if p.suffix in ("", ".py") and p.name[0] != "_"}
    assert {name.removesuffix(".py") for name in rooms} <= house.LEVEL.keys()
    silent = [name for name, tree in modules.items() if not ast.get_docstring(tree)]
    assert not silent, f"modules without a docstring: {silent}"


def test_no_import_goes_from_a_lower_room_to_a_higher_one(arrows: list[house.Arrow]) -> None:
    found = house.upward([a for a in arrows if a.importer.startswith("dprlhf")])
    assert not found, "upward: " + "; ".join(map(str, found))


def test_no_modules_import_one_another_in_a_circle(arrows: list[house.Arrow]) -> None:
    for circle in house.circles(arrows):
        within = [str(a) for a in arrows if a.importer in circle and a.imported in circle]
        pytest.fail("circle: " + "; ".join(within))


def test_text_files_are_utf8_whatever_the_locale(modules: dict[str, ast.Module]) -> None:
    """A card has an ε in it, which Latin-1 and ASCII lack."""
    known = {"read_text": 0, "write_text": 1}
    silent = [
        f"{name}:{call.lineno}"
        for name, tree in modules.items()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in known
        and len(call.args) == known[call.func.attr]
        and not any(keyword.arg == "encoding" for keyword in call.keywords)
    ]
    assert not silent, f"name the encoding: {silent}"


def test_functions_are_short_and_branch_little(modules: dict[str, ast.Module]) -> None:
    functions = house.read_functions(modules)
    assert not [f for f in functions if f.lines > MOST_LINES or f.branches > MOST_BRANCHES]


def test_docstrings_are_sentences(modules: dict[str, ast.Module]) -> None:
    poor = house.poor_docstrings(modules)
    assert not poor, "\n".join(poor)


"""Modules whose texts may name them: ``bench`` has a checkout."""


def read(**sources: str) -> dict[str, ast.Module]:
    return {"dprlhf." + name.replace("__", "."): ast.parse(text) for name, text in sources.items()}


@pytest.mark.parametrize(
    "source",
    [
        "from dprlhf.training.trainer import Run",
        "from dprlhf.training import trainer",
        "import dprlhf.training.trainer",
        "def f():\n    from dprlhf.training.trainer import Run",
        "if TYPE_CHECKING:\n    from dprlhf.training.trainer import Run",
        "importlib.import_module('dprlhf.training.trainer')",
    ],
)
def test_an_arrow_upward_is_seen(source: str) -> None:
    modules = read(privacy__gate=source, training__trainer="import dprlhf.privacy.gate")
    arrows = house.read_arrows(modules)
    (found,) = house.upward(arrows)
    assert str(found).startswith("dprlhf.privacy.gate (line ")
    assert str(found).endswith(" imports dprlhf.training.trainer")
    assert house.circles(arrows) == [["dprlhf.privacy.gate", "dprlhf.training.trainer"]]


def test_a_relative_import_is_refused() -> None:
    with pytest.raises(ValueError, match="relative"):
        house.read_arrows(read(privacy__gate="from ..training import trainer"))


def test_a_longer_circle_is_seen_and_a_chain_is_none() -> None:
    chain = {"a": "from dprlhf import b", "b": "from dprlhf.c import x", "c": ""}
    assert house.circles(house.read_arrows(read(**chain))) == []
    chain["c"] = "def f():\n    import dprlhf.a"
    assert house.circles(house.read_arrows(read(**chain))) == [["dprlhf.a", "dprlhf.b", "dprlhf.c"]]


def test_the_root_is_above_everything() -> None:
    modules = read(privacy__gate="from dprlhf import train") | {"dprlhf": ast.parse("")}
    assert len(house.upward(house.read_arrows(modules))) == 1


SLACK = 1.03


def check_ceilings(found: dict[str, int]) -> None:
    kept = json.loads(figures.CEILINGS.read_text("utf-8"))
    for name, count in found.items():
        assert count <= kept[name] * SLACK, (
            f"{name}: {count}, more than {kept[name]} in tests/repo/ceilings.json, which only go"
            " down: take something away; python scripts/house.py --ceilings lowers the file"
        )


def test_the_house_does_not_grow() -> None:
    check_ceilings(figures.counted())


@pytest.mark.slow
def test_a_plain_run_loads_little() -> None:
    check_ceilings(figures.plain_run())


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


def test_what_the_scripts_import_from_here_is_there() -> None:
    """Most scripts take minutes, so that nobody runs them when what they import moves."""
    places = {"dprlhf": "src", "helpers": "tests", "bench": "scripts", "scripts": ""}
    for script in (figures.ROOT / "scripts").rglob("*.py"):
        for node in ast.walk(ast.parse(script.read_text())):
            parts = (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else [""]
            if parts[0] in places:
                path = figures.ROOT.joinpath(places[parts[0]], *parts)
                found = path.with_suffix(".py").exists() or path.is_dir()
                assert found, f"{script.name}: there is no module {node.module}"
