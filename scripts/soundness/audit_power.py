"""What the audit sees: faults of the gate's noise, true claims, and how near its bounds come.

Writes rows to ``docs/results/soundness.json``. Can be stopped and called again: what ``--kept``
holds is not measured twice. About 25 minutes on one core.

    python -m scripts.soundness.audit_power
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dprlhf.audit.one_run import CANARIES, audit_plan
from dprlhf.privacy.plan import Plan, make_plan
from dprlhf.runs.measurements import Result, at_least, at_most, run_missing, write_results
from helpers.broken_gates import BROKEN, SMALL, break_gate

OUT = Path(__file__).resolve().parents[2] / "docs" / "results" / "soundness.json"

PARTITIONS = ("random-allocation", "fixed", "stream", "poisson")
EPSILONS = (1.0, 2.0, 4.0, 8.0)
USERS, LARGE, ROUNDS, DELTA = 568, 1064, 8, 1e-5  # 64 of the users are probes
BOUNDS = 3
CORRECT = "correct"


@functools.cache
def plan_of(partition: Any, epsilon: float) -> Plan:
    """Return the plan of a cell; the search for its noise takes seconds."""
    return make_plan(users=USERS, rounds=ROUNDS, delta=DELTA, partition=partition, epsilon=epsilon)


def larger(plan: Plan, users: int) -> Plan:
    """Return the plan for more users, with the same noise."""
    return dataclasses.replace(plan, users=users, expected_batch_size=users / ROUNDS)


def refuted(fault: str, partition: str, epsilon: float, audits: int) -> int:
    """Return how many audits refute a plan whose gate has a fault, or none."""
    plan = larger(plan_of(partition, epsilon), LARGE if fault in SMALL else USERS)
    with pytest.MonkeyPatch.context() as patch:
        if fault != CORRECT:
            break_gate(patch, (BROKEN | SMALL)[fault])
        return sum(
            not audit_plan(plan, secrets.token_bytes(32), state=False).holds for _ in range(audits)
        )


def bound(partition: str, epsilon: float, number: int) -> float:
    """Return the lower bound over ε of an audit with as many canaries as it has by default."""
    plan = larger(plan_of(partition, epsilon), CANARIES + 64)
    return float(audit_plan(plan, secrets.token_bytes(32)).bound) / epsilon


def fault_rows(kept: Path, audits: int) -> list[Result]:
    """Count refutations in every cell, with correct noise and with each fault."""
    rows = []
    for fault in (CORRECT, *BROKEN, *SMALL):
        epsilons = (4.0,) if fault in SMALL else EPSILONS
        count = 2 * audits if fault == CORRECT else audits
        cells = itertools.product((fault,), PARTITIONS, epsilons, (count,))
        jobs = {kept / f"{'-'.join(map(str, cell))}.json": cell for cell in cells}
        users = LARGE if fault in SMALL else USERS
        unit = f"of {count} audits ({users - 64:,} canaries, {ROUNDS} rounds, vectors through"
        unit += " partition, clipping, ledger and gate)"
        shares = []
        for file, found in run_missing(refuted, jobs, label=fault).items():
            name = f"audit refutes, noise {fault}: {jobs[file][1]}, epsilon {jobs[file][2]:g}"
            good = found <= 0.05 * count if fault == CORRECT else found >= 0.95 * count
            goal = "at most 5 of 100" if fault == CORRECT else "at least 95 of 100"
            rows.append(Result(name, found, unit, goal, good))
            shares.append(found / count)
        unit = f"1, of {count * len(jobs)} audits in {len(jobs)} cells"
        if fault == CORRECT:
            alarms = float(np.mean(shares))
            rows.append(at_most("audit: false alarms over all cells", alarms, unit, 0.05))
        else:
            name = f"audit refutes, noise {fault}: weakest cell"
            rows.append(at_least(name, min(shares), unit, 0.95))
    return rows


def bound_rows(kept: Path) -> list[Result]:
    """Measure how near lower bounds come to ε."""
    cells = itertools.product(PARTITIONS[:3], EPSILONS)
    rows = []
    for partition, epsilon in [*cells, ("poisson", 4.0)]:
        jobs = {
            kept / f"bound-{partition}-{epsilon:g}-{number}.json": (partition, epsilon, number)
            for number in range(BOUNDS)
        }
        value = float(np.median([*run_missing(bound, jobs, quiet=True).values()]))
        name = f"audit's lower bound over epsilon: {partition}, epsilon {epsilon:g}"
        unit = f"1, median of {BOUNDS} audits of {CANARIES:,} canaries, vectors"
        if partition in ("fixed", "stream"):
            rows.append(at_least(name, value, unit, 0.7))
        elif (partition, epsilon) == ("random-allocation", 4.0):
            rows.append(at_least(name, value, unit, 0.5))
        else:
            rows.append(Result(name, value, unit))
    return rows


def main() -> None:
    """Measure what is missing, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--audits", type=int, default=100, help="of a broken gate")
    parser.add_argument("--kept", type=Path, default=Path("runs/audit_power"))
    given = parser.parse_args()
    write_results(OUT, fault_rows(given.kept, given.audits), show=True)
    write_results(OUT, bound_rows(given.kept), show=True)


if __name__ == "__main__":
    main()
