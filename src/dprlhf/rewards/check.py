"""Check on public prompts that a reward scores each user on their own, and sum up what it gave."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dprlhf.data.given_rewards import BY_TURN
from dprlhf.data.messages import text_of
from dprlhf.errors import DprlhfError
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
    keywords_for,
    keywords_of,
    type_and_message,
)
from dprlhf.rewards.scoring import CallLog


@dataclass(frozen=True)
class CheckedBatch:
    """Rows under test: a unit is one row, or a user's rows for a reward declared per-user."""

    reward: LoadedReward
    rows: RewardRows
    units: list[list[int]]  # The row numbers of each unit, [units][rows of it]
    users: int
    state: RoundState  # The trainer_state that the reward is called with

    @classmethod
    def of(
        cls,
        reward: LoadedReward,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: Mapping[str, Sequence[Any]] | None,
        completion_ids: Sequence[Sequence[int]] | None,
        users: Sequence[Any] | None,
        turns: Sequence[int],
        state: RoundState,
    ) -> CheckedBatch:
        """Form the units from the arguments of :func:`~dprlhf.rewards.check.check_reward`."""
        if completion_ids is None:
            completion_ids = [list(text_of(one).encode(errors="replace")) for one in completions]
        try:
            rows = RewardRows(prompts, completions, completion_ids, columns or {}, turns)
        except ValueError as error:
            raise DprlhfError(f"check_reward: {error}: give one of each for every row") from None
        owners = [text_of(prompt) for prompt in prompts] if users is None else list(users)
        if len(owners) != len(rows):
            raise DprlhfError(
                f"check_reward: {len(owners)} user ids for {len(rows)} rows: give one for every row"
            )
        groups = group_rows(owners)
        units = groups if reward.per_user else [[i] for i in range(len(rows))]
        if len(units) < 2:
            unit = "users" if reward.per_user else "completions"
            raise DprlhfError(
                f"reward {reward.name!r} cannot be checked on {len(units)} {unit}: give at least 2"
            )
        return cls(reward, rows, units, len(groups), state)

    def scores(self, chosen: Sequence[int]) -> dict[int, Score]:
        """Return the scores of the chosen units by row number, with the calls of a Scorer."""
        return self.evaluate(self.rows, self.units, chosen)

    def of_rows(self, numbers: Sequence[int]) -> Iterator[dict[int, Score]]:
        """Call the reward once with the rows of these numbers; yield each score by its number.

        A number may come several times, so the scores come one by one.
        """
        some = self.rows.take(numbers)
        units = [[place] for place in range(len(numbers))]
        scores = self.evaluate(some, units, range(len(numbers)))
        for place, i in enumerate(numbers):
            yield {i: scores[place]}

    def evaluate(
        self,
        rows: RewardRows,
        units: Sequence[Sequence[int]],
        chosen: Sequence[int],
    ) -> dict[int, Score]:
        """Return scores by row number of the chosen units, in one call or one call per user."""
        reward = self.reward
        members = [list(units[u]) for u in chosen]
        calls = members if reward.per_user else [[i for group in members for i in group]]
        scores: dict[int, Score] = {}
        for numbers in calls:
            log = CallLog(len(numbers))
            try:
                answers = call_reward(reward, rows.take(numbers), self.state, log)
            except (Exception, SystemExit) as problem:
                raise DprlhfError(
                    f"reward {reward.name!r} fails the check 'answer' on {len(numbers)}"
                    f" completions: {type_and_message(problem)}"
                ) from problem
            if log.problem:
                raise DprlhfError(f"reward {reward.name!r} fails the check 'answer': {log.problem}")
            for i, score in zip(numbers, answers, strict=True):
                if isinstance(score, Failure):
                    raise DprlhfError(
                        f"reward {reward.name!r} fails the check 'answer': completion {i} gets "
                        f"{score.answer!r}, not a finite number or None"
                        + _by_turn(reward, score.answer, rows.turns[i])
                    )
                scores[i] = score
        return scores


def _by_turn(reward: LoadedReward, answer: object, turns: int) -> str:
    """Return the end of a message about an answer that may be meant as a score for each turn."""
    if reward.by_turn:
        return f", nor a list of them for its {turns} turns"
    if isinstance(answer, list | tuple):
        return f"; to score each turn of an agent, write `{BY_TURN} = True` on the callable"
    return ""


_ALONE = 32  # limit on units scored alone, so that a slow reward does not delay the start
_SECONDS = 2.0  # limit on larger calls, for the same reason

MOST_ROWS = "dprlhf_most_rows"
"""The attribute of a reward that says beyond how many rows in a call it is no faster."""


@dataclass(frozen=True)
class ContractReport:
    """Measurements of :func:`check_reward`, on public prompts.

    Attributes:
        name: Name of the reward.
        per_user: Whether the reward is called once per user.
        rows: Number of completions scored.
        users: Number of users that they belong to.
        rows_per_second: Speed of one call with all rows (with ``per_user``: one call per user).
        minimum: Smallest score, before weight and clipping.
        mean: Mean score.
        maximum: Largest score.
        missing: Share of rows that the reward answers with None.
        clipped: Share of rows where |weight · score| is above R.
        scores: Score of each row, before weight and clipping, ``[rows]``; None where the reward
            does not apply. Of a reward by turn, the sum over the turns.
        moved: Largest change of a score with the rest of its batch: rounding, since a larger one
            is refused.
        checked_rows: The largest number of rows, a power of two, for which calls of it and of all
            smaller powers of two gave the same scores bit for bit, at every place; 0 where no call
            may have several users' rows.
    """

    name: str
    per_user: bool
    rows: int
    users: int
    rows_per_second: float
    minimum: float
    mean: float
    maximum: float
    missing: float
    clipped: float
    scores: tuple[float | None, ...] = field(repr=False)
    moved: float
    checked_rows: int = 0


def check_reward(
    reward: LoadedReward | RewardFunction,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]] | None = None,
    *,
    completion_ids: Sequence[Sequence[int]] | None = None,
    users: Sequence[Any] | None = None,
    turns: Sequence[int] = (),
    bound: float = math.inf,
    rtol: float = 1e-3,
    atol: float = 1e-3,
    most_rows: int = 2 * _ALONE,
    state: RoundState | None = None,
) -> ContractReport:
    """Check a reward on PUBLIC prompts: messages may quote scores and exceptions.

    The checks, each a call or a few with the same rows:

    - **answer**: one finite number or None per completion, and not only None;
    - **repeat**: the same call again, at once and after all other checks, gives the same;
    - **alone**: each completion alone scores as in the batch;
    - **order**: the reversed batch gives the same;
    - **company**: the batch followed by a copy of itself gives the same, twice;
    - **size**: calls with 2, 4, 8, … rows, up to ``most_rows``, give the same in both orders. Above
      32 rows it stops at the size at which the calls have taken two seconds, and where rounding
      moves a score.

    For a reward declared per-user, a unit is a user's rows instead of a row, and the reward is
    called as the :class:`~dprlhf.rewards.Scorer` does. Passing is evidence, not a proof: a reward
    can behave differently on other texts. Use several different prompts and completions. A reward
    that names ``trainer_state`` is checked at the first round and at the last.

    Args:
        reward: Loaded reward or callable.
        prompts: Texts or lists of messages, ``[rows]``.
        completions: Texts or lists of messages, ``[rows]``.
        columns: Dataset columns by name, each ``[rows]``.
        completion_ids: Token ids, ``[rows][tokens]``; by default the UTF-8 bytes of the text.
        users: Hashable user ids, ``[rows]``; by default rows with the same prompt are one user.
        turns: Number of turns of the policy in each completion, ``[rows]``; by default that of its
            messages of an assistant. Each turn's score is checked.
        bound: Bound R, for the share of scores outside ±R.
        rtol: Tolerance relative to the score in the batch.
        atol: Absolute tolerance, added to the relative one.
        most_rows: Largest number of rows of several users that a call will have; a reward's
            ``dprlhf_most_rows`` makes it less.
        state: The ``trainer_state`` of a run's first round; by default that of a run of one round.

    Raises:
        DprlhfError: a check fails; or there are fewer than two rows (users, when declared
            per-user), with which no dependence could show; or the arguments differ in length.

    >>> def brevity(completions):
    ...     return [-len(text) / 10 for text in completions]
    >>> check_reward(brevity, ["a", "b"], ["short", "rather long"]).minimum
    -1.1
    """
    reward, state = as_reward(reward), state or RoundState()
    most_rows = min(most_rows, getattr(reward.function, MOST_ROWS, most_rows))
    named = "trainer_state" in (keywords_of(reward.function)[0] or ())
    last = RoundState(**{**vars(state), "global_step": state.max_steps})
    reports = [
        _checked(
            CheckedBatch.of(
                reward, prompts, completions, columns, completion_ids, users, turns, at
            ),
            rtol,
            atol,
            most_rows,
            bound,
        )
        for at in (state, last)[: 1 + named]
    ]
    moved, checked_rows = zip(*((one.moved, one.checked_rows) for one in reports), strict=True)
    worst = {"moved": max(moved), "checked_rows": 0 if max(moved) else min(checked_rows)}
    return ContractReport(**{**vars(reports[0]), **worst})


def _checked(
    batch: CheckedBatch, rtol: float, atol: float, most_rows: int, bound: float
) -> ContractReport:
    """Make all checks of :func:`check_reward` on a batch, with one ``trainer_state``."""
    lacking = lacking_columns(batch.reward, batch.rows)
    if lacking:
        raise DprlhfError(
            f"reward {batch.reward.name!r} needs the column {lacking[0]!r}, which the prompts lack"
            f" (their columns: {', '.join(sorted(batch.rows.columns)) or 'none'}): add it, or give"
            " the parameter a default"
        )
    everything = range(len(batch.units))
    scores = batch.scores(everything)
    if all(value is None for value in scores.values()):
        raise NeverAppliesError(
            f"reward {batch.reward.name!r} fails the check 'answer': it answers None for all "
            f"{len(batch.rows)} completions, so it never applies"
        )
    start = time.perf_counter()
    again = batch.scores(everything)
    seconds = time.perf_counter() - start

    def moved(check: str, other: Mapping[int, Score], situation: str) -> float:
        return _largest_move(batch.reward, scores, other, check, situation, rtol, atol)

    step = max(1, math.ceil(len(batch.units) / _ALONE))
    moves = [
        moved("repeat", again, "when called again with the same batch"),
        *(moved("alone", batch.scores([unit]), "alone") for unit in everything[::step]),
        moved("order", batch.scores(everything[::-1]), "in reversed order"),
        *(
            moved("company", half, "in a batch with a copy of every completion")
            for half in _in_company(batch)
        ),
        moved("repeat", batch.scores(everything), "after some more calls"),
    ]
    checked_rows = 0
    if batch.reward.by_place:  # its calls have all rows, whatever their number
        checked_rows = most_rows
    elif not batch.reward.per_user and not max(moves):
        checked_rows = _largest_size(batch, most_rows, moved)
    end = batch.scores(everything)
    moves.append(moved("repeat", end, "after calls of other sizes"))
    rows = len(batch.rows)
    sums = {i: None if score is None else math.fsum(score) for i, score in scores.items()}
    values = [value for value in sums.values() if value is not None]
    return ContractReport(
        name=batch.reward.name,
        per_user=batch.reward.per_user,
        rows=rows,
        users=batch.users,
        rows_per_second=rows / max(seconds, 1e-9),
        minimum=min(values),
        mean=math.fsum(values) / len(values),
        maximum=max(values),
        missing=1 - len(values) / rows,
        clipped=sum(abs(batch.reward.weight * value) > bound for value in values) / rows,
        scores=tuple(sums[i] for i in range(rows)),
        moved=max(moves),
        checked_rows=0 if max(moves) else checked_rows,
    )


def _largest_size(
    batch: CheckedBatch, most: int, moved: Callable[[str, Mapping[int, Score], str], float]
) -> int:
    """Return the largest power of two, up to ``most``, whose calls give the same scores.

    Every place of a call is taken by some row in its order and, reversed, by another.
    """
    size, rows, start = 1, len(batch.rows), time.perf_counter()
    while 2 * size <= most:
        if size >= _ALONE and time.perf_counter() - start > _SECONDS:
            break
        numbers = [i % rows for i in range(2 * size)]
        orders = (numbers, [(i + 1) % rows for i in numbers[::-1]])
        scores = (score for order in orders for score in batch.of_rows(order))
        if max(moved("size", score, f"in a call of {2 * size}") for score in scores):
            break
        size *= 2
    return size


class NeverAppliesError(DprlhfError):
    """A reward answers None to all completions."""


def _in_company(batch: CheckedBatch) -> Iterator[dict[int, Score]]:
    """Score the batch followed by a copy of itself; yield the scores of either half."""
    # Two copies need row numbers of their own, or the second would hide the first.
    count = len(batch.rows)
    doubled = batch.rows.take([*range(count), *range(count)])
    if batch.reward.by_place:  # the copy has places of its own, where its rows may round otherwise
        doubled = RewardRows(**{**vars(doubled), "places": list(range(2 * count))})
    copies = [[i + count for i in members] for members in batch.units]
    both = batch.evaluate(doubled, [*batch.units, *copies], range(2 * len(batch.units)))
    for offset in (0, count)[: 1 if batch.reward.by_place else 2]:
        yield {i: both[i + offset] for i in range(count)}


def _largest_move(
    reward: LoadedReward,
    expected: Mapping[int, Score],
    other: Mapping[int, Score],
    check: str,
    situation: str,
    rtol: float,
    atol: float,
) -> float:
    """Return the largest difference between two scores of a row; raise beyond the tolerance."""
    largest = 0.0
    for i, score in other.items():
        if not _close(score, expected[i], rtol, atol):
            remedy = (
                "one user's score would depend on other users: score each completion by itself, or,"
                " if it compares one user's completions only, declare it per-user"
                " (`dprlhf_per_user = True` on the callable)"
            )
            if check == "repeat" or reward.per_user:
                remedy = (
                    "a reward must not draw at random, nor keep anything from call to call that"
                    " changes a score, as a running mean does: make it a function of its arguments"
                )
            raise DprlhfError(
                f"reward {reward.name!r} fails the check {check!r}: completion {i} scores"
                f" {_shown(expected[i])} in the batch and {_shown(score)} {situation}; {remedy}"
            )
        pairs = zip(score or (), expected[i] or (), strict=True)
        largest = max(largest, *(abs(one - other) for one, other in pairs), 0.0)
    return largest


def _shown(score: Score) -> str:
    return repr(list(score) if score and len(score) > 1 else score and score[0])


def lacking_columns(reward: LoadedReward, rows: RewardRows) -> list[str]:
    """Return the columns that a reward cannot do without and that these rows lack."""
    _, needs = keywords_of(reward.function)
    if reward.times_column is not None:
        needs |= {reward.times_column}
    return sorted(needs - set(keywords_for(rows)))


def _close(score: Score, expected: Score, rtol: float, atol: float) -> bool:
    if score is None or expected is None:
        return score is expected
    pairs = zip(score, expected, strict=True)
    return all(abs(one - other) <= atol + rtol * abs(other) for one, other in pairs)


_MOSTLY = 0.9


@dataclass(frozen=True)
class RewardSummary:
    """The weighted sum of the rewards on some public responses, clipped to ±R: public values."""

    responses: int
    mean: float  # Mean of the clipped sums
    std: float
    clipped: float  # Share of responses whose sum is outside ±R
    bound: float
    rounded: dict[str, float]  # Largest change of a score with its batch, by reward
    # The most rows of several users in a call, by reward
    checked_rows: dict[str, int] = field(default_factory=dict)
    # Why a reward could not be checked, by reward; only rewards that were not
    unchecked: dict[str, str] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        """Warnings that the reward is slow, unchecked, or gives no signal although ε is spent."""
        messages = [
            f"rounding moves the scores of reward {name!r} by up to {moved:.2g} with their batch,"
            " so it is called for one user at a time; with inputs of a fixed shape it could be"
            " called for all at once"
            for name, moved in self.rounded.items()
        ]
        # Without the rewards that could not be checked, the sum of the others says little.
        if not self.unchecked and self.clipped >= _MOSTLY:
            messages.append(
                f"the reward is outside ±{self.bound:g} (reward_range) on {self.clipped:.0%} of"
                f" {self.responses} public responses: clipped, it teaches little, and the run"
                " spends its epsilon all the same; raise reward_range or lower the weights"
            )
        elif not self.unchecked and self.std <= 1e-6 * self.bound:
            messages.append(
                f"the reward is {self.mean:.4g} on all {self.responses} public responses: a reward"
                " that never differs cannot teach, and the run spends its epsilon all the same"
            )
        return messages + [
            f"reward {name!r} {why}, so it could not be checked. It is called for one user at a"
            " time; that it keeps nothing of one user for the next is your promise. Public rows"
            " that it scores (evaluation) let it be checked"
            for name, why in self.unchecked.items()
        ]


def summarize_rewards(
    rewards: Sequence[LoadedReward],
    reports: Sequence[ContractReport],
    bound: float,
    unchecked: dict[str, str] | None = None,
) -> RewardSummary:
    """Summarize the weighted sum of the rewards from their contract checks on the same rows."""
    unchecked = unchecked or {}
    if not reports:
        return RewardSummary(0, 0.0, 0.0, 0.0, bound, {}, unchecked=unchecked)
    scores = [[0.0 if s is None else s for s in report.scores] for report in reports]
    names = {r.name for r in reports} - unchecked.keys()  # two rewards may have one name
    sums = np.array([reward.weight for reward in rewards]) @ np.array(scores)
    bounded = sums.clip(-bound, bound)
    return RewardSummary(
        responses=len(sums),
        mean=float(bounded.mean()),
        std=float(bounded.std()),
        clipped=float((abs(sums) > bound).mean()),
        bound=bound,
        rounded={r.name: r.moved for r in reports if r.moved and not r.per_user},
        checked_rows={
            name: min(r.checked_rows for r in reports if r.name == name) for name in names
        },
        unchecked=unchecked,
    )
