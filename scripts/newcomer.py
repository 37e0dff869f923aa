"""Does what "First steps" (docs/index.md) say, command by command, in a fresh environment.

    python scripts/newcomer.py                # writes docs/results/newcomer.json
    python scripts/newcomer.py --here         # in this environment, without a new one

The commands are read from that page. The model that they name on the hub is a folder with a tiny
random model here, which transformers takes first. The demo's time is in docs/results/demo.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
from dprlhf.runs.measurements import Result, write_results  # noqa: E402

PAGE = ROOT / "docs/index.md"
MODEL = "openai-community/gpt2"
GOAL = "works as written, within 10 minutes"
KILLED = "# kill it"


@dataclass
class Task:
    """One first step: its title, and its commands or Python code."""

    title: str
    commands: list[str] = field(default_factory=list)
    code: str = ""


def tasks() -> list[Task]:
    """Return what "First steps" say."""
    section = PAGE.read_text().partition("\n## First steps\n")[2].partition("\n## ")[0]
    found = []
    for part in section.split("\n### ")[1:]:
        title, _, text = part.partition("\n")
        task = Task(title)
        for language, block in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL):
            if language == "console":
                task.commands += [x[2:] for x in block.splitlines() if x.startswith("$ ")]
            elif language == "python":
                task.code += block
        found.append(task)
    return found


def make_model(folder: Path) -> None:
    """Put a tiny model where the page names one on the hub."""
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers import tiny

    tiny.save(folder / MODEL)


def run(task: Task, folder: Path, execute: Callable[[str], int]) -> str | None:
    """Run a task in a folder, where ``execute`` runs a command; return what went wrong."""
    for command in task.commands:
        if KILLED in command:
            if problem := run_and_kill(command, folder):
                return problem
        elif status := execute(command):
            return f"exit status {status}: {command}"
    if task.code and execute(f"python - <<'END'\n{task.code}\nEND"):
        return "the Python code failed"
    return missing(task, folder)


def missing(task: Task, folder: Path) -> str | None:
    """Return what a task should have left and has not."""
    for command in task.commands:
        words = command.split()
        if "--out" in words and not (folder / words[words.index("--out") + 1]).is_file():
            return f"no file from: {command}"
        if "--output-dir" in words:
            left = folder / words[words.index("--output-dir") + 1]
            if not (left / "policy" / "adapter_config.json").is_file():
                return f"no adapter in {left.name} from: {command}"
    return None


def run_and_kill(command: str, folder: Path) -> str | None:
    """Start a run, and kill it with all its processes once two of its rounds are on disk."""
    words = command.partition("#")[0].split()
    ledger = folder / words[words.index("--output-dir") + 1] / "ledger.jsonl"
    with open(folder / "killed.txt", "w") as log:
        child = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 600
        while child.poll() is None and time.monotonic() < deadline:
            if ledger.is_file() and ledger.read_text().count('"commit"') >= 2:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                return None
            time.sleep(0.02)
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        return "no round was finished in 10 minutes"
    return f"the run ended (status {child.returncode}) before it could be killed"


def shell(folder: Path, transcript: Path) -> Callable[[str], int]:
    """Return a function that runs a command in a folder, and keeps what it printed."""

    def execute(command: str) -> int:
        with open(transcript, "a") as log:
            log.write(f"$ {command}\n")
            log.flush()
            done = subprocess.run(
                command, shell=True, executable="/bin/bash", cwd=folder, stdout=log, stderr=log,
                timeout=900, check=False,
            )  # fmt: skip
        return done.returncode

    return execute


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--here", action="store_true", help="use this environment")
    parser.add_argument("--results", type=Path, default=ROOT / "docs/results/newcomer.json")
    parser.add_argument("--transcript", type=Path, default=Path("newcomer.txt"))
    options = parser.parse_args()
    transcript = options.transcript.resolve()
    transcript.unlink(missing_ok=True)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "dprlhf"
        if options.here:
            folder.mkdir()
            for name in ("examples", "recipes"):
                shutil.copytree(ROOT / name, folder / name)
            environment = Path(sys.executable).parent
        else:
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
            started = time.monotonic()
            if shell(folder, transcript)("make setup"):
                raise SystemExit(f"make setup failed, see {transcript}")
            seconds = round(time.monotonic() - started, 1)
            command = "make setup (wheels in the cache)"
            rows.append(Result("newcomer: set up", seconds, "seconds", GOAL, True, command))
            environment = folder / ".venv/bin"
            os.environ.pop("PYTHONPATH", None)
        os.environ["PATH"] = f"{environment}{os.pathsep}{os.environ['PATH']}"
        os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        make_model(folder)
        for task in tasks():
            if task.commands == ["make demo"]:
                rows += demo_row()
                continue
            started = time.monotonic()
            problem = run(task, folder, shell(folder, transcript))
            seconds = round(time.monotonic() - started, 1)
            print(f"{task.title}: {problem or 'works'} ({seconds:.0f} s)", flush=True)
            command = "; ".join(task.commands) or "the Python code in docs/index.md"
            holds = problem is None and seconds < 600
            rows.append(Result(f"newcomer: {task.title}", seconds, "seconds", GOAL, holds, command))
    write_results(options.results, rows)
    if not all(row.holds for row in rows):
        raise SystemExit(f"not everything holds; see {transcript}")


def demo_row() -> list[Result]:
    """Return what `make demo` measured of itself in a clean clone; nothing if it has not yet."""
    rows = json.loads((ROOT / "docs/results/demo.json").read_text())
    measured = [row for row in rows if row["name"] == "demo: make demo, clean clone"]
    return [Result(**row | {"name": "newcomer: Run the demo"}) for row in measured]


if __name__ == "__main__":
    main()
