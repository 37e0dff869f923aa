"""Weighted sum of rewards, clipped to ±R, for private completions and for whole responses."""

from __future__ import annotations

import contextlib
import itertools
import math
import reprlib
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dprlhf.boundary import Private, open_private
from dprlhf.errors import EXITS, DprlhfError
from dprlhf.rewards.isolation import SecretSink, captured
from dprlhf.rewards.reward import (
    Failure,
    LoadedReward,
    RewardFunction,
    RewardRows,
    RoundState,
    Score,
    as_reward,
    call_reward,
    group_rows,
    is_async,
    parse_answer,
)
from dprlhf.rollout import Responses

_LONGEST = 10_000  # characters of a text that is logged

_TEXT = reprlib.Repr()  # bounds depth, length and number of parts, also of what contains itself
_TEXT.maxstring = _TEXT.maxother = 1_000


class CallLog:
    """Takes what one call of a reward logs, by TRL's ``log_metric`` and ``log_extra``.

    What is logged about private rows is as private as they are and goes to ``secret/`` alone. What
    is logged about public rows is dropped: a counter or a cache in the reward makes it depend on
    private rows too.
    """

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


@dataclass(frozen=True, repr=False, eq=False)
class Scores:
    """Bounded scores of private completions: private values, without a repr."""

    values: NDArray[np.float64]  # Scores in [−R, R], [rows], 0.0 where not valid
    valid: NDArray[np.bool_]  # Whether each row has a score, [rows], bool
    failures: Mapping[str, int]  # Rows by kind of failure ("nan", …): of users, for secret/ only
    # What the rewards logged about private rows, for secret/ only; of public rows it is dropped
    logged: Logged = field(default_factory=Logged)
    # With rewards by turn the return-to-go of each turn, in [−R, R], [rows, turns]. A trajectory
    # that ended before a turn has the return of its last one there, so that with a score for whole
    # trajectories alone every turn has the same return.
    returns: NDArray[np.float64] | None = None
    problem: str = ""  # The first error, or else the kinds of failures; for secret/ only

    def take(self, rows: NDArray[np.int64]) -> Scores:
        """Return the scores of these rows, in this order, without what was logged."""
        returns = None if self.returns is None else self.returns[rows]
        return Scores(self.values[rows], self.valid[rows], self.failures, returns=returns)


class Scorer:
    """Combine rewards into one score in [−R, R] per completion.

    A row's score is the sum of weight · reward over the rewards that answer a number (times the
    row's value in the reward's ``times_column``, where it has one), clipped to ±R; ``None`` drops
    that reward's term. A row is not valid where a reward answers NaN, infinity or something that is
    no number, where all answer ``None``, and where a reward fails.

    With a reward by turn there is such a sum for each turn of the row's trajectory, from it the
    return-to-go of each turn, and its clip to ±R; the score is that of the first turn. A reward
    with one number for a trajectory counts at the last turn.

    **No user's score may depend on another user**, or the sensitivity of the sum over users is
    lost. The score that counts is the one that a user gets when the reward is called with that
    user's rows alone. A call with many users is an optimisation, allowed where the contract
    check (:func:`dprlhf.rewards.check_reward`) found that it gives the same values, bit for bit;
    and only with a number of rows at which that was checked: see
    :attr:`~dprlhf.rewards.LoadedReward.checked_rows`. The rows of a user alone are cut into calls
    of these sizes too, or a size that nobody tried could round otherwise. A reward by place, such
    as a classifier, gets all rows with their places, and makes batches of fixed shape of them.
    When such a call raises or answers with the wrong length, each of its users is called alone: the
    failure of one user then costs only that user's rows, and the others get what defines their
    score anyway. Giving all users of the failed call an invalid score instead would let one user
    zero the others' contributions. A reward declared per-user is always called with one user's
    rows: its scores are the same bit for bit whoever else is in the batch.

    Scoring never raises because of a reward. Text that a reward prints, warns or logs, and the
    traceback of its exceptions, may quote a prompt: it goes to the secret sink or nowhere. What it
    gives to TRL's ``log_extra`` and ``log_metric`` comes back with the scores, as private as they
    are. A reward is trusted code all the same: it can write files and open connections.

    Asynchronous rewards run side by side, as in TRL; the calls of one reward run one after another.
    """

    def __init__(
        self,
        rewards: Sequence[LoadedReward | RewardFunction],
        bound: float,
        *,
        sink: SecretSink | None = None,
        state: RoundState | None = None,
    ) -> None:
        """Combine ``rewards`` with their weights."""
        self.rewards = tuple(as_reward(reward) for reward in rewards)
        self.bound = float(bound)
        self.state = state or RoundState()
        self.sink = sink
        if not self.rewards:
            raise DprlhfError("scoring needs at least one reward: name one in the recipe")
        if not (math.isfinite(self.bound) and self.bound > 0):
            raise DprlhfError(f"reward bound {bound} must be a finite number above 0")
        for reward in self.rewards:
            if not math.isfinite(reward.weight):
                raise DprlhfError(f"reward {reward.name!r}: weight {reward.weight} is not finite")

    def score(
        self,
        prompts: Sequence[Any],  # Texts or lists of messages {"role", "content"}, [rows]
        completions: Sequence[Any],  # Texts or lists of messages, [rows]
        completion_ids: Sequence[Sequence[int]],  # Token ids, [rows][tokens]
        columns: Mapping[str, Sequence[Any]],  # Dataset columns by name, each [rows]
        users: Sequence[Any] | NDArray[Any],  # User id of each row, any hashable, [rows]
        *,
        turns: Sequence[int] = (),  # Number of turns of the policy in each completion, [rows]
        places: Sequence[int] = (),
        private: bool = False,
    ) -> Scores:
        """Score completions, ``[rows]``.

        Where they are private, a reward that exits or raises ``KeyboardInterrupt`` fails like any
        other, so that no user's text can end the run. Signals are held back during a round.
        """
        rows = RewardRows(prompts, completions, completion_ids, columns, turns, places)
        if len(users) != len(rows):
            raise ValueError(f"{len(users)} user ids for {len(rows)} rows to score")
        groups = group_rows(users)
        failures: Counter[str] = Counter()
        by_turn = any(reward.by_turn for reward in self.rewards)
        counts = np.array(rows.turns if by_turn else [1] * len(rows), dtype=np.int64)
        with captured(self.sink):
            answers = self._answered(rows, groups, private=private)
            # The sums over turns; whether a reward gave a row a number; whether one failed on it.
            total = np.zeros((len(rows), counts.max(initial=1)))
            present, failed = np.zeros((2, len(rows)), dtype=bool)
            for one in answers:
                for i, value in enumerate(one.values):
                    if isinstance(value, Failure):
                        failures[value.kind] += 1
                        failed[i] = True
                    elif value is not None:
                        last = slice(counts[i] - len(value), counts[i])
                        total[i, last] += one.reward.weight * np.array(value)
                        present[i] = True
        returns = returns_to_go(total, counts)
        missing = ~present & ~failed
        overflow = ~np.isfinite(returns).all(1) & ~failed
        failures.update({"None": int(missing.sum()), "overflow": int(overflow.sum())})
        valid = present & ~failed & ~overflow
        returns = np.where(valid[:, None], returns, 0.0).clip(-self.bound, self.bound)
        kept = {kind: n for kind, n in failures.items() if n}
        logged = gathered(
            [log for one in answers for log in one.logs] if private else [], len(rows)
        )
        raised = (v.message for one in answers for v in one.values if isinstance(v, Failure))
        problem = next(filter(None, raised), ", ".join(kept))
        return Scores(returns[:, 0], valid, kept, logged, returns if by_turn else None, problem)

    def _answered(
        self, rows: RewardRows, groups: Sequence[Sequence[int]], *, private: bool
    ) -> list[_Answers]:
        """Return the answers of each reward; asynchronous ones run at the same time."""
        answers = [_Answers(reward, rows, self.state, private) for reward in self.rewards]
        waiting = [one for one in answers if is_async(one.reward.function)]
        with ThreadPoolExecutor(max(1, len(waiting))) as pool:
            for one in answers:
                if one not in waiting:
                    one.ask(groups)
            for done in [pool.submit(one.ask, groups) for one in waiting]:
                done.result()
        return answers


class _Answers:
    """The answers of one reward for some rows, and what its calls logged."""

    def __init__(
        self, reward: LoadedReward, rows: RewardRows, state: RoundState, private: bool
    ) -> None:
        self.reward = reward
        self.values: list[Score | Failure] = [None] * len(rows)
        self.logs: list[tuple[CallLog, Sequence[int]]] = []
        self._rows = rows
        self._state = state
        self._private = private

    def ask(self, groups: Sequence[Sequence[int]]) -> None:
        """Call the reward for the rows of all users, of which each has a group."""
        alone = list(groups)
        if not self.reward.per_user and len(groups) > 1:
            # Several users' rows in a call, and then those that are left without an answer.
            order = list(range(len(self._rows)))
            if self._private:
                order = [i for group in groups for i in group]
            calls = self._calls(order)
            left = set(order).difference(*calls)
            for chosen in calls:
                if self._call(chosen) is not None:
                    left.update(chosen)
            alone = [group for group in groups if not left.isdisjoint(group)]
        for group in alone:
            self._ask_alone(group)

    def _ask_alone(self, group: Sequence[int]) -> None:
        """Call the reward with one user's rows, which all fail if a call does."""
        calls = [] if self.reward.per_user else self._calls(group)
        for chosen in calls or [group]:
            if (failure := self._call(chosen)) is not None:
                for i in group:
                    self.values[i] = failure
                return

    def _calls(self, rows: Sequence[int]) -> list[Sequence[int]]:
        """Cut some rows into those of each call."""
        sizes = checked_sizes(len(rows), self.reward.checked_rows)
        if not self._private or (self.reward.by_place and self.reward.checked_rows):
            sizes = [len(rows)]
        ends = itertools.accumulate(sizes)
        return [rows[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def _call(self, numbers: Sequence[int]) -> Failure | None:
        """Call the reward once with some rows; return a failure in place of answers."""
        log, rows = CallLog(len(numbers)), self._rows.take(numbers)
        # The text of an exception may quote a prompt: it goes to the captured stderr, and an
        # interrupt or an exit that must propagate does so as a new exception without text.
        try:
            scores = call_reward(self.reward, rows, self._state, log)
        except BaseException as problem:
            if isinstance(problem, EXITS) and not self._private:
                interrupted = isinstance(problem, KeyboardInterrupt)
                raise (KeyboardInterrupt() if interrupted else SystemExit(1)) from None
            message = self.reward.name
            with contextlib.suppress(BaseException):  # of the exception's own methods
                traceback.print_exc()
                message += f": {bounded(problem)}"
            return Failure(type(problem).__name__, message)
        for i, score in zip(numbers, scores, strict=True):
            self.values[i] = score
        self.logs.append((log, numbers))
        return None


def returns_to_go(scores: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the sum of each row's scores from every turn on, ``[rows, turns]``.

    >>> returns_to_go(np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 0.0]]), np.array([3, 2]))
    array([[6., 5., 3.],
           [3., 2., 2.]])
    """
    with np.errstate(over="ignore", invalid="ignore"):  # such rows are not valid
        sums = scores[:, ::-1].cumsum(1)[:, ::-1]
    last = np.minimum(np.arange(scores.shape[1]), counts[:, None] - 1)
    return np.take_along_axis(sums, last, 1)


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


def score_private(scorer: Scorer, responses: Private[Responses]) -> Private[Scores]:
    """Score this round's responses of the private users; a reward's exceptions do not get out."""
    return Private(score_responses(scorer, open_private(responses), private=True))


def score_responses(scorer: Scorer, responses: Responses, *, private: bool = False) -> Scores:
    """Return the scores of all responses, ``[rows]``."""
    rows = rows_to_score(responses)
    scores = scorer.score(
        rows.prompts,
        rows.completions,
        rows.completion_ids,
        rows.columns,
        responses.user,
        turns=rows.turns,
        places=rows.places,
        private=private,
    )
    if responses.failed is None:
        return scores
    return Scores(**{**vars(scores), "valid": scores.valid & ~responses.failed})


def rows_to_score(responses: Responses) -> RewardRows:
    """Return the prompts, completions, token ids and columns that a reward is called with."""
    owner = responses.prompt.tolist()
    prompts = responses.asked or [responses.prompts.prompts[p] for p in owner]
    ids = [
        t[m.bool()].tolist()
        for t, m in zip(
            responses.tokens[:, -responses.max_new_tokens :], responses.response_mask, strict=True
        )
    ]
    columns = {
        name: [values[p] for p in owner] for name, values in responses.prompts.columns.items()
    }
    completions = responses.completions or in_form_of(prompts, responses.texts)
    places = np.empty(len(responses.user), dtype=np.int64)
    grid = responses.grid.ravel()
    places[grid[grid >= 0]] = np.flatnonzero(grid >= 0)
    extra = {**columns, **responses.extra}
    return RewardRows(prompts, completions, ids, extra, responses.turns, places.tolist())


def in_form_of(prompts: Sequence[Any], texts: Sequence[str]) -> list[Any]:
    """Return completions in TRL's format: a text, or for a conversation an assistant message."""
    return [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
