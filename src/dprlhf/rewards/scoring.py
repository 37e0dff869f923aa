"""Weigh, add and bound the rewards of private completions, and survive what a reward does."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import threading
import traceback
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dprlhf.errors import DprlhfError
from dprlhf.rewards.isolation import SecretSink, captured
from dprlhf.rewards.loading import Reward, RewardFunction, load_reward

_RESERVED = frozenset(
    {"prompt", "completion", "prompts", "completions", "completion_ids"}
    | {"trainer_state", "log_extra", "log_metric"}
)


class AnswerError(Exception):
    """A reward's answer is not a list with one value per completion."""


@dataclass(frozen=True, repr=False, eq=False)
class Rows:
    """Completions to score, each with its prompt, token ids and dataset columns.

    Attributes:
        prompts: ``[rows]``, texts or lists of messages.
        completions: ``[rows]``, texts or lists of messages.
        completion_ids: ``[rows][tokens]``.
        columns: dataset columns by name, each ``[rows]``.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]

    def __post_init__(self) -> None:
        lengths = {
            "prompts": len(self.prompts),
            "completions": len(self.completions),
            "completion_ids": len(self.completion_ids),
            **{f"columns[{name!r}]": len(column) for name, column in self.columns.items()},
        }
        if len(set(lengths.values())) > 1:
            raise ValueError(f"rows to score differ in length: {lengths}")

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, indices: Sequence[int]) -> Rows:
        """The rows at ``indices``, in that order."""
        return Rows(
            [self.prompts[i] for i in indices],
            [self.completions[i] for i in indices],
            [self.completion_ids[i] for i in indices],
            {name: [column[i] for i in indices] for name, column in self.columns.items()},
        )


@dataclass(frozen=True, repr=False, eq=False)
class Scores:
    """Bounded scores of private completions: private values, without a repr.

    Attributes:
        values: ``[rows]``, float64, in [−R, R]; 0.0 where not valid.
        valid: ``[rows]``, bool.
        failures: why rows are not valid, by kind (``"nan"``, ``"ValueError"``, …): how often each
            kind hit a row. Computed from users: for ``secret/`` only.
    """

    values: NDArray[np.float64]
    valid: NDArray[np.bool_]
    failures: Mapping[str, int]


@dataclass(frozen=True)
class Failure:
    """Why an answer is no number: the name of a type, ``"nan"`` or ``"infinity"``."""

    kind: str


class Scorer:
    """Combines rewards into one score in [−R, R] per completion.

    A row's score is the sum of weight · reward over the rewards that answer a number, clipped to
    ±R; ``None`` drops that reward's term. A row is not valid where a reward answers NaN, infinity
    or something that is no number, where all answer ``None``, and where a reward fails.

    **No user's score may depend on another user**, or the sensitivity of the sum over users is
    lost. The score that counts is the one that a user gets when the reward is called with that
    user's rows alone. A call with many users is an optimisation, allowed where the contract
    check (:func:`dprlhf.rewards.check_reward`) found that it gives the same values, bit for bit.
    When such a call raises or answers with the wrong length, every user is called alone: the
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
        rewards: Sequence[Reward | RewardFunction],
        bound: float,
        *,
        sink: SecretSink | None = None,
    ) -> None:
        """Combine ``rewards`` with their weights.

        Args:
            rewards: at least one.
            bound: R > 0, finite.
            sink: receives the captured text of each call of :meth:`score` that produced some.

        Raises:
            DprlhfError: no reward, a weight that is not finite, or a bound that is not positive
                and finite.
        """
        self.rewards = tuple(
            reward if isinstance(reward, Reward) else load_reward(reward) for reward in rewards
        )
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
            prompts: ``[rows]``, texts or lists of messages ``{"role", "content"}``.
            completions: ``[rows]``, texts or lists of messages.
            completion_ids: ``[rows][tokens]``.
            columns: dataset columns by name, each ``[rows]``; a reward without ``**kwargs`` gets
                only those that it names.
            users: ``[rows]``, which user each row belongs to: any hashable ids.
            private: a reward that exits or raises ``KeyboardInterrupt`` fails like any other, for
                else one user's text could end the run; signals are not meant, which
                :class:`~dprlhf.training.interrupt.Interruptible` holds back during a round.

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


def group_rows(users: Sequence[Any] | NDArray[Any]) -> list[list[int]]:
    """Row numbers of each user, users and rows in order of appearance.

    >>> group_rows(["a", "b", "a"])
    [[0, 2], [1]]
    """
    groups: dict[Any, list[int]] = {}
    # Elements of a tensor would each be a user of their own: they hash by identity.
    for i, user in enumerate(users.tolist() if hasattr(users, "tolist") else users):
        groups.setdefault(user, []).append(i)
    return list(groups.values())


def text_of(value: Any) -> str:
    """A text as it stands; of a list of messages the contents, joined by line breaks.

    >>> text_of([{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "Yes."}])
    'Well?\\nYes.'
    """
    if isinstance(value, str):
        return value
    return "\n".join(text_of(part.get("content") or part.get("text") or "") for part in value)


def keywords_of(function: RewardFunction) -> tuple[frozenset[str] | None, frozenset[str]]:
    """The keywords that ``function`` takes (None: any), and those that it cannot do without.

    >>> takes, needs = keywords_of(lambda completions, solution, scale=1.0: ...)
    >>> sorted(takes), sorted(needs)
    (['completions', 'scale', 'solution'], ['completions', 'solution'])
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return None, frozenset()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needs = frozenset(p.name for p in named if p.default is p.empty)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None, needs
    return frozenset(p.name for p in named), needs


def keywords_for(rows: Rows) -> dict[str, Any]:
    """All keywords that TRL 1.16 passes to a reward; its logging functions drop everything."""
    return {
        **{name: list(values) for name, values in rows.columns.items() if name not in _RESERVED},
        # Fresh lists: a reward that changes its arguments must not change the caller's.
        "prompts": list(rows.prompts),
        "completions": list(rows.completions),
        "completion_ids": [list(ids) for ids in rows.completion_ids],
        "trainer_state": None,
        "log_extra": _drop,
        "log_metric": _drop,
    }


def call_reward(function: RewardFunction, rows: Rows) -> list[Any]:
    """Call a reward as TRL does and return its answers, one per row, not yet parsed.

    Raises:
        AnswerError: the answer is not a list, tuple or array with one value per row.
        BaseException: whatever the reward raises.
    """
    takes, _ = keywords_of(function)
    keywords = keywords_for(rows)
    answer = function(**{k: v for k, v in keywords.items() if takes is None or k in takes})
    if inspect.isawaitable(answer):
        answer = _wait_for(answer)
    if hasattr(answer, "tolist"):  # numpy arrays and torch tensors
        answer = answer.tolist()
    if not isinstance(answer, list | tuple):
        raise AnswerError(f"answered a {type(answer).__name__}, not a list")
    if len(answer) != len(rows):
        raise AnswerError(f"answered {len(answer)} values for {len(rows)} completions")
    return list(answer)


def parse_answer(answer: object) -> float | Failure | None:
    """One answer as a finite number, as None (does not apply), or as the reason why it is neither.

    >>> parse_answer(True), parse_answer(None), parse_answer("1.0"), parse_answer(float("nan"))
    (1.0, None, Failure(kind='str'), Failure(kind='nan'))
    """
    if answer is None or isinstance(answer, Failure):
        return answer
    if isinstance(answer, str | bytes | bytearray):  # float() would read digits
        return Failure(type(answer).__name__)
    try:
        value = float(answer)  # type: ignore[arg-type]
    except Exception:
        return Failure(type(answer).__name__)
    if not math.isfinite(value):
        return Failure("nan" if math.isnan(value) else "infinity")
    return value


def _answers(
    reward: Reward, rows: Rows, groups: Sequence[Sequence[int]], *, private: bool
) -> list[Any]:
    if not reward.per_user and len(groups) > 1:
        together = _attempt(reward.function, rows, private=private)
        if not isinstance(together, Failure):
            return together
    answers: list[Any] = [None] * len(rows)
    for group in groups:
        alone = _attempt(reward.function, rows.take(group), private=private)
        for place, i in enumerate(group):
            answers[i] = alone if isinstance(alone, Failure) else alone[place]
    return answers


def _attempt(function: RewardFunction, rows: Rows, *, private: bool) -> list[Any] | Failure:
    # A raised exception keeps its text, which may quote a prompt: it goes to the captured stderr,
    # and what has to leave (an interrupt, an exit) leaves as a new exception without a text.
    try:
        return call_reward(function, rows)
    except BaseException as problem:
        if isinstance(problem, KeyboardInterrupt | SystemExit) and not private:
            left = KeyboardInterrupt() if isinstance(problem, KeyboardInterrupt) else SystemExit(1)
            raise left from None
        with contextlib.suppress(Exception):
            traceback.print_exc()
        return Failure(type(problem).__name__)


def _drop(*_: object, **__: object) -> None:
    """Stand in for TRL's ``log_extra`` and ``log_metric``, which would leak."""


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    # One loop for the whole process, as in TRL: asynchronous clients belong to their first loop.
    # In a thread, because a notebook's thread already runs a loop.
    loop = asyncio.new_event_loop()
    # The default handler logs exceptions of forgotten tasks, with their text, at any later time.
    loop.set_exception_handler(lambda *_: None)

    def run() -> None:
        while True:  # an exit raised in a task stops run_forever; the caller still needs its answer
            with contextlib.suppress(BaseException):
                loop.run_forever()

    threading.Thread(target=run, name="dprlhf-async-rewards", daemon=True).start()
    return loop


def _wait_for(answer: Awaitable[Any]) -> Any:
    async def guarded() -> tuple[Any, BaseException | None]:
        try:
            return await answer, None
        except BaseException as problem:
            return None, problem

    value, problem = asyncio.run_coroutine_threadsafe(guarded(), _event_loop()).result()
    if problem is not None:
        raise problem
    return value
