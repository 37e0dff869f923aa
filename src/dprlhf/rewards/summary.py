"""Summary of a recipe's reward on public responses, before any of the budget is spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dprlhf.rewards.check import ContractReport
from dprlhf.rewards.reward import LoadedReward

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
