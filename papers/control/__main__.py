"""Run the control tables; write the results, and a table beside the papers' figures.

    python -m papers.control --table hz --seeds 10 --jobs 2

Finished runs are kept: a second call continues there.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dprlhf.runs.measurements import Result, write_results
from papers.control.bandits import RATES
from papers.control.tables import (
    BANDIT_EPSILONS,
    BANDIT_USERS,
    ISSP_USERS,
    TABLES,
    TableRow,
    run_table,
)

ROOT = Path(__file__).resolve().parents[2]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m papers.control", description=__doc__)
    parser.add_argument("--table", choices=[*TABLES, "all"], default="all")
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds for each row")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--only", default="", help="run only rows whose name contains this text")
    parser.add_argument("--recipes", type=Path, default=ROOT / "recipes" / "control")
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "control")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="has the folder results/")
    parser.add_argument("--write-only", action="store_true", help="write what is finished")
    given = parser.parse_args(words)
    if min(given.seeds, given.jobs) < 1:
        parser.error("--seeds and --jobs are 1 or more")
    shared = {"seeds": given.seeds, "recipes": given.recipes, "cache": given.cache}
    if not given.write_only:
        for name in TABLES if given.table == "all" else [given.table]:
            run_table(name, jobs=given.jobs, only=given.only, **shared)
    finished = {name: run_table(name, write_only=True, quiet=True, **shared) for name in TABLES}
    command = f"python -m papers.control --table {given.table} --seeds {given.seeds}"
    print(write(finished, given.out, command, given.seeds))


def write(measured: dict[str, list[TableRow]], out: Path, command: str, seeds: int) -> str:
    """Write ``results/control.json`` and ``results/control.md``, and return the table."""
    results = results_of([row for rows in measured.values() for row in rows], command)
    write_results(out / "results" / "control.json", results)
    text = markdown(measured, seeds)
    (out / "results" / "control.md").write_text(text, encoding="utf-8")
    return text


def results_of(measured: Sequence[TableRow], command: str) -> list[Result]:
    """Return a result of each row, with its standard deviation, and the fitted slopes."""
    results = []

    def add(name: str, value: float, unit: str, goal: str = "", holds: bool | None = None) -> None:
        results.append(Result(f"control/{name}", float(value), unit, goal, holds, command))

    for row in measured:
        values = row.values[np.isfinite(row.values)]
        if not len(values) or row.kind == "bandit":
            continue
        goals = [] if row.goal is None else [f"at least {row.goal:g}"]
        goals += [f"paper: {row.paper}"] if row.paper else []
        holds = None if row.goal is None else bool(values.mean() >= row.goal)
        unit = "regret" if row.group.startswith("riverswim") else "return"
        unit += f", mean of {len(values)} seeds"
        add(row.name, values.mean(), unit, "; ".join(goals), holds)
        add(f"{row.name}/standard deviation", values.std(), unit)
        first = row.runs[0]
        if first.get("noise_multiplier") is not None and first["epsilon"] != "infinity":
            about = f"ε at δ = {first['delta']:g}, {first['adjacency']}"
            add(f"{row.name}/epsilon", first["epsilon"], about)
    for row in measured:
        if row.kind == "regret" and (best := best_ucbvi(row, measured)) is not None:
            ratio = row.values.mean() / best.values.mean()
            goal = f"half of UCB-VI's regret or less ({best.name}: the best of its settings)"
            add(f"{row.name}/over best UCB-VI", ratio, "1", goal, bool(ratio <= 0.5))
    for (update, epsilon), (slope, last, users) in slopes(measured).items():
        bound, rate = RATES[update]
        start = f"bandit/{update}/epsilon={epsilon:g}"
        if math.isfinite(slope):
            goal = f"at most {bound:.3f} ({rate})" if bound else ""
            # A bound: a steeper fall keeps it. Fitted slopes err by 0.05 or so.
            holds = slope <= bound if bound else None
            add(f"{start}/slope", slope, "log suboptimality / log N", goal, holds)
        add(f"{start}/suboptimality", last, f"J* − J at N = {users:.0f}")
    return results


def best_ucbvi(row: TableRow, measured: Sequence[TableRow]) -> TableRow | None:
    """Return the UCB-VI row of a row's task and ε with the least regret, over its settings."""
    epsilon = row.settings["privacy.epsilon"]
    rows = [r for r in measured if r.kind == "ucbvi" and r.group == row.group]
    rows = [r for r in rows if r.settings["epsilon"] == epsilon]
    return min(rows, key=lambda row: float(row.values.mean()), default=None)


def slopes(measured: Sequence[TableRow]) -> dict[tuple[str, float], tuple[float, float, float]]:
    """Return the slope of log suboptimality by log N, suboptimality at the largest N, and that N.

    By update and ε. The slope is NaN where fewer than three N were not refused.
    """
    out = {}
    for update in RATES:
        for epsilon in BANDIT_EPSILONS:
            means = {
                float(row.settings["users"]): float(row.values.mean())
                for row in measured
                if row.kind == "bandit"
                and (row.settings["update"], row.settings["epsilon"]) == (update, epsilon)
                and np.isfinite(row.values).all()
            }
            if means:
                users, values = list(means), list(means.values())
                enough = len(users) >= 3
                slope = np.polyfit(np.log(users), np.log(values), 1)[0] if enough else math.nan
                out[update, epsilon] = float(slope), values[-1], users[-1]
    return out


def markdown(measured: dict[str, list[TableRow]], seeds: int) -> str:
    """Return the tables, what was measured beside what the papers print."""
    lines = [
        "# Control, dosing and bandits: measured",
        "",
        f"Written by `python -m papers.control`: mean ± standard deviation over {seeds} seeds of"
        " the final released policy on fresh simulated trajectories. ε is an upper bound. Rows with"
        " add-remove were measured before zero-out became the default; the same ε holds under"
        " zero-out. Settings were tuned on fresh simulated users (other seeds), not on those of the"
        " table.",
    ]
    for table, rows in measured.items():
        shown = [row for row in rows if row.kind != "bandit"]
        if not shown:
            continue
        usual = Counter(map(_terms, shown)).most_common(1)[0][0]
        lines += [
            "", f"## {table}", "", f"δ, adjacency and partition: {usual}, unless a row has others.",
            "", "| row | d | ε | measured | paper | goal | |", "|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        lines += [_line(row, rows, usual) for row in shown]
    fitted = slopes([row for rows in measured.values() for row in rows])
    if fitted:
        lines += [
            "", "## Sample complexity on bandits", "",
            f"J* − J of the final policy at N = {BANDIT_USERS[-1]:,} users"
            f" ({ISSP_USERS[-1]:,} for issp, which refuses few);"
            " zero-out, δ = 1e-5 (0 for the exponential mechanism), parallel composition over fixed"
            " batches. In brackets the slope of log suboptimality by log N, from"
            f" N = {BANDIT_USERS[0]:,} ({ISSP_USERS[0]:,}), where three N or more were not refused."
            " The papers' rates are upper bounds, so a steeper slope keeps them.", "",
            "| update | " + " | ".join(f"ε = {_epsilon(e)}" for e in BANDIT_EPSILONS)
            + " | He & Zhou |",
            "|---" * (len(BANDIT_EPSILONS) + 2) + "|",
        ]  # fmt: skip
        for update, (_, rate) in RATES.items():
            cells = []
            for epsilon in BANDIT_EPSILONS:
                slope, last, _ = fitted.get((update, epsilon), (math.nan, math.nan, 0.0))
                cell = "refused" if math.isnan(last) else f"{last:.4f}"
                cells.append(cell + (f" ({slope:+.2f})" if math.isfinite(slope) else ""))
            lines.append(f"| {update} | " + " | ".join(cells) + f" | {rate} |")
    return "\n".join(lines) + "\n"


def _terms(row: TableRow) -> str:
    first = row.runs[0]
    return f"{first['delta']:g}, {first['adjacency']}, {first['partition']}"


def _line(row: TableRow, rows: list[TableRow], usual: str) -> str:
    """Return a row of a table, with its terms where they are not the table's ``usual`` ones."""
    first, values = row.runs[0], row.values
    goal = "" if row.goal is None else f"≥ {row.goal:g}"
    mark = "" if row.goal is None else ("yes" if values.mean() >= row.goal else "**no**")
    if row.kind == "regret" and (best := best_ucbvi(row, rows)) is not None:
        ratio = values.mean() / best.values.mean()
        goal = "≤ 0.5 × the best UCB-VI"
        mark = f"{'yes' if ratio <= 0.5 else '**no**'} ({ratio:.2f})"
    notes = [note for note in (row.note, _terms(row)) if note and note != usual]
    name = row.name + (f" ({'; '.join(notes)})" if notes else "")
    return (
        f"| {name} | {first.get('dimension', '')} | {_epsilon(float(first['epsilon']))} |"
        f" {values.mean():.1f} ± {values.std():.1f} | {row.paper} | {goal} | {mark} |"
    )


def _epsilon(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.3g}"


if __name__ == "__main__":
    main()
