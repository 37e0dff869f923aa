"""Rivals on the same work: what each method gains from the same users at the same ε.

    python scripts/worth/rivals.py                     # the small public model; resumable
    python scripts/worth/rivals.py --write-only        # the table of what is finished
    python scripts/worth/rivals.py --task taste --epsilons 1 --setting 1

On the task "taste" a user says which of two texts it likes better, and nothing else, and each seed
has a secret of its own. The question there is whether private prompts are needed.

The unit is the user for every method, and each takes every user once. A method may see of a user:
its prompt (the first eight words of a review), its reward of any text, and for DP-SFT how its own
review goes on. The public knows sentences of another kind, with labels of their own, and nothing of
what the users want. For every method the same number of settings is tried first, once each at
ε = 2, on users and held-out prompts of no table, and the best one is taken. The methods of this
package had also been developed on such users before. Methods without privacy are this package's own
at ε = infinity, which learn what TRL's trainers do (docs/results/trl.json).

Writes docs/results/worth.json, and docs/results/worth-rivals-TASK.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
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
TUNING_EPSILON, TUNING_SEED, TRIES = 2.0, 500, 2
ORDER = [1.0, 4.0, 0.5, 2.0, 8.0]
"""The order in which the ε are measured."""
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
        """The settings that may be tried, as many for each method; the first ones are, in order."""
        name, values = self.knob
        return [
            {**self.fixed, "rate": rate, name: value}
            for value, rate in itertools.product(values, RATES)
        ]

    @property
    def competes(self) -> bool:
        """Whether it is compared at each ε with this package's method."""
        return self.kind in ("private", "public")


RIVALS: dict[str, Rival] = {
    OURS: Rival(
        "**private updates, public directions**", methods.by_updates, ("rank", (64, 16))
    ),
    "plain updates": Rival(
        "private updates, no directions", methods.by_updates, ("clip", (1.0, 0.25)), {}, "variant"
    ),
    "grpo": Rival(
        "DP-GRPO, public directions",
        methods.by_updates,
        ("rank", (64, 16)),
        {"update": "grpo"},
        "variant",
    ),
    "dp-sft": Rival("DP-SFT", methods.by_texts, ("text", ("best", "own")), {"clip": 0.1}),
    "dp-dpo": Rival("DP-DPO", methods.by_pairs, ("pairs", (1, 2)), {"clip": 0.1}),
    "dp-reward": Rival(
        "DP reward model, public prompts",
        methods.by_reward,
        ("reward rate", (1.0, 0.3)),
        {"clip": 0.1},
    ),
    "public": Rival(
        "public prompts alone", methods.by_public, ("rows", ("labels", "praise")), {}, "public"
    ),
    "dp-reward, private prompts": Rival(
        "DP reward model, private prompts",
        methods.by_reward,
        ("split", ("users", "budget")),
        {"clip": 0.1, "rank": 64, "reward rate": 1.0},
    ),
    "reward, no privacy": Rival(
        "reward model without privacy, public prompts",
        methods.by_reward,
        ("reward rate", (1.0, 0.3)),
        {"clip": 0.1},
        "plain",
    ),
    "dpo, no privacy": Rival(
        "DPO without privacy", methods.by_pairs, ("pairs", (1, 2)), {"clip": 0.1}, "plain"
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


PAIRS = "dp-reward"
"""What the table of "taste" is about, where no method sees a user's reward of any text."""
PAIRS_PRIVATE = "dp-reward, private prompts"
TASTE = [PAIRS, PAIRS_PRIVATE, "dp-dpo", "reward, no privacy", "dpo, no privacy"]
"""The methods of "taste", which learn from pairs; all others are for the tasks with rewards."""
OTHERS = [name for name in RIVALS if name not in TASTE or name in (PAIRS, "dp-dpo")]


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


def epsilons_of(name: str, epsilons: list[float]) -> list[float]:
    """Return the ε at which a method is measured: all of them, or once without any."""
    return epsilons if RIVALS[name].kind in ("private", "variant") else [math.inf]


def tried_of(task: str, names: list[str], tries: int) -> list[Cell]:
    """Return the runs that choose settings, the first setting of every method first."""
    return [
        Cell(task, name, epsilons_of(name, [TUNING_EPSILON])[0], place)
        for place in range(tries)
        for name in names
    ]


def chosen_of(found: Mapping[Cell, float], names: list[str], tries: int) -> dict[str, int]:
    """Return the place of the best setting by method, where all methods have had their tries."""
    gains: dict[str, dict[int, float]] = {}
    for cell, gain in found.items():
        gains.setdefault(cell.rival, {})[cell.setting] = gain
    if any(len(gains.get(name, {})) < tries for name in names):
        return {}
    return {name: max(gains[name], key=gains[name].__getitem__) for name in names}


def cells_of(task: str, chosen: Mapping[str, int], epsilons: Iterable[float] = ORDER) -> list[Cell]:
    """Return the cells of a table for one seed, ε by ε."""
    cells = [
        Cell(task, name, epsilons_of(name, [epsilon])[0], place)
        for epsilon in epsilons
        for name, place in chosen.items()
    ]
    return list(dict.fromkeys(cells))


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
    def about(self) -> str:
        """The method that the others are compared with."""
        return PAIRS if self.task == methods.TASTE else OURS

    @property
    def seeds(self) -> int:
        """The number of seeds."""
        return len(next(iter(self.gains[self.about].values())))

    @property
    def epsilons(self) -> list[float]:
        """The ε that are measured."""
        return sorted(self.gains[self.about])

    def at(self, rival: str, epsilon: float) -> Values:
        """Return a method's gains at an ε; those of methods without one are the same at all."""
        by = self.gains[rival]
        return by.get(epsilon, by.get(math.inf, np.array([])))

    def best_rival(self, epsilon: float) -> str:
        """Return the rival of the largest mean gain at an ε."""
        names = [name for name in self.gains if name != self.about and RIVALS[name].competes]
        return max(names, key=lambda name: float(np.mean(self.at(name, epsilon))))

    def lead(self, epsilon: float) -> Values:
        """Return by how much what the table is about leads the best rival, ``[seeds]``."""
        return self.at(self.about, epsilon) - self.at(self.best_rival(epsilon), epsilon)


def table_of(cells: list[Cell], found: Mapping[tuple[Cell, int], float]) -> Table | None:
    """Return the table over the seeds that are finished in all cells of those who compete.

    Before the first such seed it has those ε at which seed 0 is finished; None where there is none.
    Methods that do not compete are in it where they have the same seeds.
    """
    needed = [cell for cell in cells if RIVALS[cell.rival].competes]
    seeds = sorted({s for _, s in found if all((cell, s) in found for cell in needed)})
    private = {cell.epsilon for cell in needed} - {math.inf}
    epsilons = private
    if not seeds:
        seeds = [0]
        always = all((cell, 0) in found for cell in needed if math.isinf(cell.epsilon))
        epsilons = {
            e for e in private
            if always and all((cell, 0) in found for cell in needed if cell.epsilon == e)
        }  # fmt: skip
    gains: dict[str, dict[float, Values]] = {}
    for cell in sorted(cells, key=lambda cell: list(RIVALS).index(cell.rival)):
        shown = cell.epsilon in epsilons or math.isinf(cell.epsilon)
        if shown and all((cell, seed) in found for seed in seeds):
            values = np.array([found[cell, seed] for seed in seeds])
            gains.setdefault(cell.rival, {})[cell.epsilon] = values
    return Table(cells[0].task, gains) if epsilons else None


def rows(table: Table) -> Iterator[Result]:
    """Yield the gains, and at how many ε this package's method is first."""
    start = f"rivals (small): {table.task}, {USERS} users"
    yield Result(f"{start}: seeds", table.seeds, "1")
    for name, by in table.gains.items():
        for epsilon, gains in by.items():
            at = "" if math.isinf(epsilon) else f", epsilon {epsilon:g}"
            yield from _stated(f"{start}, {name}{at}: gain", gains)
    first = 0
    for epsilon in table.epsilons:
        lead = table.lead(epsilon)
        first += bool(np.mean(lead) > 0)
        yield from _stated(f"{start}, epsilon {epsilon:g}: lead over the best rival", lead)
        if PAIRS_PRIVATE in table.gains:
            more = table.at(PAIRS_PRIVATE, epsilon) - table.at(PAIRS, epsilon)
            yield from _stated(f"{start}, epsilon {epsilon:g}: private over public prompts", more)
    if table.about != OURS:
        return
    goal = f"at least {LEAST_FIRST} of {len(EPSILONS)}, with {SEEDS} seeds or more"
    holds = first >= LEAST_FIRST and table.seeds >= SEEDS
    name = f"{start}: first among the rivals, number of epsilons"
    yield Result(name, first, f"of {len(table.epsilons)}", goal, holds)


def _stated(name: str, values: Values) -> Iterator[Result]:
    yield Result(name, float(np.mean(values)), "reward")
    if len(values) > 1:
        yield Result(f"{name}, standard error", standard_error(values), "reward")


def lines(table: Table) -> Iterator[str]:
    """Yield a Markdown table: a row for each method, a column for each ε."""
    heads = ["", *(f"ε = {epsilon:g}" for epsilon in table.epsilons)]
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for name in table.gains:
        at = [table.at(name, epsilon) for epsilon in table.epsilons]
        entries = [_pair(gains) if len(gains) else "" for gains in at]
        if math.inf in table.gains[name]:
            entries = [entries[0], *["″"] * (len(entries) - 1)]
        yield "| " + " | ".join([RIVALS[name].title, *entries]) + " |"
    leads = [f"{_pair(table.lead(e))} ({table.best_rival(e)})" for e in table.epsilons]
    whose = "" if table.about == OURS else f"{RIVALS[table.about].title}: "
    yield f"| {whose}lead over the best rival | " + " | ".join(leads) + " |"


def _pair(values: Values) -> str:
    error = standard_error(values)
    return f"{np.mean(values):+.2f}" + ("" if math.isnan(error) else f" ± {error:.2f}")


def settings_in_words(chosen: Mapping[str, int], tries: int) -> str:
    """Say which setting each method has."""
    words = [f"{name}: `{json.dumps(RIVALS[name].tried[place])}`" for name, place in chosen.items()]
    of = (
        f"Of {tries} settings tried for each method"
        if tries
        else "Settings, none of them tried here"
    )
    return f"{of}: " + "; ".join(words) + "."


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--task", choices=["community", "praise", "taste"], default="community")
    parser.add_argument("--methods", nargs="+", choices=RIVALS, help="all of the task if not given")
    parser.add_argument("--epsilons", nargs="+", type=float, choices=EPSILONS, default=ORDER)
    parser.add_argument("--tries", type=int, default=TRIES, help="settings tried for each method")
    parser.add_argument("--setting", type=int, help="take this of the settings, and try none")
    given = options_of_runs(parser, runs="rivals", results="worth.json", seeds=SEEDS).parse_args()
    given.methods = given.methods or (TASTE if given.task == methods.TASTE else OTHERS)
    return given


def gains_of(
    cells: list[Cell], seed: int, tuning: bool, options: argparse.Namespace
) -> Iterator[tuple[Cell, float]]:
    """Measure what is missing of some cells; yield the finished ones with their gain."""
    runs = options.runs.resolve()
    for cell in cells:  # one after the other, so that a table can be written between them
        file = runs / f"{cell.file(seed, tuning)}.json"
        place = Place(cell.task, USERS, cell.epsilon, seed, runs / "reviews-lm", tuning)
        job = {file: (cell, place, file.with_suffix(""))}
        done = run_missing(run, job, write_only=options.write_only, quiet=True)
        if file in done:
            yield cell, done[file]["gain"]


def settings_for(options: argparse.Namespace) -> dict[str, int]:
    """Return each method's setting: the one that is asked for, or else the best of those tried."""
    if options.setting is not None:
        options.tries = 0
        return dict.fromkeys(options.methods, options.setting)
    tried = tried_of(options.task, options.methods, options.tries)
    tuned = dict(gains_of(tried, TUNING_SEED, True, options))
    return chosen_of(tuned, options.methods, options.tries)


def main() -> None:
    """Choose the settings, run the cells seed by seed, and write what is finished."""
    options = parsed()
    small = options.runs.resolve() / "reviews-lm"
    small_policy(small)
    methods.public_scorer(small, options.task)
    chosen = settings_for(options)
    if not chosen:
        sys.exit("no settings yet: run without --write-only")
    cells = cells_of(options.task, chosen, options.epsilons)
    found: dict[tuple[Cell, int], float] = {}
    for seed in range(options.seeds):
        for cell, gain in gains_of(cells, seed, False, options):
            found[cell, seed] = gain
            if not options.write_only:
                write(cells, found, chosen, options)
    write(cells, found, chosen, options)


def write(
    cells: list[Cell],
    found: Mapping[tuple[Cell, int], float],
    chosen: Mapping[str, int],
    options: argparse.Namespace,
) -> None:
    """Write the results and the table, where there is something to compare."""
    table = table_of(cells, found)
    if table is None:
        return
    text = page(
        f"Rivals on the same work: {table.task} (small, {USERS} users)",
        "Gain of the mean reward on held-out public prompts, mean over paired seeds"
        f" (seeds: {table.seeds}) ± standard error. The unit is the user; ″ is the same at every"
        " ε, without users or without privacy.",
        "",
        *lines(table),
        "",
        settings_in_words(chosen, options.tries),
    )
    write_results(options.results, rows(table))
    (options.results.parent / f"worth-rivals-{table.task}.md").write_text(text)
    if options.write_only:
        print(text)


if __name__ == "__main__":
    main()
