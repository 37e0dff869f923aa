"""Rivals on the same work: what each method gains from the same users at the same ε.

    python scripts/worth/rivals.py --tuning            # users of no table: chooses settings
    python scripts/worth/rivals.py                     # the small public model; resumable
    python scripts/worth/rivals.py --write-only        # the table of what is finished

The unit is the user for every method, and each takes every user once. A method may see of a user:
its prompt (the first eight words of a review), its reward of any text, and for DP-SFT how its own
review goes on. The public knows sentences of another kind, with labels of their own, and nothing of
what the users want. Every method had the same number of settings tried, in one run each at
ε = 2, on users and held-out prompts of no table; those of this package had also been developed on
such users before.

Writes docs/results/worth.json, and docs/results/worth-rivals-TASK.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from dprlhf.runs.many import run_missing
from dprlhf.runs.measurements import Result, write_results
from dprlhf.worth.statistics import Values, standard_error
from noise.many_runs import options_of_runs, page, small_policy
from worth import rival_methods as methods
from worth.rival_methods import Method, Place, measure

USERS, SEEDS = 600, 5
EPSILONS = [0.5, 1.0, 2.0, 4.0, 8.0]
TUNING_EPSILON, FIRST_TUNING_SEED = 2.0, 500
LEAST_FIRST = 4
"""Of the five ε, at how many this package's method should be first."""
RATES = [1.0, 4.0]
"""Lengths of a step that are tried for every method."""
OURS = "ours"
Setting = dict[str, Any]


@dataclass(frozen=True)
class Rival:
    """A method of the table.

    Attributes:
        title: Name in the table.
        method: How it trains.
        knob: The setting of its own that is tried, and its two values.
        fixed: What is not tried.
        kind: "private" methods compete at each ε; "variant" ones are other updates of this package,
            shown beside it; "public" ones look at no user; "plain" ones have no privacy.
    """

    title: str
    method: Method
    knob: tuple[str, tuple[Any, Any]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "private"

    @property
    def tried(self) -> list[Setting]:
        """The settings that are tried on users of no table, as many for each method."""
        name, values = self.knob
        return [
            {**self.fixed, "rate": rate, name: value}
            for rate, value in itertools.product(RATES, values)
        ]


RIVALS: dict[str, Rival] = {
    OURS: Rival(
        "**private updates, 64 or 16 public directions**", methods.by_updates, ("rank", (16, 64))
    ),
    "plain updates": Rival(
        "private updates, no directions", methods.by_updates, ("clip", (1.0, 0.25)), {}, "variant"
    ),
    "grpo": Rival(
        "DP-GRPO, public directions",
        methods.by_updates,
        ("rank", (16, 64)),
        {"update": "grpo"},
        "variant",
    ),
    "dp-sft": Rival("DP-SFT", methods.by_texts, ("text", ("own", "best")), {"clip": 0.1}),
    "dp-dpo": Rival("DP-DPO", methods.by_pairs, ("pairs", (1, 2)), {"clip": 0.1}),
    "dp-reward": Rival(
        "DP reward model, public prompts",
        methods.by_reward,
        ("reward rate", (0.3, 1.0)),
        {"clip": 0.1},
    ),
    "public": Rival(
        "public prompts alone", methods.by_public, ("rows", ("praise", "labels")), {}, "public"
    ),
    "reviews": Rival(
        "100 rated public reviews",
        methods.by_public,
        ("momentum", (0.6, 0.0)),
        {"rows": "reviews"},
        "reference",
    ),
    "rloo": Rival(
        "RLOO without privacy", methods.by_updates, ("momentum", (0.6, 0.0)), {}, "plain"
    ),
    "grpo, no privacy": Rival(
        "GRPO without privacy",
        methods.by_updates,
        ("momentum", (0.6, 0.0)),
        {"update": "grpo"},
        "plain",
    ),
}  # fmt: skip
CHOSEN: dict[str, dict[str, int]] = {}
"""By task and method, the place of the chosen setting among those tried; found by ``--tuning``."""


@dataclass(frozen=True)
class Cell:
    """One entry of the table; ε is infinite where no user is looked at, or none is protected."""

    task: str
    rival: str
    epsilon: float
    setting: int

    def file(self, seed: int, tuning: bool) -> str:
        """Return the name of its run, the same wherever the repository is."""
        what = "tuning" if tuning else "table"
        name = self.rival.replace(", ", "-").replace(" ", "-")
        return f"{what}-{self.task}-{name}-{self.epsilon:g}-setting-{self.setting}-seed-{seed}"


def run(cell: Cell, place: Place, folder: Path) -> dict[str, float]:
    """Measure one cell."""
    torch.set_num_threads(1)
    rival = RIVALS[cell.rival]
    return measure(rival.method, place, rival.tried[cell.setting], folder)


def epsilons_of(rival: Rival, epsilons: list[float]) -> list[float]:
    """Return the ε at which a method is measured: all of them, or once without any."""
    return epsilons if rival.kind in ("private", "variant") else [math.inf]


def cells_of(task: str, tuning: bool) -> list[Cell]:
    """Return the cells of a task, for one seed."""
    epsilons = [TUNING_EPSILON] if tuning else EPSILONS
    return [
        Cell(task, name, epsilon, setting)
        for name, rival in RIVALS.items()
        for epsilon in epsilons_of(rival, epsilons)
        for setting in (range(len(rival.tried)) if tuning else [CHOSEN[task][name]])
    ]


@dataclass(frozen=True)
class Table:
    """What was measured on a task.

    Attributes:
        task: The task.
        gains: Gain by method and ε, ``[seeds]``; the same seeds everywhere.
    """

    task: str
    gains: dict[str, dict[float, Values]]

    @property
    def seeds(self) -> int:
        """The number of seeds."""
        return len(next(iter(self.gains[OURS].values())))

    def at(self, rival: str, epsilon: float) -> Values:
        """Return a method's gains at an ε; those of methods without one are the same at all."""
        by = self.gains[rival]
        return by.get(epsilon, by.get(math.inf, np.array([])))

    def best_rival(self, epsilon: float) -> str:
        """Return the rival of the largest mean gain at an ε."""
        names = [n for n in self.gains if n != OURS and RIVALS[n].kind in ("private", "public")]
        return max(names, key=lambda name: float(np.mean(self.at(name, epsilon))))

    def lead(self, epsilon: float) -> Values:
        """Return by how much this package's method is ahead of the best rival, ``[seeds]``."""
        return self.at(OURS, epsilon) - self.at(self.best_rival(epsilon), epsilon)


def table_of(task: str, found: Mapping[tuple[Cell, int], float]) -> Table | None:
    """Return the table over the seeds that are finished in all cells; None before the first."""
    cells = cells_of(task, False)
    seeds = sorted({seed for _, seed in found})
    complete = [seed for seed in seeds if all((cell, seed) in found for cell in cells)]
    if not complete:
        return None
    gains: dict[str, dict[float, Values]] = {}
    for cell in cells:
        values = np.array([found[cell, seed] for seed in complete])
        gains.setdefault(cell.rival, {})[cell.epsilon] = values
    return Table(task, gains)


def rows(table: Table) -> Iterator[Result]:
    """Yield the gains, and at how many ε this package's method is first."""
    start = f"rivals (small): {table.task}, {USERS} users"
    yield Result(f"{start}: seeds", table.seeds, "1")
    for name, by in table.gains.items():
        for epsilon, gains in by.items():
            at = "" if math.isinf(epsilon) else f", epsilon {epsilon:g}"
            yield from _stated(f"{start}, {name}{at}: gain", gains)
    first = 0
    for epsilon in EPSILONS:
        lead = table.lead(epsilon)
        first += bool(np.mean(lead) > 0)
        yield from _stated(f"{start}, epsilon {epsilon:g}: lead over the best rival", lead)
    goal = f"at least {LEAST_FIRST} of {len(EPSILONS)}, with {SEEDS} seeds or more"
    holds = first >= LEAST_FIRST and table.seeds >= SEEDS
    yield Result(f"{start}: first among the rivals, number of epsilons", first, "1", goal, holds)


def _stated(name: str, values: Values) -> Iterator[Result]:
    yield Result(name, float(np.mean(values)), "reward")
    if len(values) > 1:
        yield Result(f"{name}, standard error", standard_error(values), "reward")


def lines(table: Table) -> Iterator[str]:
    """Yield a Markdown table: a row for each method, a column for each ε."""
    heads = ["", *(f"ε = {epsilon:g}" for epsilon in EPSILONS)]
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for name in table.gains:
        entries = [_pair(table.at(name, epsilon)) for epsilon in EPSILONS]
        if math.inf in table.gains[name]:
            entries = [entries[0], *["″"] * (len(EPSILONS) - 1)]
        yield "| " + " | ".join([RIVALS[name].title, *entries]) + " |"
    leads = [f"{_pair(table.lead(e))} ({table.best_rival(e)})" for e in EPSILONS]
    yield "| lead over the best rival | " + " | ".join(leads) + " |"


def _pair(values: Values) -> str:
    error = standard_error(values)
    return f"{np.mean(values):+.2f}" + ("" if math.isnan(error) else f" ± {error:.2f}")


def tuned(task: str, found: Mapping[tuple[Cell, int], float]) -> Iterator[str]:
    """Yield what each tried setting gained, and the place of the best one."""
    best: dict[str, int] = {}
    for name, rival in RIVALS.items():
        gains = {
            cell.setting: np.mean([v for (c, _), v in found.items() if c == cell])
            for cell, _ in found
            if (cell.task, cell.rival) == (task, name)
        }
        if gains:
            best[name] = max(gains, key=lambda place: float(gains[place]))
        for place, gain in sorted(gains.items()):
            yield f"{task}, {name}: {gain:+.3f} with {json.dumps(rival.tried[place])}"
    yield f"CHOSEN[{task!r}] = {best}"


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=["community", "praise"], default=None)
    parser.add_argument("--tuning", action="store_true", help="users outside the table; no results")
    parser.add_argument("--only", nargs="+", choices=RIVALS, help="with --tuning")
    return options_of_runs(parser, runs="rivals", results="worth.json", seeds=SEEDS).parse_args()


def main() -> None:
    """Run the cells, seed by seed, and write what is finished after each."""
    options = parsed()
    small = options.runs.resolve() / "reviews-lm"
    small_policy(small)
    methods.public_scorer(small)
    first = FIRST_TUNING_SEED if options.tuning else 0
    tasks = options.tasks or (["community"] if options.tuning else list(CHOSEN))
    found: dict[tuple[Cell, int], float] = {}
    for seed, task in itertools.product(range(first, first + options.seeds), tasks):
        some = [c for c in cells_of(task, options.tuning) if c.rival in (options.only or RIVALS)]
        files = {options.runs.resolve() / f"{c.file(seed, options.tuning)}.json": c for c in some}
        jobs = {
            file: (
                cell,
                Place(task, USERS, cell.epsilon, seed, small, options.tuning),
                file.with_suffix(""),
            )
            for file, cell in files.items()
        }
        done = run_missing(
            run, jobs, side_by_side=options.jobs, write_only=options.write_only, quiet=True
        )
        found |= {(files[file], seed): figures["gain"] for file, figures in done.items()}
        if options.tuning:
            print("\n".join(tuned(task, found)), flush=True)
        else:
            write(task, {key: gain for key, gain in found.items() if key[0].task == task}, options)


def write(task: str, found: Mapping[tuple[Cell, int], float], options: argparse.Namespace) -> None:
    """Write the results and the table of a task, where a seed is finished."""
    table = table_of(task, found)
    if table is None:
        return
    text = page(
        f"Rivals on the same work: {task} (small, {USERS} users)",
        "Gain of the mean reward on held-out public prompts, mean over paired seeds"
        f" ({table.seeds}) ± standard error. The unit is the user; ″ is the same at every ε.",
        "",
        *lines(table),
    )
    print(text, flush=True)
    write_results(options.results, rows(table))
    (options.results.parent / f"worth-rivals-{task}.md").write_text(text)


if __name__ == "__main__":
    main()
