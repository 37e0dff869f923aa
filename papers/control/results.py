"""From finished runs to results on file, and tables beside the papers' numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dprlhf.runs.measurements import Result, write_results
from papers.control.bandits import PAPER_RATE, SLOPE
from papers.control.run_rows import MeasuredRow
from papers.control.tables import BANDIT_EPSILONS, BANDIT_UPDATES, BANDIT_USERS, ISSP_USERS


def write(measured: dict[str, list[MeasuredRow]], out: Path, command: str, seeds: int) -> str:
    """Write ``results/control.json`` and ``results/control.md``, and return the table."""
    everything = [row for rows in measured.values() for row in rows]
    results = rows_of(everything, command)
    write_results(out / "results" / "control.json", results)
    text = markdown(measured, seeds)
    (out / "results" / "control.md").write_text(text, encoding="utf-8")
    return text


def rows_of(measured: Sequence[MeasuredRow], command: str) -> list[Result]:
    """Return a result of each row, with its standard deviation, and the fitted slopes."""
    results = []
    for row in measured:
        values = row.values[np.isfinite(row.values)]
        if not len(values) or row.row.group == "bandit":
            continue
        name, mean = f"control/{row.row.name}", float(values.mean())
        goal = row.row.goal
        text = "" if goal is None else f"at least {goal:g}"
        if row.row.paper:
            text += f"{'; ' if text else ''}paper: {row.row.paper}"
        holds = None if goal is None else mean >= goal
        unit = "regret" if row.row.group.startswith("riverswim") else "return"
        unit += f", mean of {len(values)} seeds"
        results.append(Result(name, mean, unit, text, holds, command=command))
        results.append(
            Result(f"{name}/standard deviation", float(values.std()), unit, command=command)
        )
        if row.runs[0].get("noise_multiplier") is not None:
            shown = row.runs[0]["epsilon"]
            spent = math.inf if shown == "infinity" else float(shown)
            if math.isfinite(spent):
                about = f"ε at δ = {row.runs[0]['delta']:g}, {row.runs[0]['adjacency']}"
                results.append(Result(f"{name}/epsilon", spent, about, command=command))
    for row in measured:
        if row.row.kind != "regret" or not row.runs:
            continue
        best = best_ucbvi(measured, row.row.group, float(row.row.settings["privacy.epsilon"]))
        if best is None:
            continue
        ratio = float(row.values.mean() / best.values.mean())
        results.append(
            Result(
                f"control/{row.row.name}/over best UCB-VI", ratio, "1",
                f"half of UCB-VI's regret or less ({best.row.name}: the best of its settings)",
                ratio <= 0.5, command=command,
            )
        )  # fmt: skip
    for update, epsilon, slope, last, users in slopes(measured):
        bound = SLOPE.get(update)
        start = f"control/bandit/{update}/epsilon={epsilon:g}"
        if math.isfinite(slope):
            results.append(
                Result(
                    f"{start}/slope", slope, "log suboptimality / log N",
                    f"at most {bound:.3f} ({PAPER_RATE[update]})" if bound else "",
                    # A bound: a steeper fall keeps it. Fitted slopes err by 0.05 or so.
                    slope <= bound if bound else None,
                    command=command,
                )
            )  # fmt: skip
        unit = f"J* − J at N = {users:.0f}"
        results.append(Result(f"{start}/suboptimality", last, unit, command=command))
    return results


def best_ucbvi(measured: Sequence[MeasuredRow], group: str, epsilon: float) -> MeasuredRow | None:
    """Return the UCB-VI row of a group with the least regret, over mechanisms and bonuses."""
    rows = [
        row
        for row in measured
        if row.row.kind == "ucbvi" and row.row.group == group
        and row.row.settings["epsilon"] == epsilon and row.runs
    ]  # fmt: skip
    return min(rows, key=lambda row: float(row.values.mean()), default=None)


def slopes(measured: Sequence[MeasuredRow]) -> list[tuple[str, float, float, float, float]]:
    """Return (update, ε, slope of log suboptimality by log N, suboptimality at N, largest N)."""
    out = []
    for update in BANDIT_UPDATES:
        for epsilon in BANDIT_EPSILONS:
            users, means = [], []
            for row in measured:
                settings, values = row.row.settings, row.values
                if row.row.group != "bandit" or settings["update"] != update:
                    continue
                if settings["epsilon"] == epsilon and len(values) and np.isfinite(values).all():
                    users.append(float(settings["users"]))
                    means.append(float(values.mean()))
            if not users:
                continue
            fitted = math.nan
            if len(users) >= 3:
                fitted = float(np.polyfit(np.log(users), np.log(means), 1)[0])
            out.append((update, epsilon, fitted, means[-1], users[-1]))
    return out


def markdown(measured: dict[str, list[MeasuredRow]], seeds: int) -> str:
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
        shown = [row for row in rows if row.row.group != "bandit" and row.runs]
        if not shown:
            continue
        usual = Counter(map(_terms, shown)).most_common(1)[0][0]
        lines += [
            "", f"## {table}", "", f"δ, adjacency and partition: {usual}, unless a row has others.",
            "", "| row | d | ε | measured | paper | goal | |", "|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        lines += [_line(row, rows, usual) for row in shown]
    everything = [row for rows in measured.values() for row in rows]
    fitted = slopes(everything)
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
        for update in BANDIT_UPDATES:
            cells = []
            for epsilon in BANDIT_EPSILONS:
                hit = [f for f in fitted if f[:2] == (update, epsilon)]
                slope = f" ({hit[0][2]:+.2f})" if hit and math.isfinite(hit[0][2]) else ""
                cells.append(f"{hit[0][3]:.4f}{slope}" if hit else "refused")
            lines.append(f"| {update} | " + " | ".join(cells) + f" | {PAPER_RATE[update]} |")
    return "\n".join(lines) + "\n"


def _terms(row: MeasuredRow) -> str:
    """Return δ, adjacency and partition of a row."""
    first = row.runs[0]
    return f"{first['delta']:g}, {first['adjacency']}, {first['partition']}"


def _line(row: MeasuredRow, rows: list[MeasuredRow], usual: str) -> str:
    """Return a row of a table, with its terms where they are not the table's ``usual`` ones."""
    first, values = row.runs[0], row.values
    epsilon = first["epsilon"]
    spent = "∞" if epsilon == "infinity" else f"{float(epsilon):.3g}"
    goal = "" if row.row.goal is None else f"≥ {row.row.goal:g}"
    mark = "" if row.row.goal is None else ("yes" if values.mean() >= row.row.goal else "**no**")
    if row.row.kind == "regret":
        best = best_ucbvi(rows, row.row.group, float(row.row.settings["privacy.epsilon"]))
        if best is not None:
            ratio = values.mean() / best.values.mean()
            goal = "≤ 0.5 × the best UCB-VI"
            mark = f"{'yes' if ratio <= 0.5 else '**no**'} ({ratio:.2f})"
    notes = [row.row.note] if row.row.note else []
    notes += [_terms(row)] if _terms(row) != usual else []
    name = row.row.name + (f" ({'; '.join(notes)})" if notes else "")
    return (
        f"| {name} | {first.get('dimension', '')} | {spent} |"
        f" {values.mean():.1f} ± {values.std():.1f} | {row.row.paper} | {goal} | {mark} |"
    )


def _epsilon(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:g}"
