"""Check on public prompts that a reward scores each user on their own."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dprlhf.errors import DprlhfError
from dprlhf.rewards.loading import Reward, RewardFunction, load_reward, type_and_message
from dprlhf.rewards.scoring import (
    Failure,
    Rows,
    call_reward,
    group_rows,
    keywords_for,
    keywords_of,
    parse_answer,
    text_of,
)

_ALONE = 32  # units scored alone at most: a slow reward should not delay the start by minutes


@dataclass(frozen=True)
class ContractReport:
    """What :func:`check_reward` measured: public values.

    Attributes:
        name: the reward's name.
        per_user: whether the reward is called once per user.
        rows: completions scored.
        users: how many users they belong to.
        rows_per_second: speed of one call with all rows (of one call per user when ``per_user``).
        minimum: smallest score, without weight and clipping.
        mean: mean score.
        maximum: largest score.
        missing: share of rows that the reward answers with None.
        clipped: share of rows where |weight · score| is above R.
        scores: of each row, without weight and clipping; None where the reward does not apply.
        moved: by how much a score differed at most with what else was in the call: rounding, if
            anything, for more is refused.
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


def check_reward(
    reward: Reward | RewardFunction,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]] | None = None,
    *,
    completion_ids: Sequence[Sequence[int]] | None = None,
    users: Sequence[Any] | None = None,
    bound: float = math.inf,
    rtol: float = 1e-3,
    atol: float = 1e-3,
) -> ContractReport:
    """Check a reward on PUBLIC prompts: messages may quote scores and exceptions.

    The checks, each a call or a few with the same rows:

    - **answer**: one finite number or None per completion, and not only None;
    - **repeat**: the same call again, at once and after all other checks, gives the same;
    - **alone**: each completion alone scores as in the batch;
    - **order**: the reversed batch gives the same;
    - **company**: the batch followed by a copy of itself gives the same, twice.

    For a reward declared per-user, a unit is a user's rows instead of a row, and the reward is
    called as the :class:`~dprlhf.rewards.Scorer` does. Passing is evidence, not a proof: a reward
    can behave differently on other texts. Use several different prompts and completions.

    Args:
        reward: a loaded reward or a callable.
        prompts: ``[rows]``, texts or lists of messages.
        completions: ``[rows]``, texts or lists of messages.
        columns: dataset columns by name, each ``[rows]``.
        completion_ids: ``[rows][tokens]``; by default the UTF-8 bytes of the completion's text.
        users: ``[rows]``, any hashable ids; by default rows with the same prompt are one user.
        bound: R, for the share of scores outside ±R.
        rtol: tolerance relative to the score in the batch.
        atol: absolute tolerance, added to the relative one.

    Raises:
        DprlhfError: a check fails; or there are fewer than two rows (users, when declared
            per-user), with which no dependence could show.
        ValueError: the arguments differ in length.

    >>> def brevity(completions):
    ...     return [-len(text) / 10 for text in completions]
    >>> check_reward(brevity, ["a", "b"], ["short", "rather long"]).minimum
    -1.1
    """
    reward = reward if isinstance(reward, Reward) else load_reward(reward)
    if completion_ids is None:
        completion_ids = [list(text_of(completion).encode()) for completion in completions]
    rows = Rows(prompts, completions, completion_ids, columns or {})
    users = [text_of(prompt) for prompt in prompts] if users is None else list(users)
    if len(users) != len(rows):
        raise ValueError(f"{len(users)} user ids for {len(rows)} rows to check")
    groups = group_rows(users)
    units = groups if reward.per_user else [[i] for i in range(len(rows))]
    unit = "users" if reward.per_user else "completions"
    if len(units) < 2:
        raise DprlhfError(
            f"reward {reward.name!r} cannot be checked on {len(units)} {unit}: give at least 2"
        )
    _check_columns(reward, rows)

    everything = range(len(units))
    batch = _evaluate(reward, rows, units, everything)
    values = [value for value in batch.values() if value is not None]
    if not values:
        raise DprlhfError(
            f"reward {reward.name!r} fails the check 'answer': it answers None for all "
            f"{len(rows)} completions, so it never applies"
        )

    start = time.perf_counter()
    again = _evaluate(reward, rows, units, everything)
    seconds = time.perf_counter() - start

    moved = 0.0

    def compare(check: str, other: Mapping[int, float | None], situation: str) -> None:
        nonlocal moved
        for i, value in other.items():
            if not _close(value, batch[i], rtol, atol):
                raise DprlhfError(
                    f"reward {reward.name!r} fails the check {check!r}: completion {i} scores "
                    f"{batch[i]!r} in the batch and {value!r} {situation}; "
                    + _remedy(check, reward.per_user)
                )
            moved = max(moved, abs((value or 0.0) - (batch[i] or 0.0)))

    compare("repeat", again, "when called again with the same batch")
    step = max(1, math.ceil(len(units) / _ALONE))
    for u in everything[::step]:
        compare("alone", _evaluate(reward, rows, units, [u]), "alone")
    compare("order", _evaluate(reward, rows, units, everything[::-1]), "in reversed order")
    # Two copies need row numbers of their own, or the second would hide the first.
    doubled = rows.take([*range(len(rows)), *range(len(rows))])
    copies = [[i + len(rows) for i in members] for members in units]
    company = _evaluate(reward, doubled, [*units, *copies], range(2 * len(units)))
    for offset in (0, len(rows)):
        compare(
            "company",
            {i: company[i + offset] for i in range(len(rows))},
            "in a batch with a copy of every completion",
        )
    compare("repeat", _evaluate(reward, rows, units, everything), "after some more calls")

    return ContractReport(
        name=reward.name,
        per_user=reward.per_user,
        rows=len(rows),
        users=len(groups),
        rows_per_second=len(rows) / max(seconds, 1e-9),
        minimum=min(values),
        mean=math.fsum(values) / len(values),
        maximum=max(values),
        missing=1 - len(values) / len(rows),
        clipped=sum(abs(reward.weight * value) > bound for value in values) / len(rows),
        scores=tuple(batch[i] for i in range(len(rows))),
        moved=moved,
    )


def _check_columns(reward: Reward, rows: Rows) -> None:
    _, needs = keywords_of(reward.function)
    lacking = sorted(needs - set(keywords_for(rows)))
    if lacking:
        raise DprlhfError(
            f"reward {reward.name!r} needs the column {lacking[0]!r}, which the prompts lack "
            f"(their columns: {', '.join(sorted(rows.columns)) or 'none'}): add it, or give the "
            "parameter a default"
        )


def _evaluate(
    reward: Reward, rows: Rows, units: Sequence[Sequence[int]], chosen: Sequence[int]
) -> dict[int, float | None]:
    """Scores by row number of the chosen units, in one call or one per user, as the Scorer does."""
    members = [list(units[u]) for u in chosen]
    calls = members if reward.per_user else [[i for group in members for i in group]]
    scores: dict[int, float | None] = {}
    for numbers in calls:
        try:
            answers = call_reward(reward.function, rows.take(numbers))
        except Exception as problem:
            raise DprlhfError(
                f"reward {reward.name!r} fails the check 'answer' on {len(numbers)} completions: "
                f"{type_and_message(problem)}"
            ) from problem
        for i, answer in zip(numbers, answers, strict=True):
            value = parse_answer(answer)
            if isinstance(value, Failure):
                raise DprlhfError(
                    f"reward {reward.name!r} fails the check 'answer': completion {i} gets "
                    f"{answer!r}, not a finite number or None"
                )
            scores[i] = value
    return scores


def _close(value: float | None, expected: float | None, rtol: float, atol: float) -> bool:
    if value is None or expected is None:
        return value is expected
    return abs(value - expected) <= atol + rtol * abs(expected)


def _remedy(check: str, per_user: bool) -> str:
    if check == "repeat" or per_user:
        return (
            "a reward must not keep anything from call to call or draw at random: make it a "
            "function of its arguments"
        )
    return (
        "one user's score would depend on other users: score each completion by itself, or, if it "
        "compares one user's completions only, declare it per-user (`per_user: true` in the recipe "
        "or `dprlhf_per_user = True` on the callable)"
    )
