"""Weighted sum of rewards, clipped to ±R, for private completions."""

from __future__ import annotations

import contextlib
import math
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dprlhf.errors import DprlhfError
from dprlhf.rewards.isolation import SecretSink, captured
from dprlhf.rewards.reward import (
    Failure,
    LoadedReward,
    RewardFunction,
    Rows,
    as_reward,
    call_reward,
    group_rows,
    parse_answer,
)


@dataclass(frozen=True, repr=False, eq=False)
class Scores:
    """Bounded scores of private completions: private values, without a repr.

    Attributes:
        values: Scores in [−R, R], ``[rows]``, float64; 0.0 where not valid.
        valid: Whether each row has a score, ``[rows]``, bool.
        failures: Number of rows by kind of failure (``"nan"``, ``"ValueError"``, …). It is computed
            from users, so it is for ``secret/`` only.
    """

    values: NDArray[np.float64]
    valid: NDArray[np.bool_]
    failures: Mapping[str, int]


class Scorer:
    """Combine rewards into one score in [−R, R] per completion.

    A row's score is the sum of weight · reward over the rewards that answer a number (times the
    row's value in the reward's ``times_column``, where it has one), clipped to ±R; ``None`` drops
    that reward's term. A row is not valid where a reward answers NaN, infinity or something that is
    no number, where all answer ``None``, and where a reward fails.

    **No user's score may depend on another user**, or the sensitivity of the sum over users is
    lost. The score that counts is the one that a user gets when the reward is called with that
    user's rows alone. A call with many users is an optimisation, allowed where the contract
    check (:func:`dprlhf.rewards.check_reward`) found that it gives the same values, bit for bit;
    and only with a number of rows at which that was checked: see
    :attr:`~dprlhf.rewards.LoadedReward.checked_rows`.
    When such a call raises or answers with the wrong length, each of its users is called alone: the
    failure of one user then costs only that user's rows, and the others get what defines their
    score anyway. Giving all users of the failed call an invalid score instead would let one user
    zero the others' contributions. A reward declared per-user is always called with one user's
    rows: its scores are the same bit for bit whoever else is in the batch.

    Scoring never raises because of a reward. Text that a reward prints, warns or logs, and the
    traceback of its exceptions, may quote a prompt: it goes to the secret sink or nowhere. TRL's
    ``log_extra`` and ``log_metric`` get functions that drop everything, and ``trainer_state`` is
    ``None``. A reward is trusted code all the same: it can write files and open connections.
    """

    def __init__(
        self,
        rewards: Sequence[LoadedReward | RewardFunction],
        bound: float,
        *,
        sink: SecretSink | None = None,
    ) -> None:
        """Combine ``rewards`` with their weights.

        Args:
            rewards: Rewards to combine, at least one.
            bound: Bound R on the score, above 0 and finite.
            sink: Receiver of the text captured during :meth:`score`.

        Raises:
            DprlhfError: no reward, a weight that is not finite, or a bound that is not positive
                and finite.
        """
        self.rewards = tuple(as_reward(reward) for reward in rewards)
        self.bound = float(bound)
        self._sink = sink
        if not self.rewards:
            raise DprlhfError("scoring needs at least one reward: name one in the recipe")
        if not (math.isfinite(self.bound) and self.bound > 0):
            raise DprlhfError(f"reward bound {bound} must be a finite number above 0")
        for reward in self.rewards:
            if not math.isfinite(reward.weight):
                raise DprlhfError(f"reward {reward.name!r}: weight {reward.weight} is not finite")

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        users: Sequence[Any] | NDArray[Any],
        *,
        private: bool = False,
    ) -> Scores:
        """Score completions.

        Args:
            prompts: Texts or lists of messages ``{"role", "content"}``, ``[rows]``.
            completions: Texts or lists of messages, ``[rows]``.
            completion_ids: Token ids, ``[rows][tokens]``.
            columns: Dataset columns by name, each ``[rows]``; a reward without ``**kwargs`` gets
                only those that it names.
            users: User id of each row, any hashable, ``[rows]``.
            private: Whether a reward that exits or raises ``KeyboardInterrupt`` fails like any
                other, so that no user's text can end the run. Signals are held back during a round
                by :class:`~dprlhf.training.interrupt.Interruptible`.

        Returns:
            Private scores, ``[rows]``.

        Raises:
            ValueError: the arguments differ in length.
        """
        rows = Rows(prompts, completions, completion_ids, columns)
        if len(users) != len(rows):
            raise ValueError(f"{len(users)} user ids for {len(rows)} rows to score")
        groups = group_rows(users)
        failures: Counter[str] = Counter()
        total = np.zeros(len(rows))
        present = np.zeros(len(rows), dtype=bool)
        failed = np.zeros(len(rows), dtype=bool)
        with captured(self._sink):
            for reward in self.rewards:
                for i, answer in enumerate(_answers(reward, rows, groups, private=private)):
                    value = parse_answer(answer)
                    if isinstance(value, Failure):
                        failures[value.kind] += 1
                        failed[i] = True
                    elif value is not None:
                        total[i] += reward.weight * value
                        present[i] = True
        missing = ~present & ~failed
        overflow = ~np.isfinite(total) & ~failed
        failures.update({"None": int(missing.sum()), "overflow": int(overflow.sum())})
        valid = present & ~failed & ~overflow
        values = np.where(valid, np.clip(np.where(valid, total, 0.0), -self.bound, self.bound), 0.0)
        return Scores(values, valid, {kind: n for kind, n in failures.items() if n})


def _answers(
    reward: LoadedReward, rows: Rows, groups: Sequence[Sequence[int]], *, private: bool
) -> list[Any]:
    answers: list[Any] = [None] * len(rows)
    alone = list(groups)
    if not reward.per_user and len(groups) > 1:
        left = _call_together(reward, rows, groups, answers, private=private)
        alone = [group for group in groups if not left.isdisjoint(group)]
    for group in alone:
        found = _attempt(reward, rows.take(group), private=private)
        for place, i in enumerate(group):
            answers[i] = found if isinstance(found, Failure) else found[place]
    return answers


def _call_together(
    reward: LoadedReward,
    rows: Rows,
    groups: Sequence[Sequence[int]],
    answers: list[Any],
    *,
    private: bool,
) -> set[int]:
    """Call a reward with several users' rows, and return the rows that are left without an answer.

    Private users' rows go in calls of sizes that were checked; public ones all in one call.
    """
    order = [i for group in groups for i in group] if private else list(range(len(rows)))
    sizes = checked_sizes(len(rows), reward.checked_rows) if private else [len(rows)]
    left, start = set(order[sum(sizes) :]), 0
    for size in sizes:
        chosen = order[start : start + size]
        start += size
        found = _attempt(reward, rows.take(chosen), private=private)
        if isinstance(found, Failure):
            left.update(chosen)
            continue
        for place, i in enumerate(chosen):
            answers[i] = found[place]
    return left


def checked_sizes(rows: int, most: int) -> list[int]:
    """Cut a number of rows into powers of two up to ``most``, the largest first.

    >>> checked_sizes(77, 32), checked_sizes(77, 0)
    ([32, 32, 8, 4, 1], [])
    """
    sizes: list[int] = []
    size = 1 << (most.bit_length() - 1) if most > 0 else 0
    while size:
        sizes += [size] * (rows // size)
        rows %= size
        size //= 2
    return sizes


def _attempt(reward: LoadedReward, rows: Rows, *, private: bool) -> list[Any] | Failure:
    # The text of an exception may quote a prompt: it goes to the captured stderr, and an interrupt
    # or an exit that must propagate does so as a new exception without text.
    try:
        return call_reward(reward, rows)
    except BaseException as problem:
        if isinstance(problem, KeyboardInterrupt | SystemExit) and not private:
            left = KeyboardInterrupt() if isinstance(problem, KeyboardInterrupt) else SystemExit(1)
            raise left from None
        with contextlib.suppress(Exception):
            traceback.print_exc()
        return Failure(type(problem).__name__)
