"""Measured results as data: what was measured, against which goal, where, when and how."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dprlhf.hardware import usable_cores

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
    """Return the command line of this process, with the script relative to the current folder.

    ``--write-only`` and ``--runs FOLDER`` are left out: they say what is run again and where it is
    kept, not what is measured.
    """
    script = Path(sys.argv[0])
    try:
        shown = str(script.resolve().relative_to(Path.cwd()))
    except ValueError:
        shown = script.name
    given, words = [], iter(sys.argv[1:])
    for word in words:
        if word == "--runs":
            next(words, None)
        elif word != "--write-only" and not word.startswith("--runs="):
            given.append(word)
    return shlex.join(["python", shown, *given])


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


def write_results(path: Path, rows: Iterable[Result]) -> None:
    """Write results to a JSON list, replacing those of the same name and keeping the others."""
    merged = (
        {row["name"]: row for row in json.loads(path.read_text("utf-8"))} if path.exists() else {}
    )
    merged.update({row.name: asdict(row) for row in rows})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(merged.values()), indent=2) + "\n", encoding="utf-8")
