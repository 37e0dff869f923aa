"""What a run asks of a budget book and gets: its cost, its reservation, and ε of several runs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Mechanism, equal_but_for_rounding
from dprlhf.privacy.composition import filter_share, total_epsilon


class BookError(DprlhfError):
    """A problem of the book itself; nothing was reserved and nothing was spent."""


class BrokenOffError(BookError):
    """The database broke off: it may have committed, and another attempt may succeed."""


@dataclass(frozen=True)
class Spending:
    """What a run costs each of its users."""

    run: str
    name: str
    stage: str  # Kind of run: rl, sft, reward, dpo, feedback
    mechanism: Mechanism | None  # What the whole run releases; None where users are only enrolled
    times: int = 1


@dataclass(frozen=True)
class Mark:
    """What a run's ledger says of the book, by which a book from a backup is noticed."""

    run: str
    book: str
    reservation: int
    counter: int  # The book's counter when the ledger was opened


@dataclass(frozen=True)
class Reservation:
    """A run's place in the book, for its ledger and its card; nothing of it is secret."""

    book: str
    number: int
    counter: int  # The book's counter after the reservation
    dataset: str
    epsilon: float  # Lifetime budget of its users at delta
    delta: float

    def entry(self) -> dict[str, Any]:
        """Return the entry for the run's ledger."""
        return {"book": self.book, "reservation": self.number, "counter": self.counter}


@dataclass(frozen=True)
class Question:
    """What a run asks for, apart from its users."""

    spending: Spending
    dataset: str | None
    unit: str | None
    earlier: Sequence[Spending]
    marks: Sequence[Mark]


@dataclass(frozen=True)
class Cost:
    """What a user has spent, or would have with a run, and the budget that it must keep to."""

    terms: frozenset[tuple[Mechanism, int]]
    dataset: str
    budget: float  # Lifetime budget ε of the data set
    delta: float
    adaptive: bool

    def epsilon(self) -> float:
        """Return their joint ε if the plans were settled beforehand; slow the first time."""
        return joint_epsilon(self.terms, self.delta)

    def share(self) -> float:
        """Return how much of the budget they take up."""
        if self.adaptive:
            return _filter_share(self.terms, self.budget, self.delta)
        return self.epsilon() / self.budget

    def within(self) -> bool:
        """Return whether they keep to the budget, if ``adaptive`` by a filter; slow at first."""
        return self.share() <= 1 if self.adaptive else self.epsilon() <= self.budget

    def covers(self, other: Cost) -> bool:
        """Return whether these are all of the other's runs, and perhaps more, under its budget."""
        own = dict(self.terms)
        return self.dataset == other.dataset and all(
            own.get(mechanism, 0) >= times for mechanism, times in other.terms
        )


def largest(costs: Iterable[Cost]) -> list[Cost]:
    """Return the costs that no other one covers, by data set."""
    # Whoever was in some of the runs has spent no more than somebody who was in all
    # (docs/proofs/composition.md). Random halves make 2ⁿ sets of runs, and one is the largest.
    kept: list[Cost] = []
    for cost in sorted(costs, key=lambda c: (c.dataset, -sum(times for _, times in c.terms))):
        if not any(other.covers(cost) for other in kept):
            kept.append(cost)
    return kept


def cost_the_same(one: Mechanism | None, other: Mechanism | None) -> bool:
    """Return whether two mechanisms are the same, but for the last digits of their noise."""
    if one is None or other is None:
        return one is other
    return all(map(equal_but_for_rounding, asdict(one).values(), asdict(other).values()))


@functools.cache
def joint_epsilon(terms: frozenset[tuple[Mechanism, int]], delta: float) -> float:
    """Return the joint ε of mechanisms on the same user, each with the number of its runs."""
    ordered = sorted(terms, key=repr)
    mechanisms, times = [m for m, _ in ordered], [n for _, n in ordered]
    return total_epsilon(mechanisms, delta, times=times).epsilon if ordered else 0.0


@functools.cache
def _filter_share(terms: frozenset[tuple[Mechanism, int]], epsilon: float, delta: float) -> float:
    return filter_share(dict(sorted(terms, key=repr)), epsilon, delta)
