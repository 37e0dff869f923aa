"""TRL's reward signature: how a reward is called, and how its answers are read."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from dprlhf.data.given_rewards import BY_TURN, PER_USER, declares, is_model
from dprlhf.data.spelling import spelt
from dprlhf.errors import EXITS, nearest, one_line


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


def wait_for(answer: Awaitable[Any]) -> Any:
    """Return what an asynchronous reward or tool answers, from the event loop of all of them."""

    async def guarded() -> tuple[Any, BaseException | None]:
        try:
            return await answer, None
        except BaseException as problem:
            return None, problem

    value, problem = asyncio.run_coroutine_threadsafe(guarded(), _event_loop()).result()
    if problem is not None:
        raise problem
    return value


_RESERVED = frozenset(
    {"prompt", "completion", "prompts", "completions", "completion_ids"}
    | {"trainer_state", "log_extra", "log_metric"}
)


RewardFunction = Callable[..., Any]
"""TRL's reward signature, sync or async::

    reward(prompts, completions, **columns) -> list[float | None]

All arguments are keywords and lists with one entry per completion; so is the answer. ``None``
means that the reward does not apply to that completion. A reward *by turn* may answer a list for a
completion, with a score for each turn of the policy.
"""


@dataclass(frozen=True)
class RoundState:
    """TRL's ``trainer_state``, with what is public of it: a round is a step.

    Frozen, so that a reward cannot carry anything in it from one call to the next.
    """

    # Number of finished rounds: 0 in the first round, and max_steps in every evaluation, so that
    # those before and after the run measure the same
    global_step: int = 0
    max_steps: int = 1  # Number of rounds T of the run
    num_train_epochs: int = 1  # Number of rounds that each user takes part in

    @property
    def epoch(self) -> float:
        """Epochs so far: the share of the rounds that is done, times ``num_train_epochs``."""
        return self.num_train_epochs * self.global_step / self.max_steps


BY_PLACE = "dprlhf_by_place"
"""Attribute of a reward that takes the rows' places: see :attr:`LoadedReward.by_place`."""


@dataclass(frozen=True)
class LoadedReward:
    """A reward callable with its settings."""

    function: RewardFunction
    name: str
    weight: float = 1.0
    per_user: bool = False  # Whether the reward must be called once per user
    # The most rows of several private users in one call; a call has 1, 2, 4, … of them, sizes at
    # which check_reward() found every row's score to be the same as alone. 0 is one user at a time.
    checked_rows: int = 0
    # Column of the dataset by whose value each answer is multiplied; None for none
    times_column: str | None = None
    # Whether an answer may be a list with a score for each turn of the policy
    by_turn: bool = False

    @property
    def model(self) -> Any:
        """The model behind the callable, as a :class:`ClassifierReward` has one; None for none."""
        function: Any = self.function
        while isinstance(function, functools.partial):
            function = function.func
        model = getattr(function, "model", None)
        return model if is_model(model) else None

    @property
    def by_place(self) -> bool:
        """Whether it is called with all rows and their places, for a batch of fixed shape.

        A row's score may then depend on its place, and not on what other rows contain.
        """
        return getattr(self.function, BY_PLACE, False) and not self.per_user


def as_reward(
    reward: LoadedReward | RewardFunction, name: str | None = None, **own: Any
) -> LoadedReward:
    """Wrap a callable under a name, or its own; a loaded reward stays as it is."""
    if isinstance(reward, LoadedReward):
        return reward
    per_user, by_turn = declares(reward, PER_USER), declares(reward, BY_TURN)
    return LoadedReward(reward, name or name_of(reward), per_user=per_user, by_turn=by_turn, **own)


class AnswerError(Exception):
    """A reward's answer is not a list with one value per completion."""


@dataclass(frozen=True, repr=False, eq=False)
class RewardRows:
    """Completions to score, each with its prompt, token ids and dataset columns."""

    prompts: Sequence[Any]  # Texts or lists of messages, [rows]
    completions: Sequence[Any]  # Texts or lists of messages, [rows]
    completion_ids: Sequence[Sequence[int]]  # Token ids, [rows][tokens]
    columns: Mapping[str, Sequence[Any]]  # Dataset columns by name, each [rows]
    turns: Sequence[int] = ()  # Number of turns of the policy in each completion, [rows]
    places: Sequence[int] = ()  # The place of each row in its round, [rows]

    def __post_init__(self) -> None:
        if not self.turns:
            object.__setattr__(self, "turns", [_turns(one) for one in self.completions])
        if not self.places:
            object.__setattr__(self, "places", list(range(len(self.prompts))))
        lengths = {
            "prompts": len(self.prompts),
            "completions": len(self.completions),
            "completion_ids": len(self.completion_ids),
            "turns": len(self.turns),
            "places": len(self.places),
            **{f"columns[{name!r}]": len(column) for name, column in self.columns.items()},
        }
        if len(set(lengths.values())) > 1:
            raise ValueError(f"rows to score differ in length: {lengths}")

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, indices: Sequence[int]) -> RewardRows:
        """Return the rows at ``indices``, in that order."""
        return RewardRows(
            [self.prompts[i] for i in indices],
            [self.completions[i] for i in indices],
            [self.completion_ids[i] for i in indices],
            {name: [column[i] for i in indices] for name, column in self.columns.items()},
            [self.turns[i] for i in indices],
            [self.places[i] for i in indices],
        )


def _turns(completion: Any) -> int:
    messages = completion if isinstance(completion, list) else []
    roles = [message.get("role") for message in messages if isinstance(message, dict)]
    return max(1, roles.count("assistant"))


Score = tuple[float, ...] | None
"""The score of each turn, one for a reward that scores whole completions; None: not applicable."""


@dataclass(frozen=True)
class Failure:
    """The reason why an answer is no finite number: a type's name, ``"nan"`` or ``"infinity"``."""

    kind: str
    message: str = field(default="", compare=False, repr=False)  # The text of an exception
    answer: object = field(default=None, compare=False, repr=False)  # What the reward answered


def group_rows(users: Sequence[Any] | NDArray[Any]) -> list[list[int]]:
    """Return the row numbers of each user, users and rows in order of appearance.

    >>> group_rows(["a", "b", "a"])
    [[0, 2], [1]]
    """
    groups: dict[Any, list[int]] = {}
    # Elements of a tensor would each be a user of their own: they hash by identity.
    for i, user in enumerate(users.tolist() if hasattr(users, "tolist") else users):
        groups.setdefault(user, []).append(i)
    return list(groups.values())


def keywords_of(function: RewardFunction) -> tuple[frozenset[str] | None, frozenset[str]]:
    """Return the keywords that ``function`` accepts (None: any), and those that it requires.

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


def keywords_for(
    rows: RewardRows, state: RoundState | None = None, log: Any = None
) -> dict[str, Any]:
    """Return all keywords that TRL 1.16 passes; without a log, the logging functions do nothing."""
    return {
        # Copies: a reward that changes its arguments must not change the caller's rows.
        **{name: _copied(values) for name, values in rows.columns.items() if name not in _RESERVED},
        "prompts": _copied(rows.prompts),
        "completions": _copied(rows.completions),
        "completion_ids": [list(ids) for ids in rows.completion_ids],
        "trainer_state": state or RoundState(),
        "log_extra": log.log_extra if log else _drop,
        "log_metric": log.log_metric if log else _drop,
    }


def _copied(values: Sequence[Any]) -> list[Any]:
    """Copy a list, with the lists and mappings in it, such as messages."""
    return [_copied_value(value) for value in values]


def _copied_value(value: Any) -> Any:
    # No deepcopy: a column may hold objects, such as an agent's environment, that are meant.
    if isinstance(value, list):
        return _copied(value)
    if isinstance(value, dict):
        return {name: _copied_value(part) for name, part in value.items()}
    return value


def call_reward(
    reward: LoadedReward,
    rows: RewardRows,
    state: RoundState | None = None,
    log: Any = None,  # A :class:`~dprlhf.rewards.scoring.CallLog`, which takes what the call logs
) -> list[Score | Failure]:
    """Call a reward as TRL does and return the score of each row, or the reason why it has none.

    With a ``times_column`` the scores are multiplied by that column's values, each row by its own.
    Whatever the reward raises is passed on, also an exit in the methods of what it answers;
    KeyError also where the rows lack that column.
    """
    takes, _ = keywords_of(reward.function)
    keywords = keywords_for(rows, state, log)
    if reward.by_place:
        keywords["places"] = list(rows.places)
    answer = reward.function(**{k: v for k, v in keywords.items() if takes is None or k in takes})
    if inspect.isawaitable(answer):
        answer = wait_for(answer)
    if hasattr(answer, "tolist"):  # numpy arrays and torch tensors
        answer = answer.tolist()
    if not isinstance(answer, list | tuple):
        raise AnswerError(f"answered a {type(answer).__name__}, not a list")
    answer = list(answer)  # a subclass of list may have another length than it has values
    if len(answer) != len(rows):
        raise AnswerError(f"answered {len(answer)} values for {len(rows)} completions")
    scores = [
        parse_turns(value, turns if reward.by_turn else 1, by_turn=reward.by_turn)
        for value, turns in zip(answer, rows.turns, strict=True)
    ]
    if reward.times_column is None:
        return scores
    factors = rows.columns[reward.times_column]
    return [_product(score, factor) for score, factor in zip(scores, factors, strict=True)]


def _listed(answer: Any) -> list[Any] | None:
    """Return a list, tuple or array as a list; None for anything else."""
    answer = answer.tolist() if hasattr(answer, "tolist") else answer
    return list(answer) if isinstance(answer, list | tuple) else None


def _product(score: Score | Failure, factor: object) -> Score | Failure:
    """Return a score times a factor, which another row's stray word makes a text.

    >>> _product((2.0,), 0.5), _product((2.0, 1.0), " 0.5"), _product((2.0,), "none")
    ((1.0,), (1.0, 0.5), Failure(kind='str'))
    """
    by = parse_answer(spelt(factor))
    if isinstance(score, tuple) and isinstance(by, float):
        return parse_turns([value * by for value in score], len(score), by_turn=True)
    return next((part for part in (score, by) if isinstance(part, Failure)), None)


def parse_answer(answer: object) -> float | Failure | None:
    """Return an answer as a finite number, None (does not apply), or the reason for neither.

    >>> parse_answer(True), parse_answer(None), parse_answer("1.0"), parse_answer(float("nan"))
    (1.0, None, Failure(kind='str'), Failure(kind='nan'))
    """
    if answer is None:
        return None
    if isinstance(answer, str | bytes | bytearray):  # float() would read digits
        return Failure(type(answer).__name__)
    try:
        value = float(answer)  # type: ignore[arg-type]
    except EXITS:
        raise
    except BaseException:
        return Failure(type(answer).__name__)
    if not math.isfinite(value):
        return Failure("nan" if math.isnan(value) else "infinity")
    return value


def parse_turns(answer: object, turns: int, *, by_turn: bool) -> Score | Failure:
    """Return the score of each turn, None (does not apply), or the reason for neither.

    One number is the whole trajectory's, known at its end: it counts at the last turn. In a list,
    None is no score for that turn; a list with nothing else does not apply.

    >>> parse_turns([0.5, None, 1], 3, by_turn=True), parse_turns(2, 3, by_turn=True)
    ((0.5, 0.0, 1.0), (0.0, 0.0, 2.0))
    >>> parse_turns([0.5, 1], 3, by_turn=True)
    Failure(kind='turns')
    """
    try:
        listed = _listed(answer) if by_turn else None
    except EXITS:
        raise
    except BaseException:
        return Failure(type(answer).__name__, answer=answer)
    if listed is None:
        listed = [None] * (turns - 1) + [answer]
    if len(listed) != turns:
        return Failure("turns", answer=answer)
    values = [parse_answer(one) for one in listed]
    failed = [one for one in values if isinstance(one, Failure)]
    if failed:
        return Failure(failed[0].kind, answer=answer)
    if all(one is None for one in values):
        return None
    return tuple(one if isinstance(one, float) else 0.0 for one in values)


def type_and_message(problem: BaseException) -> str:
    """Return an exception's type and message on one line; for public inputs only."""
    message = one_line(problem, None)
    return f"{type(problem).__name__}: {message}" if message else type(problem).__name__


def suggestion(name: str, known: Sequence[str], what: str) -> str:
    """Return the end of an error message: the nearest known name and the list of all."""
    near = nearest(name, known)
    hint = f"did you mean {near!r}? " if near else ""
    return f"{hint}{what}: {', '.join(known) or 'none'}"


def name_of(function: object) -> str:
    """Return a callable's name, looking through ``functools.partial``."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def is_async(function: object) -> bool:
    """Return whether a callable, also inside ``functools.partial``, is asynchronous."""
    while isinstance(function, functools.partial):
        function = function.func
    called = getattr(function, "__call__", None)  # noqa: B004 - the method itself is looked at
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def _drop(*_: object, **__: object) -> None:
    """Stand in for TRL's ``log_extra`` and ``log_metric`` where there is no log."""
