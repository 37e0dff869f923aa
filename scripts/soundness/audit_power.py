"""What the audit sees: faults of the gate's noise, true claims, and how near its bounds come.

Writes rows to ``docs/results/soundness.json``. Can be stopped and called again: what ``--cache``
holds is not measured twice. About 25 minutes on one core.

    python -m scripts.soundness.audit_power [faults] [bounds] [trainer]
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
import time
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
USERS, ROUNDS, DELTA = 1064, 8, 1e-5  # 1,000 canaries and 64 probes
AUDITS, CORRECT, BOUNDS = 100, 500, 5


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


def plan_of(partition: Any, epsilon: float, cache: dict[str, Any], releases: int = 1) -> Plan:
    """Return the plan of a cell; the search for its noise is kept, since it takes seconds."""
    key = f"plan/{partition}/{epsilon:g}/{releases}"
    given = {
        "users": USERS, "rounds": ROUNDS, "delta": DELTA, "partition": partition,
        "releases_per_round": releases,
    }  # fmt: skip
    if key not in cache:
        cache[key] = make_plan(epsilon=epsilon, **given).noise_multiplier
    return make_plan(noise_multiplier=cache[key], **given)


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


def faults(cache: dict[str, Any], keep: Any) -> None:
    """Count refutations in every cell, with correct noise and with each fault."""
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.broken_gates import BROKEN, SMALL

    every = {"correct": None} | BROKEN | SMALL
    for partition in PARTITIONS:
        for epsilon in EPSILONS:
            for name, fault in every.items():
                key = f"faults/{name}/{partition}/{epsilon:g}"
                if key in cache:
                    continue
                plan, start = plan_of(partition, epsilon, cache), time.monotonic()
                count = refuted_of(plan, fault, CORRECT if fault is None else AUDITS)
                cache[key] = 100 * count / CORRECT if fault is None else count
                keep()
                print(f"{key}: {cache[key]} ({time.monotonic() - start:.0f} s)", flush=True)


def bounds(cache: dict[str, Any], keep: Any) -> None:
    """Measure lower bounds with as many canaries as an audit has by default."""
    for partition in PARTITIONS:
        for epsilon in EPSILONS:
            z = plan_of(partition, epsilon, cache).noise_multiplier
            key = f"bounds/{partition}/{epsilon:g}"
            found = cache.setdefault(key, [])
            while len(found) < BOUNDS:
                plan = make_plan(
                    users=CANARIES + 64, rounds=ROUNDS, delta=DELTA, noise_multiplier=z,
                    partition=partition,
                )  # fmt: skip
                result = audit_plan(plan, secrets.token_bytes(32))
                found.append(result.bound / epsilon)
                keep()
                print(f"{key}: {found[-1]:.3f}", flush=True)


def trainer(cache: dict[str, Any], keep: Any) -> None:
    """Audit recipes at the default size, through the trainer, and time it."""
    for partition, epsilon in (("fixed", 1.0), ("random-allocation", 4.0), ("poisson", 4.0)):
        key = f"trainer/{partition}/{epsilon:g}"
        if key in cache:
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
    """Return the rows of :func:`faults`: one for each cell's weakest, and the false alarms."""
    names = sorted({key.split("/")[1] for key in cache if key.startswith("faults/")})
    size = (
        f"audits ({USERS - 64:,} canaries, {ROUNDS} rounds, vectors through partition, clipping,"
        " ledger and gate)"
    )
    rows = []
    for name in names:
        cells = {
            key.removeprefix(f"faults/{name}/"): cache[key]
            for key in cache
            if key.startswith(f"faults/{name}/")
        }
        complete = len(cells) == len(PARTITIONS) * len(EPSILONS)
        what = f"per 100 of {CORRECT} {size}" if name == "correct" else f"of {AUDITS} {size}"
        for cell, count in cells.items():
            good = count <= 5 if name == "correct" else count >= 95
            goal = "at most 5" if name == "correct" else "at least 95"
            partition, epsilon = cell.split("/")
            label = f"audit refutes, noise {name}: {partition}, epsilon {epsilon}"
            rows.append(Result(label, count, what, goal, good))
        if name == "correct":
            total = sum(cells.values())
            share = total / (100 * len(cells))
            rows.append(
                Result(
                    "audit: false alarms over all cells", share, "1", "at most 0.05",
                    complete and share <= 0.05,
                )
            )  # fmt: skip
        else:
            weakest = min(cells.values())
            rows.append(
                Result(
                    f"audit refutes, noise {name}: weakest cell", weakest, f"of {AUDITS} audits",
                    "at least 95 under every partition and epsilon", complete and weakest >= 95,
                )
            )  # fmt: skip
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
            measure(cache, keep)
    write_results(OUT, [*fault_rows(cache), *bound_rows(cache)])


if __name__ == "__main__":
    main()
