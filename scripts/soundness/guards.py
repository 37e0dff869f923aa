"""What files, logs, evaluations and copied models gave away about users, before and after.

Writes rows to ``docs/results/soundness.json``, in about two minutes on one core. With ``--before``
it measures an older source, which is to be first on the path::

    git worktree add ../before 94f8af2
    PYTHONPATH=../before/src python -m scripts.soundness.guards --before
    PYTHONPATH=src python -m scripts.soundness.guards
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "results" / "soundness.json"
sys.path.insert(0, str(ROOT / "tests"))

import dprlhf  # noqa: E402
from dprlhf.errors import DprlhfError  # noqa: E402
from dprlhf.recipe import make_recipe  # noqa: E402
from dprlhf.runs.earlier import read_earlier  # noqa: E402
from dprlhf.runs.measurements import Result, write_results  # noqa: E402
from dprlhf.runs.publish import merge  # noqa: E402
from helpers import runs, tiny  # noqa: E402

RUNS = 10
CHANCE = 0.632
"""Absolute value that the correlation of 10 unrelated pairs exceeds with probability 0.05."""


def trained(base: Path, name: str, **changes: Any) -> Path:
    """Train a tiny model on 120 users for four rounds, and return the run folder."""
    settings = {
        **runs.run_settings(str(base / "model")),
        "rounds": 4,
        "delta": 1e-3,
        "evaluation_prompts": ["a b", "c d"],
        "evaluation__every": 3,
        "output_dir": base / name,
    }
    dprlhf.train(**(settings | changes))
    return base / name


def times(base: Path) -> tuple[float, int]:
    """Return what file times say of the last round's size, and how many are the clock's.

    Returns:
        The correlation, over runs, of the time between two published files with the secret number
        of users; and the files outside ``secret/`` of the last run with a time of that run.
    """
    pairs = []
    for i in range(RUNS):
        start = time.time()
        run = trained(base, f"times-{i}")
        end = time.time()
        took = (run / "metrics.jsonl").stat().st_mtime
        took -= (run / "public-samples.jsonl").stat().st_mtime
        lines = (run / "secret/telemetry-0.jsonl").read_text().splitlines()
        pairs.append((took, json.loads(lines[3])["users"]))
        public = [p for p in run.rglob("*") if p.is_file() and p.parent.name != "secret"]
    clock = sum(start <= p.stat().st_mtime <= end for p in public)
    return float(np.corrcoef(np.array(pairs).T)[0, 1]), clock


def live_lines(base: Path) -> int:
    """Return how many lines a log gets from the start of round 1 to the end of the last."""
    log, seen = io.StringIO(), []
    with contextlib.redirect_stderr(log):
        trained(
            base, "log", quiet=False,
            callbacks=[lambda metrics: seen.append(log.getvalue())],
        )  # fmt: skip
    inside = seen[-1][len(seen[0]) :]
    return sum(bool(line.strip()) for line in re.split(r"[\r\n]|\x1b\[A", inside))


def refused(action: Any, *args: Any, **settings: Any) -> bool:
    """Return whether a call is refused for the users' sake; any other refusal is none."""
    try:
        action(*args, **settings)
    except DprlhfError as error:
        return any(text in str(error) for text in ("users' rows", "private", "is an adapter"))
    return False


def overlaps(base: Path) -> dict[str, bool]:
    """Return whether two evaluations on users' rows are accepted, before the model is loaded."""
    prompts = [f"user {i} says" for i in range(40)]
    (base / "set").mkdir()
    (base / "set/train.csv").write_text("prompt\n" + "\n".join(prompts) + "\n")
    common: dict[str, Any] = {
        "model": str(base / "absent"), "epsilon": 4.0, "rounds": 2, "output_dir": base / "none",
    }  # fmt: skip
    data = {"path": str(base / "set"), "split": "train[:90%]"}
    slices = refused(
        dprlhf.train,
        data=data,
        evaluation={"data": {**data, "split": "train[50%:]"}},
        rewards=[{"function": "builtins:len"}],
        **common,
    )
    equal = refused(
        dprlhf.train, prompts=prompts, evaluation_prompts=list(prompts), reward=len, **common
    )
    return {"slices of one split that overlap": not slices, "an equal list": not equal}


def lineage(base: Path) -> dict[str, bool]:
    """Return which copies of a run's model another run may start from at its own ε alone."""
    run = trained(base, "run")
    merge(run, base / "merged")
    copies = {
        "policy/ copied and renamed": shutil.copytree(run / "policy", base / "renamed"),
        "a merged model moved": shutil.copytree(base / "merged", base / "moved"),
    }
    for name, folder, kept in (
        ("a pushed adapter as PEFT loads it", run / "policy", r"adapter_.*"),
        ("a pushed merged model as transformers loads it", base / "merged", r"config.json|model.*"),
    ):
        copies[name] = base / name.replace(" ", "-")
        copies[name].mkdir()
        for file in folder.iterdir():
            if re.fullmatch(kept, file.name):
                shutil.copy(file, copies[name])
    accepted = {}
    for name, model in copies.items():
        recipe = make_recipe(
            {
                "policy": {"model_name_or_path": str(model)},
                "data": {"path": "prompts.csv"},
                "rewards": [{"function": "module:score"}],
                "privacy": {"epsilon": 4.0},
                "rounds": 10,
            }
        )
        accepted[name] = not refused(read_earlier, recipe)
    return accepted


def main() -> None:
    """Measure all of it and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", action="store_true", help="name the rows so; without goals")
    before = parser.parse_args().before
    when = "before" if before else "after"
    rows: list[Result] = []

    def row(name: str, value: float, unit: str, goal: str, holds: bool) -> None:
        value = float(value)
        told: dict[str, Any] = {} if before else {"goal": goal, "holds": holds}
        rows.append(Result(f"guards: {name}, {when}", value, unit, **told))
        print(rows[-1].name, value)

    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        tiny.save(base / "model")
        correlation, clock = times(base)
        row(
            f"correlation of file times with the size of a secret batch, {RUNS} runs",
            correlation, "1", f"below {CHANCE} (5% level of no relation)",
            abs(correlation) < CHANCE,
        )  # fmt: skip
        row("public files of a run with a time of the clock", clock, "files", "0", clock == 0)
        lines = live_lines(base)
        row("lines in a log from the first round to the last", lines, "lines", "0", lines == 0)
        for name, accepted in overlaps(base).items():
            row(f"evaluation accepted: {name}", accepted, "1", "0", not accepted)
        for name, accepted in lineage(base).items():
            row(f"epsilon stated alone: {name}", accepted, "1", "0", not accepted)
    write_results(OUT, rows)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
