"""Measured results as data: what was measured, against which goal, where, when and how.

Many measurements run side by side, each kept in a file: the same call continues what was stopped.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import platform
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from dprlhf.hardware import usable_cores
from dprlhf.runs.folder import write_atomically

_CPU_INFO = Path("/proc/cpuinfo")


def machine() -> str:
    """Describe this machine in one line: processor, usable cores, operating system, Python.

    A GPU is named where this process has used it, and AMX where the processor has it: two of one
    name, with it and without, differ several times over in bfloat16.
    """
    fields: dict[str, str] = {}
    if _CPU_INFO.exists():
        lines = _CPU_INFO.read_text("utf-8").split("\n\n")[0].splitlines()  # of the first core
        fields = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "amx_bf16" in fields.get("flags", "").split():
        name += " with AMX"
    parts = [name, f"{usable_cores()} cores", platform.system()]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        parts.append(torch.cuda.get_device_name())
    return ", ".join([*parts, f"Python {platform.python_version()}"])


def command() -> str:
    """Return the command line of this process, with the script relative to the current folder."""
    script, module = Path(sys.argv[0]), sys.modules["__main__"].__spec__
    if module is not None:
        return shlex.join(["python", "-m", module.name, *sys.argv[1:]])
    try:
        shown = str(script.resolve().relative_to(Path.cwd()))
    except ValueError:
        shown = script.name
    return shlex.join(["python", shown, *sys.argv[1:]])


@dataclass(frozen=True)
class Result:
    """One measured figure."""

    name: str
    value: float
    unit: str  # Unit of the value, "1" for a ratio
    goal: str = ""  # The goal in words; an empty string without one
    holds: bool | None = None  # Whether the goal was met; None without a goal
    command: str = field(default_factory=command)
    machine: str = field(default_factory=machine)
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())


def at_most(name: str, value: float, unit: str, limit: float) -> Result:
    """Return a figure whose goal is an upper limit."""
    return Result(name, value, unit, f"at most {limit:,g}", value <= limit)


def at_least(name: str, value: float, unit: str, limit: float) -> Result:
    """Return a figure whose goal is a lower limit."""
    return Result(name, value, unit, f"at least {limit:,g}", value >= limit)


def write_results(path: Path, rows: Iterable[Result], *, show: bool = False) -> None:
    """Write results to a JSON list, replacing those of the same name and keeping the others."""
    measured = list(rows)  # before the file is read: it may take hours
    merged = (
        {row["name"]: row for row in json.loads(path.read_text("utf-8"))} if path.exists() else {}
    )
    for row in measured:
        merged[row.name] = asdict(row)
        if show:
            print(f"{row.value:10.5g} {row.unit:18} {row.goal:34} {row.holds!s:5} {row.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(merged.values()), indent=2) + "\n", encoding="utf-8")


def run_missing(
    work: Callable[..., Any],
    jobs: Mapping[Path, Sequence[Any]],
    *,
    side_by_side: int = 1,
    write_only: bool = False,
    label: str = "",
    quiet: bool = False,
) -> dict[Path, Any]:
    """Run every job whose file is missing, and return the content of all finished files."""
    done = {file: json.loads(file.read_text("utf-8")) for file in jobs if file.exists()}
    missing = {} if write_only else {f: given for f, given in jobs.items() if f not in done}
    with tqdm(total=len(jobs), initial=len(done), desc=label, disable=quiet, unit="run") as bar:
        if side_by_side <= 1:
            for file, given in missing.items():
                done[file] = _run_and_keep(work, file, given)
                bar.update(1)
        elif missing:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(
                side_by_side, mp_context=context, initializer=_end_with_caller
            ) as pool:
                pending = {
                    pool.submit(_run_and_keep, work, f, given): f for f, given in missing.items()
                }
                for ended in as_completed(pending):
                    done[pending[ended]] = ended.result()
                    bar.update(1)
    return {file: done[file] for file in jobs if file in done}


def _run_and_keep(work: Callable[..., Any], file: Path, given: Sequence[Any]) -> Any:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(work(*given))
    write_atomically(file, text)
    return json.loads(text)


def _end_with_caller() -> None:
    """End this process when the one that started it is killed; it would hold its run for hours."""
    caller = multiprocessing.parent_process()
    assert caller is not None

    def wait() -> None:
        caller.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
