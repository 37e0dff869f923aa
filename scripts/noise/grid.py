"""Measure what share of the non-private gain is kept at which ε and with how many users.

    python scripts/noise/grid.py --model small --jobs 2                       # the whole grid
    python scripts/noise/grid.py --model small --cells 0.3:1500 none:1500 --seeds 5
    python scripts/noise/grid.py --model smollm2 --cells 1:300 none:300 --seeds 3 --tasks community
    python scripts/noise/grid.py --model small --tuning --methods subspace --cells 1:1500 \\
        --set optimizer.learning_rate=0.2        # try a setting on users outside the table

A cell is EPSILON:USERS; the cells none:USERS, without noise and clipping, are the reference, tuned
for itself. Two shares are stated: of the rise at the end, and of the area under the curve over the
rounds (the reward on held-out public prompts, measured after every second round). A seed draws the
adapter's start and which users take part; noise and rounds are fresh in each run. The users of the
table are the first ones of the private split, those for tuning the last 6,000. Finished runs are
kept and read again.

Writes docs/results/noise.json, and from it docs/results/noise-grid-MODEL.md and .png.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from dprlhf.runs.measurements import Result, write_results
from dprlhf.worth.models import FEW, METHODS, PLAIN, RESPONSES, base
from noise.many_runs import (
    ROOT,
    SMALL,
    TUNING_USERS,
    Job,
    options_of_runs,
    overrides_of,
    page,
    run_cells,
    small_policy,
)

EPSILONS = [0.1, 0.3, 1.0, 2.0, 4.0, 8.0, None]
USERS = [300, 500, 1500, 3000, 6000]
GOALS = {(0.3, 1500): 0.95, (1.0, 300): 0.95}
"""The cells with a goal, and the share that should be kept there."""
LEAST_SEEDS = 3
"""Fewer runs of a cell reach no goal, whatever their mean."""
FIRST_TUNING_SEED = 100
SHARES = ("rise", "area under the curve")
"""What a share is of: the non-private rise at the end, or its mean over the rounds."""
_RISE, _AREA = "rise of the reward", "mean rise over the rounds"
_ERROR = {_RISE: "standard error of the rise", _AREA: "standard error of the mean rise"}


@dataclass(frozen=True)
class Task:
    """A task: its recipe, the number of its private rows, and what it changes for a model.

    Attributes:
        recipe: Name of the recipe.
        users: Number of private rows.
        guides: Public rows of another kind than the users', for ``update.subspace``.
        small: Changes for the small model.
    """

    recipe: str
    users: int
    guides: dict[str, Any]
    small: dict[str, Any]


def _guides(asset: str, split: str) -> dict[str, Any]:
    return {
        "path": f"asset:{asset}", "split": split, "prompt_column": "text", "prompt_words": 8,
        "max_prompt_tokens": 16,
    }  # fmt: skip


WORDS = dict(SMALL["rewards"][0])
TASKS = {
    "demo": Task(
        "imdb_sentiment", 23_000, _guides("rotten-tomatoes", "train"), {"rewards": [WORDS]}
    ),
    "community": Task(
        "community",
        14_355,
        _guides("community", "sentences"),
        {"rewards": [{**WORDS, "times_column": "wants"}]},
    ),
}
BASES: dict[str, dict[str, Any]] = {model: base(model, ROOT) for model in METHODS}


@dataclass(frozen=True)
class Cell:
    """One place in the grid: a task, a method, ε (None without privacy) and the number of users."""

    task: str
    method: str
    epsilon: float | None
    users: int

    def name(self, model: str) -> str:
        """How the results call the cell."""
        epsilon = "no privacy" if self.epsilon is None else f"epsilon {self.epsilon:g}"
        return f"grid ({model}): {self.task}, {self.method}, {epsilon}, {self.users} users"

    def job(
        self, seed: int, model: str, policy: dict[str, Any], extra: dict[str, Any], tuning: bool
    ) -> Job:
        """Return the run of a seed."""
        task = TASKS[self.task]
        method = METHODS[model][self.method]
        if self.method != "today":
            few, many = RESPONSES
            method = {"rollout.responses": few if self.users <= FEW else many, **method}
        small = {**task.small, **policy} if model == "small" else {}
        pool = task.users - TUNING_USERS
        skip = seed * self.users % (pool - self.users + 1)
        if tuning:
            skip = pool + seed * self.users % (TUNING_USERS - self.users + 1)
        privacy = PLAIN if self.epsilon is None else {"privacy.epsilon": self.epsilon}
        settings = {
            **BASES[model],
            "evaluation.every": 2,
            **small,
            "data.limit": self.users,
            "data.skip": skip,
        }
        settings |= {**method, **privacy, **extra, "seed": seed}
        if "update.subspace" in settings:
            settings["update.subspace"] = {"data": task.guides, **settings["update.subspace"]}
        epsilon = "none" if self.epsilon is None else f"{self.epsilon:g}"
        name = f"{self.task}-{self.method}-epsilon-{epsilon}-users-{self.users}-seed-{seed}"
        return Job(name, task.recipe, overrides_of(settings))


@dataclass(frozen=True)
class Measured:
    """The runs of a cell, one value a seed: rise at the end, and mean rise over the rounds."""

    rise: list[float]
    area: list[float]


def measured(figures: list[dict[str, Any]]) -> Measured:
    """Return the rises of a cell's runs from their figures."""
    area = [float(np.mean([*f["public"], f["after"]])) - f["before"] for f in figures]
    return Measured([f["rise"] for f in figures], area)


@dataclass(frozen=True)
class Recorded:
    """What the results say of a cell: means over seeds with their standard errors.

    Attributes:
        seeds: Number of runs.
        rise: Rise of the reward at the end; its error is NaN for a single seed.
        area: Mean rise over the rounds; None where an earlier call could not tell it, because noise
            hid the reward of some of them.
        stated: Standard error of the share of the area, over the share, as calls stated it before
            the error of the area itself was kept; NaN for later ones.
    """

    seeds: int
    rise: tuple[float, float]
    area: tuple[float, float] | None
    stated: float


def error(values: list[float]) -> float:
    """Return the standard error of a mean; NaN for a single value, which has none."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else np.nan


def rows(model: str, done: dict[Cell, Measured]) -> Iterator[Result]:
    """Yield the results of each cell: number of seeds, rise and mean rise over the rounds."""
    for cell, values in done.items():
        name = cell.name(model)
        yield Result(f"{name}: seeds", len(values.rise), "1")
        for what, found in ((_RISE, values.rise), (_AREA, values.area)):
            if found:
                yield Result(f"{name}: {what}", float(np.mean(found)), "reward")
            if len(found) > 1:
                yield Result(f"{name}: {_ERROR[what]}", error(found), "reward")


def recorded(model: str, results: Path) -> dict[Cell, Recorded]:
    """Read every cell of a model from a results file, whichever call has measured it."""
    found = {row["name"]: row["value"] for row in json.loads(results.read_text())}
    done = {}
    for cell in (
        Cell(task, method, epsilon, users)
        for task in TASKS
        for method in METHODS[model]
        for users in USERS
        for epsilon in EPSILONS
    ):
        name = cell.name(model)
        if f"{name}: seeds" not in found:
            continue
        rise, area = (
            (found.get(f"{name}: {what}"), found.get(f"{name}: {_ERROR[what]}", np.nan))
            for what in (_RISE, _AREA)
        )
        whole = found.get(f"{name}: share of the non-private {SHARES[1]}", np.nan)
        stated = found.get(f"{name}: standard error of the share of the {SHARES[1]}", np.nan)
        seeds = int(found[f"{name}: seeds"])
        done[cell] = Recorded(seeds, rise, area if area[0] else None, abs(stated / whole))
    return done


def shares(done: dict[Cell, Recorded], cell: Cell) -> dict[str, tuple[float, float]]:
    """Return the shares that a private cell keeps, with standard errors by the delta method.

    Both runs are taken for independent. Empty without the reference.
    """
    kept, plain = done[cell], done.get(Cell(cell.task, "reference", None, cell.users))
    if plain is None or cell.epsilon is None:
        return {}
    found = {}
    for what, mine, of in zip(
        SHARES, (kept.rise, kept.area), (plain.rise, plain.area), strict=True
    ):
        if mine is not None and of is not None:
            ratio, relative = mine[0] / of[0], np.hypot(mine[1] / mine[0], of[1] / of[0])
            if what == SHARES[1] and np.isnan(relative):
                relative = kept.stated
            found[what] = (ratio, abs(ratio) * float(relative))
    return found


def share_rows(
    model: str, done: dict[Cell, Recorded], measured: Iterable[Cell]
) -> Iterator[Result]:
    """Yield the shares of the cells that were measured, or whose reference was."""
    new = set(measured)
    for cell, values in done.items():
        if not new & {cell, Cell(cell.task, "reference", None, cell.users)}:
            continue
        name = cell.name(model)
        goal = GOALS.get((cell.epsilon, cell.users)) if cell.method != "today" else None
        for what, (part, uncertain) in shares(done, cell).items():
            wanted: tuple[str, bool | None] = ("", None)
            if goal is not None:
                least = f"at least {goal}, with {LEAST_SEEDS} seeds or more"
                wanted = (least, part >= goal and values.seeds >= LEAST_SEEDS)
            yield Result(f"{name}: share of the non-private {what}", part, "1", *wanted)
            if np.isfinite(uncertain):
                yield Result(f"{name}: standard error of the share of the {what}", uncertain, "1")


def tables(done: dict[Cell, Recorded]) -> Iterator[str]:
    """Yield Markdown tables: a row for each method and number of users, a column for each ε."""
    epsilons = [e for e in EPSILONS if any(c.epsilon == e for c in done)]
    for task in dict.fromkeys(c.task for c in done):
        heads = ["no privacy" if e is None else f"ε = {e:g}" for e in epsilons]
        yield f"\n| {task} | users | " + " | ".join(heads) + " |"
        yield "|---" * (len(heads) + 2) + "|"
        private = [c for c in done if c.task == task and c.epsilon is not None]
        for method, users in dict.fromkeys((c.method, c.users) for c in private):
            cells = (Cell(task, "reference" if e is None else method, e, users) for e in epsilons)
            entries = (entry(done, cell) if cell in done else "" for cell in cells)
            yield f"| {method} | {users:,} | " + " | ".join(entries) + " |"


def entry(done: dict[Cell, Recorded], cell: Cell) -> str:
    """Return a table's entry: the shares kept at the end and of the area, else the rise."""

    def with_error(value: float, uncertain: float, form: str) -> str:
        error = f" ± {uncertain:{form.strip('+')}}" if np.isfinite(uncertain) else ""
        return f"{value:{form}}{error}"

    shown = [with_error(*found, ".0%") for found in shares(done, cell).values()]
    return ", ".join(shown or [with_error(*done[cell].rise, "+.2f")]) + f" ({done[cell].seeds})"


def plot(done: dict[Cell, Recorded], picture: Path) -> None:
    """Draw the shares kept against ε: a row of plots for the end, and one for the area."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(c.task for c in done))
    figure, axes = plt.subplots(
        2, len(tasks), figsize=(4.5 * len(tasks), 7), sharex=True, sharey=True, squeeze=False
    )
    styles = {"today": ("x", "--"), "axis": ("D", ":")}
    for column, task in enumerate(tasks):
        for row, what in enumerate(SHARES):
            ax = axes[row][column]
            ax.axhline(1.0, color="0.7", linewidth=0.8)
            for method in dict.fromkeys(c.method for c in done):
                for place, users in enumerate(USERS):
                    points = list(_line(done, Cell(task, method, None, users), what))
                    if not points:
                        continue
                    x, y, uncertain = zip(*points, strict=True)
                    marker, line = styles.get(method, ("o", "-"))
                    ax.errorbar(
                        x, y, yerr=uncertain, marker=marker, markersize=4, capsize=2,
                        color=f"C{place}", linestyle=line,
                        label=f"{method}, {users:,} users",
                    )  # fmt: skip
            ax.set_xscale("log")
            ax.set_xticks([e for e in EPSILONS if e], [f"{e:g}" for e in EPSILONS if e])
            ax.minorticks_off()
            if row == 0:
                ax.set_title(task)
    axes[0][0].set_ylabel("share of the non-private rise")
    axes[1][0].set_ylabel("share of the non-private area under the curve")
    for ax in axes[1]:
        ax.set_xlabel("ε")
    entries = {}
    for ax in axes[0]:
        handles, labels = ax.get_legend_handles_labels()
        entries |= zip(labels, handles, strict=True)
    figure.legend(entries.values(), entries, loc="lower center", ncols=4, fontsize=7)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(picture, dpi=150)


def _line(done: dict[Cell, Recorded], at: Cell, what: str) -> Iterator[tuple[float, float, float]]:
    for epsilon in EPSILONS:
        cell = Cell(at.task, at.method, epsilon, at.users)
        found = shares(done, cell) if cell in done else {}
        if epsilon is not None and what in found:
            yield (epsilon, *found[what])


def cell_of(text: str) -> tuple[float | None, int]:
    """Read EPSILON:USERS."""
    epsilon, _, users = text.partition(":")
    return None if epsilon == "none" else float(epsilon), int(users)


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=METHODS, required=True)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", help="all but the reference by default")
    parser.add_argument(
        "--cells", nargs="+", type=cell_of, default=[(e, n) for n in USERS for e in EPSILONS],
        metavar="EPSILON:USERS",
    )  # fmt: skip
    parser.add_argument("--policy", type=Path, help="where the small model is, or shall be")
    parser.add_argument("--tuning", action="store_true", help="users outside the table; no results")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="with --tuning")
    return options_of_runs(parser, runs="grid", results="noise.json", seeds=5).parse_args()


def main() -> None:
    """Run the cells, write the results."""
    options = parsed()
    if options.set and not options.tuning:
        sys.exit("--set is for --tuning: what the table shows stands in METHODS")
    folder = options.runs / options.model
    policy = (
        small_policy(options.policy or folder / "reviews-lm") if options.model == "small" else {}
    )
    given = (word.split("=", 1) for word in options.set)
    extra = {key: json.loads(v) if v.startswith("{") else v for key, v in given}
    methods = options.methods or [m for m in METHODS[options.model] if m != "reference"]
    cells = list(
        dict.fromkeys(
            Cell(task, method if epsilon is not None else "reference", epsilon, users)
            for task in options.tasks
            for epsilon, users in options.cells
            for method in methods
        )
    )
    first = FIRST_TUNING_SEED if options.tuning else 0
    jobs = {
        (cell, seed): cell.job(seed, options.model, policy, extra, options.tuning)
        for seed in range(first, first + options.seeds)
        for cell in cells
    }
    done = {cell: measured(found) for cell, found in run_cells(jobs, folder, options).items()}
    if options.tuning:
        print("\n".join(f"{cell}: {np.mean(values.rise):+.3f}" for cell, values in done.items()))
        return
    write_results(options.results, rows(options.model, done))
    known = recorded(options.model, options.results)
    write_results(options.results, share_rows(options.model, known, done))
    text = page(
        f"Share kept by ε and users ({options.model})",
        "Share of the non-private rise of the reward on held-out public prompts, at the end and",
        "as area under the curve over the rounds, ± standard error over seeds; without privacy",
        "the rise itself. In brackets the number of seeds. Cells of other calls keep their places.",
        *tables(known),
    )
    print(text)
    place = options.results.parent / f"noise-grid-{options.model}"
    place.with_suffix(".md").write_text(text)
    plot(known, place.with_suffix(".png"))


if __name__ == "__main__":
    main()
