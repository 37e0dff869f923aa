"""The rows on which a reward is checked, and the calls of the reward with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dprlhf.data.given_rewards import BY_TURN
from dprlhf.data.messages import text_of
from dprlhf.errors import DprlhfError
from dprlhf.rewards.logs import CallLog
from dprlhf.rewards.reward import (
    Failure,
    LoadedReward,
    RewardRows,
    RoundState,
    call_reward,
    group_rows,
    parse_turns,
    type_and_message,
)

Score = tuple[float, ...] | None
"""The score of each turn, one for a reward that scores whole completions; None: not applicable."""


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
            completion_ids = [list(text_of(completion).encode()) for completion in completions]
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
            for i, answer in zip(numbers, answers, strict=True):
                turns = rows.turns[i] if reward.by_turn else 1
                value = parse_turns(answer, turns, by_turn=reward.by_turn)
                if isinstance(value, Failure):
                    raise DprlhfError(
                        f"reward {reward.name!r} fails the check 'answer': completion {i} gets "
                        f"{answer!r}, not a finite number or None" + _by_turn(reward, answer, turns)
                    )
                scores[i] = value
        return scores


def _by_turn(reward: LoadedReward, answer: object, turns: int) -> str:
    """Return the end of a message about an answer that may be meant as a score for each turn."""
    if reward.by_turn:
        return f", nor a list of them for its {turns} turns"
    if isinstance(answer, list | tuple):
        return f"; to score each turn of an agent, write `{BY_TURN} = True` on the callable"
    return ""
