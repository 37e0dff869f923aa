"""The first steps of docs/index.md, command by command, and the examples in all pages."""

import doctest
import functools
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from dprlhf.cli.app import app
from dprlhf.recipe import load_any_recipe
from helpers import tiny

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import newcomer  # noqa: E402

SMALLER = ("rounds=3", "rollout.max_new_tokens=4", "rollout.responses=2", "evaluation.prompts=8")
PAGES = [
    ROOT / "README.md", ROOT / "recipes/README.md", ROOT / "examples/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("newcomer")
    for name in ("examples", "recipes"):
        shutil.copytree(ROOT / name, folder / name)
    newcomer.make_model(folder)
    return folder


def smaller(command: str) -> str:
    """The same command on fewer rounds and tokens."""
    plain = command.partition("  #")[0]
    return f"{plain} {' '.join(SMALLER)}" if " train " in command else command


def execute(command: str) -> int:
    """Run a command here: a dprlhf command inside this process."""
    from typer.testing import CliRunner

    words = shlex.split(smaller(command), comments=True)
    if words[0] == "dprlhf":
        done = CliRunner().invoke(app, words[1:])
        assert done.exception is None or done.exit_code == 0, (command, done.output, done.exception)
        return done.exit_code
    code = command.partition("<<'END'\n")[2].removesuffix("\nEND")
    assert words[0] == "python", command
    exec(compile(code, "index.md", "exec"), {})
    return 0


TASKS = {task.title: task for task in newcomer.tasks()}


REWARD, CSV = "Your own reward", "Your own CSV with a `user_id` column"
NEEDS = {
    REWARD: (), "From TRL": (), CSV: (REWARD,), "Two processes": (REWARD,),
    "Resume a killed run": (REWARD,), "Read the report": (REWARD, CSV),
    "Load the adapter": (REWARD,),
}  # fmt: skip
"""The steps that leave what a step takes up; another process may have the tests of those."""


@pytest.fixture(scope="module")
def take(home: Path) -> Callable[[str], None]:
    """Take a first step, after those that it needs; each once."""
    taken: set[str] = set()

    def take(title: str) -> None:
        for needed in NEEDS[title]:
            take(needed)
        if title in taken:
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(home)
            patch.setattr(newcomer, "run_and_kill", killed)
            run = launch if title == "Two processes" else execute
            assert newcomer.run(TASKS[title], home, run) is None
        taken.add(title)

    return take


@pytest.mark.slow
@pytest.mark.parametrize("title", NEEDS)
def test_a_first_step(take: Callable[[str], None], title: str) -> None:
    take(title)


def killed(command: str, folder: Path) -> None:
    """Run a command until its second round is told of, and stop as a crash would."""
    import dprlhf
    from dprlhf.errors import DprlhfError

    words = shlex.split(smaller(command), comments=True)
    path, *overrides = [w for w in words[2:] if not w.startswith("--output-dir")]
    target = overrides.pop(0)

    class Crash(BaseException):
        pass

    def stop(metrics: dict[str, Any]) -> None:
        if metrics["round"] == 2:
            raise Crash

    with pytest.raises(DprlhfError, match="Crash during the run"):
        dprlhf.train(path, overrides=overrides, output_dir=target, callbacks=[stop], quiet=True)


def launch(command: str) -> int:
    """Read a command as ``accelerate`` does, and run what it launches in this process alone.

    Runs in several processes have their own tests (``test_processes.py``).
    """
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    program, action, *words = shlex.split(command, comments=True)
    assert (program, action) == ("accelerate", "launch")
    asked, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert (asked.num_processes, asked.module, asked.training_script) == (2, True, "dprlhf")
    return execute(shlex.join(["dprlhf", *asked.training_script_args]))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}[^\n]*\n(.*?)```", page.read_text(), re.DOTALL)


def commands(page: Path) -> list[str]:
    lines = "\n".join(blocks(page, "console")).splitlines()
    return [line for line in lines if line.startswith("$ dprlhf ")]


def test_the_examples_of_the_docs_are_found() -> None:
    """Or the tests below would look at nothing, and pass."""
    assert sum(len(commands(page)) for page in PAGES) >= 30
    assert sum(len(blocks(page, "yaml")) for page in PAGES) >= 5
    assert not [page for page in PAGES if re.search(r"```(bash|sh|shell|yml)\b", page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_the_commands_in_the_docs_exist(page: Path) -> None:
    root = typer.main.get_command(app)
    for line in commands(page):
        words, command = shlex.split(line[2:], comments=True)[1:], root
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
        command.make_context("dprlhf", words, resilient_parsing=False).close() if words else None
        for word in words:
            if word.startswith("recipes/") and word.endswith(".yaml"):
                load_any_recipe(ROOT / word)


@pytest.mark.slow
def test_the_pipeline_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.save(tmp_path / newcomer.MODEL)
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testfile(str(ROOT / "docs/pipeline.md"), module_relative=False)
    assert tried > 5
    assert not failed


@functools.cache
def generated() -> dict[Path, str]:
    """Return the pages that ``make docs`` writes, which are not kept."""
    import docs_pages

    return docs_pages.pages()


def test_the_guide_to_trl_has_what_is_refused() -> None:
    import docs_pages

    table = docs_pages.refused_table()
    assert (ROOT / "docs/trl.md").read_text("utf-8").endswith(table), (
        f"docs/trl.md ends with {table}"
    )
    assert "mixtures of experts train without" in table


@functools.cache
def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs makes them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    ascii_only = [title.encode("ascii", "ignore").decode().lower() for title in titles]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", t).strip()) for t in ascii_only}


@pytest.mark.parametrize(
    "page",
    [*PAGES, *sorted((ROOT / "docs").glob("*/*.md")), ROOT / "CONTRIBUTING.md"],
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_the_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file in generated() or file.exists(), target
        if anchor:
            assert anchor in anchors(generated().get(file) or file.read_text()), target
