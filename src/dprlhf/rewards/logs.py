"""TRL's ``log_metric`` and ``log_extra``: what a reward logs about the rows that it scores.

What is logged about private rows is as private as they are and goes to ``secret/`` alone. What is
logged about public rows is published if the reward declares that it follows from the rows of its
call alone (``dprlhf_logs_public``), under the names for which :func:`~dprlhf.rewards.check_reward`
found the same values at each call. Neither is enough by itself: a declaration may be wrong, and a
count that private rows alone move is the same at each call of the check.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dprlhf.rewards.reward import Failure, parse_answer


class CallLog:
    """Takes what one call of a reward logs; what comes after the call is dropped.

    A reward may keep ``log_metric`` from a call with public rows: used later, it would publish
    what it was told about private ones.

    Args:
        rows: Number of rows in the call.

    Attributes:
        metrics: Names and values, in order.
        extra: Values of each column, ``[rows]``.
        problem: What was wrong with the first call of a logging function that was; "" if nothing.
    """

    def __init__(self, rows: int) -> None:
        self.metrics: list[tuple[str, float]] = []
        self.extra: dict[str, list[Any]] = {}
        self.problem = ""
        self._rows = rows
        self._open = True

    def log_metric(self, name: object, value: object) -> None:
        """Take a scalar; one that is no finite number is dropped."""
        number = parse_answer(value)
        if number is None or isinstance(number, Failure):
            self._refuse(f"log_metric({name!r}, …) got a value that is not a finite number")
        elif self._open:
            self.metrics.append((str(name), number))

    def log_extra(self, column: object, values: object) -> None:
        """Take a column with one value for each row of the call; another length is dropped."""
        if hasattr(values, "tolist"):
            values = values.tolist()
        if not isinstance(values, list | tuple) or len(values) != self._rows:
            self._refuse(f"log_extra({column!r}, …) needs a list with one value per completion")
        elif self._open:
            self.extra[str(column)] = [_plain(value) for value in values]

    def close(self) -> None:
        """End the call."""
        self._open = False

    def _refuse(self, problem: str) -> None:
        self.problem = self.problem or problem


@dataclass(frozen=True, repr=False, eq=False)
class Logged:
    """What the rewards logged about some rows: private values if the rows are private.

    Attributes:
        metrics: Each metric's mean over the calls that logged it.
        extra: The values of each column, ``[rows]``; None where none was logged.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def row(self, i: int) -> dict[str, Any]:
        """Return the values of one row by column."""
        return {name: values[i] for name, values in self.extra.items()}

    def only(self, names: Container[str]) -> Logged:
        """Return what was logged under these names."""
        return Logged(
            {name: value for name, value in self.metrics.items() if name in names},
            {name: values for name, values in self.extra.items() if name in names},
        )


def gathered(calls: Iterable[tuple[CallLog, Sequence[int]]], rows: int) -> Logged:
    """Put together what several calls logged.

    Args:
        calls: The log of each call, with the numbers of its rows.
        rows: Number of all rows.
    """
    metrics: dict[str, list[float]] = {}
    extra: dict[str, list[Any]] = {}
    for log, numbers in calls:
        for name, value in log.metrics:
            metrics.setdefault(name, []).append(value)
        for name, values in log.extra.items():
            column = extra.setdefault(name, [None] * rows)
            for i, value in zip(numbers, values, strict=True):
                column[i] = value
    means = {name: math.fsum(values) / len(values) for name, values in metrics.items()}
    return Logged(means, extra)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; a text in place of what it has not."""
    if hasattr(value, "item"):
        with contextlib.suppress(Exception):
            value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    try:
        return str(value)
    except Exception:
        return type(value).__name__
