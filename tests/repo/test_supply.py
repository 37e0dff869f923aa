"""What comes in and what could slip out: no pickle, no hub telemetry, no secrets in the tree."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dprlhf

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

ROOT, PACKAGE = Path(__file__).parents[2], Path(dprlhf.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
PAPERS = sorted((ROOT / "papers").rglob("*.py"))


def unsafe(source: str) -> set[str]:
    """Return the ways in which a module reads or writes pickles, or runs what it reads."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= {n.name for n in names} & {"pickle", "dill", "cloudpickle", "joblib"}
            case ast.ImportFrom(module=("pickle" | "dill" | "joblib") as module):
                found.add(module)
            case ast.Call(func=ast.Attribute(attr=name, value=ast.Name(id=owner)), keywords=given):
                told = {k.arg for k in given if isinstance(k.value, ast.Constant) and k.value.value}
                called = f"{owner}.{name}"
                if called in ("torch.load", "torch.save", "yaml.load"):
                    found |= {called} if "weights_only" not in told else set()
                if called == "np.load" and "allow_pickle" in told:
                    found.add(called)
            case ast.Call(func=ast.Name(id=("eval" | "exec") as name)):
                found.add(name)
            case ast.keyword(arg="trust_remote_code", value=ast.Constant(value=True)):
                found.add("trust_remote_code")
    return found


@pytest.mark.parametrize("path", [*SOURCES, *PAPERS], ids=lambda p: p.stem)
def test_nothing_is_pickled_or_run_unasked(path: Path) -> None:
    assert not unsafe(path.read_text())


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import dumps",
        "torch.load('a')",
        "torch.save(x, 'a')",
        "np.load('a', allow_pickle=True)",
        "yaml.load(text)",
        "eval(text)",
        "load(path, trust_remote_code=True)",
    ],
)
def test_the_search_sees(source: str) -> None:
    assert unsafe(source)


def imported(paths: list[Path]) -> set[str]:
    """Return the top-level packages that modules import, at their head or inside a function."""
    found = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names=names):
                    found |= {alias.name.partition(".")[0] for alias in names}
                case ast.ImportFrom(module=str(module)):
                    found.add(module.partition(".")[0])
    return found - sys.stdlib_module_names - {"dprlhf", "papers"}


def names(requirements: list[str]) -> set[str]:
    """Return the import names of required distributions."""
    called = {"pyyaml": "yaml"}
    plain = [re.split(r"[<>=; \[]", line)[0].replace("-", "_") for line in requirements]
    return {called.get(name, name) for name in plain}


EXTRAS = {
    "assets": "demo", "budget": "book", "evidence.py": "report",
    "given.py": "quantization",
    "report.py": "report", "trl": "trl", "tuning": "tune",
}  # fmt: skip
"""Folders and modules that import more than a plain run does, and the extra that brings it."""


@pytest.mark.slow
def test_what_is_required_is_what_is_imported() -> None:
    """What a plain run does not import belongs to the extra of the room that does."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    runtime, extras = names(project["dependencies"]), project["optional-dependencies"]
    rest = set(SOURCES)
    for extra in set(EXTRAS.values()):
        parts = {part for part, name in EXTRAS.items() if name == extra}
        room = {path for path in SOURCES if parts & set(path.relative_to(PACKAGE).parts)}
        rest -= room
        assert imported([*room]) <= runtime | names(extras[extra])
    core = imported([*rest])
    assert core - {"pydantic_core"} <= runtime  # pydantic's own other half, pinned by it
    assert runtime <= core
    assert imported(PAPERS) - runtime == {"gymnasium", "mujoco"} <= names(extras["dev"])


@pytest.mark.slow
def test_hub_telemetry_is_off() -> None:
    command = [
        sys.executable, "-c",
        "import dprlhf.recipe; from huggingface_hub import constants as c;"
        " print(c.HF_HUB_DISABLE_TELEMETRY)",
    ]  # fmt: skip
    plain = {k: v for k, v in os.environ.items() if "TELEMETRY" not in k and "TRACK" not in k}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=plain)
    assert done.stdout.strip() == "True"
