"""TRL's ``log_metric`` and ``log_extra``: what a reward logs about the rows that it scores.

What is logged about private rows is as private as they are and goes to ``secret/`` alone. What is
logged about public rows is dropped: a counter or a cache in the reward makes it depend on private
rows too.
"""

from __future__ import annotations

import contextlib
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dprlhf.rewards.reward import Failure, parse_answer

_LONGEST = 10_000  # characters of a text that is logged

_TEXT = reprlib.Repr()  # bounds depth, length and number of parts, also of what contains itself
_TEXT.maxstring = _TEXT.maxother = 1_000


class CallLog:
    """Takes what one call of a reward logs."""

    def __init__(self, rows: int) -> None:
        self.metrics: list[tuple[str, float]] = []
        self.extra: dict[str, list[Any]] = {}
        self.problem = ""
        self._rows = rows

    def log_metric(self, name: object, value: object) -> None:
        """Take a scalar; one that is no finite number is dropped."""
        number = parse_answer(value)
        if number is None or isinstance(number, Failure):
            self._refuse(f"log_metric({_name(name)!r}, …) got a value that is not a finite number")
        else:
            self.metrics.append((_name(name), number))

    def log_extra(self, column: object, values: object) -> None:
        """Take a column with one value for each row of the call; another length is dropped."""
        if hasattr(values, "tolist"):
            values = values.tolist()
        # Copied first: a subclass of list may have another length than it has values.
        copied = list(values) if isinstance(values, list | tuple) else None
        if copied is None or len(copied) != self._rows:
            name = _name(column)
            self._refuse(f"log_extra({name!r}, …) needs a list with one value per completion")
        else:
            self.extra[_name(column)] = [bounded(value) for value in copied]

    def _refuse(self, problem: str) -> None:
        self.problem = self.problem or problem


@dataclass(frozen=True, repr=False, eq=False)
class Logged:
    """What the rewards logged about some private rows."""

    # Each metric's mean over the calls that logged it
    metrics: Mapping[str, float] = field(default_factory=dict)
    # The values of each column, [rows]; None where none was logged
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)


def gathered(calls: Iterable[tuple[CallLog, Sequence[int]]], rows: int) -> Logged:
    """Put together what several calls logged."""
    metrics: dict[str, list[float]] = {}
    extra: dict[str, list[Any]] = {}
    for log, numbers in calls:
        for name, value in log.metrics:
            metrics.setdefault(name, []).append(value)
        for name, values in log.extra.items():
            column = extra.setdefault(name, [None] * rows)
            for i, value in zip(numbers, values, strict=True):
                column[i] = value
    return Logged({name: _mean(values) for name, values in metrics.items()}, extra)


def bounded(value: Any) -> Any:
    """Return any value as JSON has it, of bounded size; a short text in place of what it has not.

    It is called while the reward is: what the value's own methods do is part of the reward's call.
    """
    with contextlib.suppress(Exception):  # most values have no such method
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    # By the base types' own methods: what comes back is of no class of the reward's.
    if isinstance(value, str):
        return str.__str__(value)[:_LONGEST]
    if isinstance(value, int):
        bits = int.bit_length(value)
        return int.__int__(value) if bits < 64 else f"a whole number of {bits} bits"
    if isinstance(value, float):
        number = float.__float__(value)
        return number if math.isfinite(number) else str(number)
    try:
        return _TEXT.repr(value)[:_LONGEST]
    except Exception:
        return type(value).__name__[:_LONGEST]


def _name(given: object) -> str:
    """Return the name of a metric or column as a bounded text."""
    return str(bounded(given))


def _mean(values: Sequence[float]) -> float:
    """Return the mean of finite numbers, whose sum may be above the largest one."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        part = 0.5 ** len(values).bit_length()
        mean = math.fsum(value * part for value in values) / (len(values) * part)
        return min(max(mean, min(values)), max(values))
