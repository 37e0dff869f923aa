"""Runs TRL's own GRPO and RLOO examples through the private trainers.

    git clone https://github.com/huggingface/trl
    pip install math-verify
    python scripts/from_trl/examples.py --trl ./trl      # writes docs/results/trl.json

Examples that the table (``docs/results/trl-examples.md``) has are not run again, unless ``--only``
names them; remove their lines to start afresh.

An example is a block of Python in TRL's documentation, or a script of its repository, that builds a
``GRPOTrainer`` or a ``RLOOTrainer``. What it takes to run without a hub or a GPU is described in
:mod:`stand_ins`. Left out are examples that need a server or a game of their own (vLLM's
server, ``openenv``, ``openreward``, ``harbor``), and those of vision models and of
``AsyncGRPOTrainer``, which is another trainer; and what TRL itself does not run with these
stand-ins. Pages that show settings (a ``GRPOConfig(…)`` with ``...`` for the rest) are counted
apart.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import multiprocessing
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))
from dprlhf.runs.measurements import Result, write_results  # noqa: E402

RESULTS = ROOT / "docs/results/trl.json"
TABLE = ROOT / "docs/results/trl-examples.md"
BUILDS = re.compile(r"\b(GRPO|RLOO)(Trainer|Config)\(")
OTHER = re.compile(
    r"AsyncGRPO|experimental|EchoEnv|WordleEnv|harbor|openreward|image|vlm|vllm_mode=.server", re.I
)
SECONDS = 600
"""The longest that an example may take."""
SCRIPTS = ("examples/scripts/*.py", "trl/scripts/*.py")
ARGUMENTS = {
    "grpo_agent.py": "--model_name_or_path m --output_dir out",
    "gspo.py": "--model_name_or_path m --output_dir out --use_peft --num_generations 8"
    " --importance_sampling_level sequence --epsilon 3e-4 --beta 0.0 --loss_type grpo"
    " --lora_target_modules q_proj v_proj",
    "grpo_continuous_batching.py": "--model_name_or_path m --output_dir out --use_peft",
    "grpo.py": "--model_name_or_path m --output_dir out --dataset_name d"
    " --reward_funcs think_format_reward get_soft_overlong_punishment",
    "rloo.py": "--model_name_or_path m --output_dir out --dataset_name d"
    " --reward_funcs think_format_reward",
}
"""What the scripts' own headers give on the command line, where the meaning does not need a hub."""


@dataclass(frozen=True)
class Example:
    """One example: where it is in TRL's repository, its source, and its command line."""

    name: str
    source: str
    arguments: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether it builds a trainer, and leaves no argument to the reader."""
        calls = [n for n in ast.walk(ast.parse(self.source)) if isinstance(n, ast.Call)]
        given = [ast.unparse(arg) for call in calls for arg in call.args]
        return "..." not in given and any(
            ast.unparse(call.func) in ("GRPOTrainer", "RLOOTrainer") for call in calls
        )


@dataclass(frozen=True)
class Outcome:
    """What became of an example: ``run``, ``refused`` or ``failed``, and the last line it said."""

    kind: str
    said: str


def examples(trl: Path) -> Iterator[Example]:
    """Yield the examples of a clone of TRL's repository."""
    for page in sorted((trl / "docs/source").glob("*.md")):
        blocks = re.findall(r"^[ ]*```python\n(.*?)^[ ]*```", page.read_text(), re.M | re.S)
        for number, block in enumerate(blocks, 1):
            source = textwrap.dedent(block)
            if BUILDS.search(source) and not OTHER.search(source) and _parses(source):
                yield Example(f"docs/source/{page.name} #{number}", source)
    for pattern in SCRIPTS:
        for script in sorted(trl.glob(pattern)):
            source = script.read_text()
            if not re.search(r"\b(GRPO|RLOO)Trainer\(", source) or OTHER.search(script.name):
                continue
            given = ARGUMENTS.get(script.name, "") if "TrlParser" in source else ""
            yield Example(str(script.relative_to(trl)), source, tuple(given.split()))


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def run(example: Example, package: str) -> Outcome:
    """Run an example in a folder of its own, with TRL (``trl``) or with the import changed."""
    with tempfile.TemporaryDirectory() as folder:
        # A fork, because importing the libraries takes longer than most examples.
        child = multiprocessing.get_context("fork").Process(
            target=_run_in, args=(Path(folder), example, package)
        )
        child.start()
        child.join(SECONDS)
        if child.is_alive():
            child.kill()
            child.join()
        said = Path(folder, "said.txt").read_text()
    if child.exitcode == 0:
        return Outcome("run", "")
    if (child.exitcode or 0) < 0:
        return Outcome("failed", f"killed: more than {SECONDS} seconds, or memory")
    last = [line for line in said.splitlines() if line.strip()][-1]
    error, _, reason = last.partition(": ")
    if error.rpartition(".")[2] in ("DprlhfError", "ValueError") and "src/dprlhf" in said:
        return Outcome("refused", reason)
    return Outcome("failed", last)


def _run_in(folder: Path, example: Example, package: str) -> None:
    """Run an example in this process, which is a fork for it, with its output in a file."""
    os.chdir(folder)
    with open("said.txt", "w") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
    script = folder / "example.py"
    script.write_text(example.source)
    budget = ("--privacy_epsilon", "8") if example.arguments and package == "dprlhf" else ()
    sys.argv = ["stand_ins.py", package, str(script), *example.arguments, *budget]
    importlib.import_module("stand_ins").main()


def table(tried: dict[Example, Outcome]) -> str:
    """Return a Markdown table with a row for each example."""
    lines = ["| example of TRL | kind | outcome | what it says |", "|---|---|---|---|"]
    for example, outcome in tried.items():
        kind = "whole" if example.is_whole else "settings"
        lines.append(f"| `{example.name}` | {kind} | {outcome.kind} | {outcome.said} |")
    return "\n".join(lines) + "\n"


def known(chosen: Sequence[Example]) -> dict[Example, Outcome]:
    """Return what the table has of these examples, from an earlier call."""
    lines = TABLE.read_text().splitlines()[2:] if TABLE.is_file() else []
    cells = [[cell.strip() for cell in line.strip("|").split(" | ", 3)] for line in lines]
    outcomes = {name.strip("`"): Outcome(kind, said) for name, _, kind, said in cells}
    return {e: outcomes[e.name] for e in chosen if e.name in outcomes}


def results(tried: dict[Example, Outcome]) -> Iterator[Result]:
    """Yield how many examples run, whole ones and single settings apart."""
    for what, whole in (("whole examples", True), ("single settings", False)):
        outcomes = [o.kind for e, o in tried.items() if e.is_whole is whole]
        if not outcomes:
            continue
        yield _row(f"{what}: tried", len(outcomes))
        yield _row(f"{what}: refused", outcomes.count("refused"))
        failed = outcomes.count("failed")
        yield _row(f"{what}: failed without a reason", failed, "0", failed == 0)
        share = outcomes.count("run") / len(outcomes)
        goal, holds = ("at least 0.9", share >= 0.9) if whole else ("", None)
        yield _row(f"{what}: share that runs", share, goal, holds)


def _row(name: str, value: float, goal: str = "", holds: bool | None = None) -> Result:
    command = "python scripts/from_trl/examples.py --trl TRL"
    return Result(f"TRL's examples, {name}", value, "1", goal, holds, command)


def main() -> None:
    """Try the examples that TRL itself runs here, print a line for each, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trl", type=Path, required=True, help="a clone of TRL's repository")
    parser.add_argument("--only", default="", help="examples whose name contains this; no results")
    given = parser.parse_args()
    chosen = [e for e in examples(given.trl) if given.only in e.name]
    chosen.sort(key=lambda example: not example.is_whole)
    tried = {} if given.only else known(chosen)
    left = [example for example in chosen if example not in tried]
    os.environ["HF_HUB_OFFLINE"] = "1"
    for module in ("stand_ins", "dprlhf.trl"):
        importlib.import_module(module)
    for example in left:
        theirs = run(example, "trl")
        if theirs.kind != "run":
            print(f"left out {example.name}  TRL: {theirs.said}", flush=True)
            continue
        tried[example] = outcome = run(example, "dprlhf")
        print(f"{outcome.kind:8} {example.name}  {outcome.said}", flush=True)
        if not given.only:
            TABLE.write_text(table(tried))
            write_results(RESULTS, results(tried))


if __name__ == "__main__":
    main()
