"""From finished runs to figures: gains by seed, the public alternatives, and what is stated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dprlhf.runs.measurements import Result
from dprlhf.worth.runs import Job, gain, judged_by, run_all
from dprlhf.worth.statistics import (
    Curve,
    Estimated,
    Values,
    agreement,
    break_even,
    equal_kl,
    share,
    standard_error,
)
from dprlhf.worth.tasks import TASKS, UNTRAINED, Cell, Setup, Task

LEAST_SEEDS = {"small": 5}
"""With fewer seeds no goal is reached; larger models than the small one need three."""
LEAST_SHARE, LARGEST_BREAK_EVEN, GOAL_EPSILON = 0.8, 1.0, 1.0
LEAST_RANKS = 0.9
MOST_PUBLIC = 0.05
"""Largest share of the non-private gain for public prompts that cannot teach the task."""


@dataclass(frozen=True)
class Comparison:
    """What was measured on one task with one number of users.

    Attributes:
        task: Key of ``TASKS``.
        model: Name of the model.
        users: Number of users, or of public prompts in their place.
        plain: Gain of the non-private run, ``[seeds]``.
        private: Gain of the private run by ε, ``[seeds]``.
        public: Gain by the name of the public alternative, ``[seeds]``.
        curves: The ways of the runs by name in the table, for the frontier.
        judges: Gains by another judge, and by the name of the run in the table, ``[seeds]``.
    """

    task: str
    model: str
    users: int
    plain: Values
    private: dict[float, Values]
    public: dict[str, Values]
    curves: dict[str, list[Curve]]
    judges: dict[str, dict[str, Values]] = field(default_factory=dict)

    @property
    def by_name(self) -> dict[str, Values]:
        """The gains of all runs by their name in the table, ``[seeds]``."""
        private = {label(epsilon): gains for epsilon, gains in self.private.items()}
        return {label(math.inf): self.plain, **private, **self.public}

    @property
    def about(self) -> Task:
        """The task."""
        return TASKS[self.task]

    @property
    def seeds(self) -> int:
        """The number of seeds that all figures are over."""
        return len(self.plain)

    @property
    def is_learned(self) -> bool:
        """Whether the non-private gain is above 0 by two standard errors; one seed cannot say."""
        return self.seeds > 1 and float(np.mean(self.plain)) > 2 * standard_error(self.plain)

    @property
    def levels(self) -> list[int]:
        """The numbers of public prompts of the users' kind that somebody might have."""
        return sorted({0, *(p.same_kind for n, p in self.about.public.items() if n in self.public)})

    def public_only(self, same_kind: int) -> tuple[str, Values]:
        """Return the public alternative of the largest mean gain, and its gains, ``[seeds]``.

        The base model as it is counts, with gain 0. The choice looks at the same held-out prompts
        as the table, which favours public prompts.

        Args:
            same_kind: Number of public prompts of the users' kind that there are.
        """
        known = {
            n: v for n, v in self.public.items() if self.about.public[n].same_kind <= same_kind
        }
        known[UNTRAINED] = np.zeros(self.seeds)
        best = max(known, key=lambda name: (float(np.mean(known[name])), name == UNTRAINED))
        return best, known[best]

    def values(self, same_kind: int) -> dict[float, Values]:
        """Return J(ε) − J(public-only) by ε, ``[seeds]``."""
        public = self.public_only(same_kind)[1]
        return {epsilon: gains - public for epsilon, gains in self.private.items()}


def compare(
    setup: Setup,
    task: str,
    *,
    epsilons: Sequence[float],
    users: int,
    seeds: int,
    side_by_side: int = 1,
    write_only: bool = False,
) -> Comparison | None:
    """Run what is missing of a task and return what was measured; None before the first seed.

    Args:
        setup: What all runs share.
        task: Key of ``TASKS``.
        epsilons: The private runs' ε, in nats.
        users: Number of users, and of public prompts in their place.
        seeds: Number of seeds; only those that are finished everywhere count.
        side_by_side: Number of processes.
        write_only: Run nothing.
    """
    private = [Cell(task, "", epsilon, users) for epsilon in (math.inf, *sorted(epsilons))]
    cells = [*private, *(Cell(task, name, math.inf, users) for name in TASKS[task].public)]
    jobs = {(cell, seed): setup.jobs(cell, seed) for seed in range(seeds) for cell in cells}
    found = run_all(
        [job for some in jobs.values() for job in some],
        setup.folder,
        recipes=setup.clone / "recipes",
        side_by_side=side_by_side,
        write_only=write_only,
    )
    finished = [
        seed
        for seed in range(seeds)
        if all(job.file in found for cell in cells for job in jobs[cell, seed])
    ]
    if not finished:
        return None
    runs = {cell: [jobs[cell, seed] for seed in finished] for cell in cells}
    return _compared(setup, users, runs, found)


def _compared(
    setup: Setup,
    users: int,
    runs: dict[Cell, list[list[Job]]],
    found: dict[str, dict[str, Any]],
) -> Comparison:
    """Take figures together by cell and seed; a pair of runs counts with its mean."""

    def means(cell: Cell, of: Callable[[Job], float]) -> Values:
        return np.array([np.mean([of(job) for job in pair]) for pair in runs[cell]])

    gains = {cell: means(cell, lambda job: gain(found[job.file])) for cell in runs}
    names = {cell: cell.public or label(cell.epsilon) for cell in runs}
    first = next(iter(runs))
    secret = bool(TASKS[first.task].turned)
    return Comparison(
        first.task,
        setup.model,
        users,
        gains[first],
        {c.epsilon: values for c, values in gains.items() if math.isfinite(c.epsilon)},
        {c.public: values for c, values in gains.items() if c.public},
        {
            names[cell]: [_curve(found[job.file]) for pair in pairs for job in pair]
            for cell, pairs in runs.items()
            if not (cell.public and secret)
        },
        {
            judge: {
                names[cell]: means(cell, lambda job, judge=judge: judged_by(judge, found[job.file]))  # type: ignore[misc]
                for cell in runs
            }
            for judge in found[runs[first][0][0].file]["judges"]
        },
    )


def _curve(figures: dict[str, Any]) -> Curve:
    before = figures["before"]
    return [(math.sqrt(max(0.0, kl)), reward - before) for kl, reward in figures["curve"]]


def label(epsilon: float) -> str:
    """Return what tables and plots call an ε."""
    return "no privacy" if math.isinf(epsilon) else f"ε = {epsilon:g}"


def results(found: Comparison) -> Iterator[Result]:
    """Yield the figures of a comparison, with goals where there are some."""
    start = f"worth ({found.model}): {found.task}, {found.users} users"
    unit = "reward"

    def stated(name: str, values: Values) -> Iterator[Result]:
        yield Result(f"{start}, {name}", float(np.mean(values)), unit)
        if found.seeds > 1:
            yield Result(f"{start}, {name}, standard error", standard_error(values), unit)
            yield Result(f"{start}, {name}, worst seed", float(np.min(values)), unit)

    yield Result(f"{start}: seeds", found.seeds, "1")
    yield from stated("no privacy: gain", found.plain)
    learned = "above 0 by two standard errors, which a single seed cannot say"
    yield Result(
        f"{start}, no privacy: learned", float(found.is_learned), "1", learned, found.is_learned
    )
    for epsilon, gains in found.private.items():
        name = f"epsilon {epsilon:g}"
        yield from stated(f"{name}: gain", gains)
        yield from stated(f"{name}: price", found.plain - gains)
        if found.is_learned:
            yield from _share(found, f"{start}, {name}", epsilon)
    for name, gains in found.public.items():
        yield from stated(f"public prompts, {name}: gain", gains)
    for level in found.levels:
        public = f"{level} public prompts of the users' kind"
        against = f"against {public}"
        if found.about.turned and found.is_learned:
            least = min(1.0, float(np.mean(found.public_only(level)[1]) / np.mean(found.plain)))
            goal = f"at most {MOST_PUBLIC}"
            name = f"{start}: {public}, share of the non-private gain"
            yield Result(name, least, "1", goal, least <= MOST_PUBLIC)
        for epsilon, values in found.values(level).items():
            yield from stated(f"epsilon {epsilon:g}: value {against}", values)
        yield _break_even(found, f"{start}: break-even epsilon {against}", level)
    reach, gains_there = equal_kl(found.curves)
    if reach > 0:
        yield Result(f"{start}: distance of the frontier, root of KL", reach, "root of nats")
        for name, gains in gains_there.items():
            plain_name = name.replace("ε =", "epsilon")
            yield Result(f"{start}, {plain_name}: gain at equal KL", float(np.mean(gains)), unit)
    yield from _judged(found, start)


def _judged(found: Comparison, start: str) -> Iterator[Result]:
    for judge, gains in found.judges.items():
        by_judge = f"{start}, by the judge {judge}"
        for name, values in gains.items():
            plain_name = name.replace("ε =", "epsilon")
            yield Result(f"{by_judge}, {plain_name}: gain", float(np.mean(values)), "score")
        signs, ranks = agreement(found.by_name, gains)
        yield Result(
            f"{by_judge}: gains with the reward's sign", signs, "1", "all of them", signs == 1
        )
        if math.isfinite(ranks):
            goal = f"at least {LEAST_RANKS}"
            name = f"{by_judge}: rank correlation with the reward"
            yield Result(name, ranks, "1", goal, ranks >= LEAST_RANKS)


def _share(found: Comparison, start: str, epsilon: float) -> Iterator[Result]:
    kept = share(found.private[epsilon], found.plain)
    goal: tuple[str, bool | None] = ("", None)
    if epsilon == GOAL_EPSILON:
        least = LEAST_SEEDS.get(found.model, 3)
        words = f"at least {LEAST_SHARE}, with {least} seeds or more"
        goal = (words, kept.value >= LEAST_SHARE and found.seeds >= least)
    yield Result(f"{start}: share of the non-private gain", kept.value, "1", *goal)
    if found.seeds > 1:
        for end, value in (("lower", kept.low), ("upper", kept.high)):
            yield Result(f"{start}: share of the non-private gain, {end} end", value, "1")


def _break_even(found: Comparison, name: str, level: int) -> Result:
    """Return the break-even ε; an end of the grid where it is outside, as the unit then says."""
    even = break_even(found.values(level))
    grid = sorted(found.private)
    value, unit = even.value, "epsilon"
    if value == 0:
        value, unit = grid[0], "epsilon; below it, the smallest that was measured"
    elif math.isinf(value):
        value, unit = grid[-1], "epsilon; above it, the largest that was measured"
    least = LEAST_SEEDS.get(found.model, 3)
    goal = f"at most {LARGEST_BREAK_EVEN:g}, with {least} seeds or more"
    return Result(
        name, value, unit, goal, even.value <= LARGEST_BREAK_EVEN and found.seeds >= least
    )


def in_words(even: Estimated, epsilons: Sequence[float]) -> str:
    """Say a break-even ε with its interval; outside of the measured ε, say on which side."""

    def one(value: float) -> str:
        if value == 0:
            return f"below {min(epsilons):g}"
        return f"above {max(epsilons):g}" if math.isinf(value) else f"{value:.2g}"

    if math.isnan(even.low):
        return one(even.value)
    return f"{one(even.value)} (95%: {one(even.low)} to {one(even.high)})"
