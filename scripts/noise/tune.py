"""Compare settings found on public prompts with those found by hand: private runs, several seeds.

    python scripts/noise/tune.py --model small --minutes 7 --start   # an hour on a core
    python scripts/noise/tune.py --model small --tasks community --stand-ins "900 reviews"
    python scripts/noise/tune.py --model smollm2 --tasks praise --users 300 --seeds 3 \\
        --minutes 35       # a trial takes 12 minutes of a core, and a private run 17

The settings by hand are those of ``dprlhf bench worth`` for the model and the task; the start is
the same recipe with the learning rate that another model needs, a sixteenth of it or eight to
sixteen times as much. ``dprlhf tune`` changes the start on public prompts of another kind than the
users', which stand in for them. Then each trains on the same private users. A call that was
interrupted is continued by the same call. Writes docs/results/noise.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from dprlhf.recipe import load_recipe
from dprlhf.runs.measurements import Result, write_results
from dprlhf.worth.models import METHODS
from dprlhf.worth.runs import Job, gain, overrides_of, run_all
from dprlhf.worth.tasks import TASKS, Cell, Setup, set_up
from noise.many_runs import ROOT, options_of_runs

GOAL = 0.97
KEYS = ["optimizer.learning_rate", "update.clip_norm"]
COMPARED = {
    "small": ["praise", "community", "house-style"],
    "smollm2": ["praise", "community", "reading"],
}
"""The tasks that each model learns."""

STAND_INS = {
    "praise": "sentences",
    "community": "sentences, praise",
    "house-style": "reviews, praise",
    "reading": "sentences, their labels",
}
"""Which of a task's public prompts stand in for its users, unless ``--stand-ins`` names others:
prompts that know nothing of what the users want."""
_ROWS, _GUIDES = 2000, 3765
"""Public rows of a search, where a task does not have fewer; they come after the rows that guide
``update.subspace``, since no prompt may both guide and stand in for a user."""

MEASURES = {
    "kl": ("KL to the base model", "nats a response"),
    "distinct_2": ("different pairs of words, a pair", "1"),
}
"""What is told of a tuned policy's texts, with its unit: a reward may not see them come apart."""

TUNED, BY_HAND, START = "tuned on public prompts", "set by hand", "as for another model"


@dataclass(frozen=True)
class Compared:
    """A task with its users, whose settings are found twice.

    Attributes:
        setup: What all runs share.
        cell: The private runs.
        public: Name of the public prompts that stand in for the users.
    """

    setup: Setup
    cell: Cell
    public: str

    @property
    def name(self) -> str:
        """How the results call the comparison."""
        cell = f"{self.cell.task}, {self.cell.users} users, epsilon {self.cell.epsilon:g}"
        return f"tuning ({self.setup.model}): {cell}, stand-ins: {self.public}"

    @property
    def start(self) -> dict[str, Any]:
        """What the start changes in the settings by hand: the learning rate of another model."""
        task = TASKS[self.cell.task]
        small = self.setup.settings == "small"
        other, method = ("smollm2", task.small_method) if small else ("small", task.method)
        return {KEYS[0]: METHODS[other][method][KEYS[0]]}

    def jobs(self, seed: int, changes: dict[str, Any]) -> list[Job]:
        """Return the private runs of a seed, a pair of them where wishes are turned."""
        jobs = self.setup.jobs(self.cell, seed)
        if not changes:
            return jobs
        digest, more = _digest(changes), overrides_of(changes)
        return [replace(j, file=f"{j.file}-{digest}", overrides=j.overrides + more) for j in jobs]

    def found(self, minutes: float) -> dict[str, Any]:
        """Search on public prompts, or read what an earlier call found; return all changes."""
        from dprlhf.training.build import hush_libraries
        from dprlhf.tuning.evidence import header, write_tuned
        from dprlhf.tuning.public_rows import public_rows
        from dprlhf.tuning.search import Search

        place = self.setup.folder / f"tuned-{_digest(self.name)}"
        kept = place.with_suffix(".json")
        if kept.exists():
            known: dict[str, Any] = json.loads(kept.read_text())
            return known
        hush_libraries()
        task = TASKS[self.cell.task]
        public, changes = task.public[self.public], self.start
        if not public.same_kind:
            public = replace(public, skip=_GUIDES)
            if task.guides:
                changes = {**changes, "update.subspace.data.limit": _GUIDES}
        rows = place.with_suffix(".parquet")
        public.write(public.same_kind or _ROWS, 0, rows)
        job = self.setup.jobs(self.cell, 0)[0]
        source = ROOT / "recipes" / f"{job.recipe}.yaml"
        overrides = (*job.overrides, *overrides_of(changes))
        recipe = load_recipe(source, overrides)
        search = Search(
            recipe,
            public_rows(recipe, rows),
            KEYS,
            place.with_suffix(".trials"),
            minutes=minutes,
        )
        search.run(lambda line: print(line, flush=True))
        tuned = search.result()
        write_tuned(tuned, source, overrides, place.with_suffix(".yaml"))
        print(header(tuned), flush=True)
        found = {**self.start, **tuned.best.changes}
        kept.write_text(json.dumps(found))
        return found


def rows_of(
    name: str, gains: dict[str, list[float]], texts: dict[str, dict[str, list[float]]]
) -> Iterator[Result]:
    """Yield the gain and the texts of each kind of settings, and the ratio of gains, with errors.

    Seeds are pairs: the same users, and the same start of the adapter.

    Args:
        name: What is compared.
        gains: The gain of each seed, by kind of settings.
        texts: Each of ``MEASURES`` after training, likewise.
    """
    for kind, values in gains.items():
        yield Result(f"{name}: {kind}: gain", float(np.mean(values)), "reward")
        if len(values) > 1:
            yield Result(f"{name}: {kind}: gain, standard error", _error(values), "reward")
        for measure, (title, unit) in MEASURES.items():
            yield Result(f"{name}: {kind}: {title}", float(np.mean(texts[measure][kind])), unit)
    tuned, hand = np.array(gains[TUNED]), np.array(gains[BY_HAND])
    ratio = float(tuned.mean() / hand.mean())
    row = f"{name}: tuned over set by hand"
    yield Result(row, ratio, "1", f"at least {GOAL}", ratio >= GOAL)
    if len(tuned) > 1:
        error = _error(list(tuned - ratio * hand)) / abs(float(hand.mean()))
        yield Result(f"{row}, standard error", error, "1")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def _error(values: list[float]) -> float:
    return float(np.std(values, ddof=1) / len(values) ** 0.5)


def compare(
    one: Compared, options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, dict[str, list[float]]]]:
    """Search, run what is missing, and return what :func:`rows_of` takes."""
    settings = {TUNED: one.found(options.minutes), BY_HAND: {}}
    if options.start:
        settings[START] = one.start
    jobs = {
        (kind, seed): one.jobs(seed, changes)
        for seed in range(options.seeds)
        for kind, changes in settings.items()
    }
    done = run_all(
        [job for pair in jobs.values() for job in pair],
        one.setup.folder,
        recipes=ROOT / "recipes",
        side_by_side=options.jobs,
    )

    def of_seeds(value: Callable[[dict[str, Any]], float]) -> dict[str, list[float]]:
        return {
            kind: [
                float(np.mean([value(done[job.file]) for job in jobs[kind, seed]]))
                for seed in range(options.seeds)
            ]
            for kind in settings
        }

    texts = {name: of_seeds(lambda f, m=name: f["measures"][m][1]) for name in MEASURES}
    return of_seeds(gain), texts


def main() -> None:
    """Compare the settings of each task."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=COMPARED, required=True)
    parser.add_argument("--tasks", nargs="+", choices=STAND_INS, help="all that the model learns")
    parser.add_argument("--users", type=int, default=1500)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--minutes", type=float, default=8.0, help="time of a search")
    parser.add_argument("--stand-ins", help="public prompts of the task, by their name")
    parser.add_argument("--start", action="store_true", help="run what the search starts at, too")
    options_of_runs(parser, runs="tune", results="noise.json", seeds=5)
    options = parser.parse_args()
    setup = set_up(options.model, ROOT, (options.runs / options.model).absolute())
    for task in options.tasks or COMPARED[options.model]:
        cell = Cell(task, "", options.epsilon, options.users)
        one = Compared(setup, cell, options.stand_ins or STAND_INS[task])
        if one.public not in TASKS[task].public:
            parser.error(f"{task} has the stand-ins {sorted(TASKS[task].public)}")
        found = compare(one, options)
        rows = [Result(f"{one.name}: seeds", options.seeds, "1"), *rows_of(one.name, *found)]
        write_results(options.results, rows)
        for row in rows:
            print(f"{row.name}: {row.value:.4g} {row.unit} ({row.goal or 'no goal'})", flush=True)


if __name__ == "__main__":
    main()
