"""What the audit sees: faults of the gate's noise, true claims, and how near its bounds come.

Writes rows to ``docs/results/soundness.json``. Can be stopped and called again: what ``--cache``
holds is not measured twice. About 25 minutes on one core.

    python -m scripts.soundness.audit_power [faults] [bounds] [trainer]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dprlhf.audit.one_run import CANARIES, audit, audit_plan
from dprlhf.privacy.plan import Plan, make_plan
from dprlhf.recipe import make_recipe
from dprlhf.runs.measurements import Result, write_results

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "results" / "soundness.json"
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None

PARTITIONS = ("random-allocation", "fixed", "stream", "poisson")
EPSILONS = (1.0, 2.0, 4.0, 8.0)
USERS, LARGE, ROUNDS, DELTA = 568, 1064, 8, 1e-5  # 64 of the users are probes
AUDITS, CORRECT, BOUNDS = 100, 200, 3  # --audits and --correct take fewer


class _Patch:
    """The one method of pytest's ``monkeypatch`` that a broken gate needs."""

    def __init__(self) -> None:
        self.patches: list[Any] = []

    def setattr(self, target: Any, name: str, value: Any) -> None:
        patch = mock.patch.object(target, name, value)
        patch.start()
        self.patches.append(patch)

    def undo(self) -> None:
        for patch in reversed(self.patches):
            patch.stop()


@functools.cache
def plan_of(partition: Any, epsilon: float) -> Plan:
    """Return the plan of a cell; the search for its noise takes seconds."""
    return make_plan(users=USERS, rounds=ROUNDS, delta=DELTA, partition=partition, epsilon=epsilon)


def refuted_of(plan: Plan, fault: Any, count: int) -> int:
    """Return how many of so many audits refute a plan whose gate has a fault; None is no fault."""
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.broken_gates import break_gate

    patch = _Patch()
    if fault is not None:
        break_gate(patch, fault)
    try:
        return sum(
            not audit_plan(plan, secrets.token_bytes(32), state=False).holds for _ in range(count)
        )
    finally:
        patch.undo()


def faults(
    cache: dict[str, Any],
    keep: Any,
    only: Sequence[str] = PARTITIONS,
    size: tuple[int, int] = (CORRECT, AUDITS),
) -> None:
    """Count refutations in every cell, with correct noise and with each fault."""
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.broken_gates import BROKEN, SMALL

    every = {"correct": None} | BROKEN | SMALL
    for partition in only:
        for epsilon in EPSILONS:
            for name, fault in every.items():
                key = f"faults/{name}/{partition}/{epsilon:g}"
                if key in cache or (name in SMALL and epsilon != 4):
                    continue
                users = LARGE if name in SMALL else USERS
                plan = dataclasses.replace(plan_of(partition, epsilon), users=users)
                plan = dataclasses.replace(plan, expected_batch_size=users / ROUNDS)
                start = time.monotonic()
                audits = size[0 if fault is None else 1]
                cache[key] = [refuted_of(plan, fault, audits), audits]
                keep()
                print(f"{key}: {cache[key][0]} ({time.monotonic() - start:.0f} s)", flush=True)


def bounds(cache: dict[str, Any], keep: Any, only: Sequence[str] = PARTITIONS) -> None:
    """Measure lower bounds with as many canaries as an audit has by default."""
    for partition in only:
        for epsilon in EPSILONS if partition != "poisson" else (4.0,):
            key = f"bounds/{partition}/{epsilon:g}"
            found = cache.setdefault(key, [])
            while len(found) < BOUNDS:
                users = CANARIES + 64
                plan = dataclasses.replace(plan_of(partition, epsilon), users=users)
                plan = dataclasses.replace(plan, expected_batch_size=users / ROUNDS)
                result = audit_plan(plan, secrets.token_bytes(32))
                found.append(result.bound / epsilon)
                keep()
                print(f"{key}: {found[-1]:.3f}", flush=True)


def trainer(cache: dict[str, Any], keep: Any, only: Sequence[str] = PARTITIONS) -> None:
    """Audit recipes at the default size, through the trainer, and time it."""
    for partition, epsilon in (("fixed", 1.0), ("random-allocation", 4.0), ("poisson", 4.0)):
        key = f"trainer/{partition}/{epsilon:g}"
        if key in cache or partition not in only:
            continue
        privacy = {"epsilon": epsilon, "delta": DELTA, "partition": partition}
        recipe = make_recipe(
            {
                "policy": {"model_name_or_path": "bandit"},
                "data": {"path": "none"},
                "rewards": [{"function": "none"}],
                "privacy": privacy,
                "rounds": ROUNDS,
            }
        )
        start = time.monotonic()
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            found = audit(recipe, f"{folder}/audit", quiet=True)
        cache[key] = [found.bound / epsilon, time.monotonic() - start, found.holds]
        keep()
        print(f"{key}: {cache[key]}", flush=True)


def fault_rows(cache: dict[str, Any]) -> list[Result]:
    """Return the rows of :func:`faults`: one for each cell, the weakest, and the false alarms."""
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.broken_gates import SMALL

    names = sorted({key.split("/")[1] for key in cache if key.startswith("faults/")})
    rows = []
    for name in names:
        users = LARGE if name in SMALL else USERS
        size = (
            f"audits ({users - 64:,} canaries, {ROUNDS} rounds, vectors through partition,"
            " clipping, ledger and gate)"
        )
        cells = {
            key.removeprefix(f"faults/{name}/"): cache[key]
            for key in cache
            if key.startswith(f"faults/{name}/")
        }
        wanted = len(PARTITIONS) * (1 if name in SMALL else len(EPSILONS))
        complete = len(cells) >= wanted
        for cell, (count, audits) in cells.items():
            good = count <= 0.05 * audits if name == "correct" else count >= 0.95 * audits
            goal = "at most 5 of 100" if name == "correct" else "at least 95 of 100"
            partition, epsilon = cell.split("/")
            label = f"audit refutes, noise {name}: {partition}, epsilon {epsilon}"
            rows.append(Result(label, count, f"of {audits} {size}", goal, good))
        refuted = sum(count for count, _ in cells.values())
        audits = sum(audits for _, audits in cells.values())
        unit = f"1, of {audits} audits in {len(cells)} of {wanted} cells"
        if name == "correct":
            label, share, goal = (
                "audit: false alarms over all cells",
                refuted / audits,
                "at most 0.05",
            )
            good = complete and share <= 0.05
        else:
            label = f"audit refutes, noise {name}: weakest cell"
            share = min(count / audits for count, audits in cells.values())
            goal = "at least 0.95 in every cell"
            good = complete and share >= 0.95
        rows.append(Result(label, share, unit, goal, good))
    return rows


def bound_rows(cache: dict[str, Any]) -> list[Result]:
    """Return the rows of :func:`bounds` and :func:`trainer`."""
    rows = []
    for key, found in cache.items():
        part, partition, epsilon = key.split("/")[:3] if "/" in key else (key, "", "")
        if part not in ("bounds", "trainer") or not found:
            continue
        goal, holds, value = "", None, found[0]
        if part == "bounds":
            value = float(np.median(found))
        if partition in ("fixed", "stream"):
            goal, holds = "at least 0.7", value >= 0.7
        elif (partition, epsilon) == ("random-allocation", "4"):
            goal, holds = "at least 0.5", value >= 0.5
        what = f"{partition}, epsilon {epsilon}"
        if part == "bounds":
            unit = f"1, median of {len(found)} audits of {CANARIES:,} canaries, vectors"
            rows.append(
                Result(f"audit's lower bound over epsilon: {what}", value, unit, goal, holds)
            )
            continue
        unit = f"1, one audit of {CANARIES:,} canaries through the trainer"
        rows.append(
            Result(f"audit's lower bound over epsilon, trainer: {what}", value, unit, goal, holds)
        )
        name = f"audit at default size, trainer, one busy core: {what}"
        rows.append(Result(name, found[1], "s", "at most 300", found[1] <= 300))
    return rows


def main() -> None:
    """Measure the parts that are named, all by default, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=["faults", "bounds", "trainer", []])
    parser.add_argument("--partitions", nargs="*", default=PARTITIONS, choices=PARTITIONS)
    parser.add_argument("--audits", type=int, default=AUDITS, help="audits of a broken gate")
    parser.add_argument("--correct", type=int, default=CORRECT, help="audits of a sound one")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "audit_power.json")
    parser.add_argument("--write-only", action="store_true", help="measure nothing, write the rows")
    given = parser.parse_args()
    given.cache.parent.mkdir(parents=True, exist_ok=True)
    cache = json.loads(given.cache.read_text()) if given.cache.exists() else {}

    def keep() -> None:
        fresh = given.cache.with_suffix(".tmp")
        fresh.write_text(json.dumps(cache))
        os.replace(fresh, given.cache)

    for name, measure in (("faults", faults), ("bounds", bounds), ("trainer", trainer)):
        if not given.write_only and (not given.parts or name in given.parts):
            more = ((given.correct, given.audits),) if name == "faults" else ()
            measure(cache, keep, given.partitions, *more)
    if given.write_only or tuple(given.partitions) == PARTITIONS:
        write_results(OUT, [*fault_rows(cache), *bound_rows(cache)])


if __name__ == "__main__":
    main()
