"""Check on public prompts, before a run, that the rewards work and that they couple no users."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dprlhf.data.given_rewards import BY_TURN
from dprlhf.data.users import Prompts
from dprlhf.errors import DprlhfError, nearest
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.recipe import Recipe
from dprlhf.recipe.rl import updates_that
from dprlhf.rewards import LoadedReward, RewardSummary, check_reward, summarize_rewards
from dprlhf.rewards.check import NeverAppliesError, lacking_columns
from dprlhf.rewards.isolation import captured
from dprlhf.rewards.reward import RoundState
from dprlhf.rewards.scoring import rows_to_score
from dprlhf.rollout import public_sampling_settings, sample_public

_LARGEST_CALL = 256
"""The most rows in a call of a reward, all of which are tried on public prompts first."""


def check_declared(rewards: Sequence[LoadedReward], recipe: Recipe, columns: Sequence[str]) -> None:
    """Refuse a ``times_column`` that the private rows lack, and scores by turn without turns."""
    for reward in rewards:
        if reward.times_column is not None and reward.times_column not in columns:
            raise DprlhfError(
                f"rewards: {reward.name!r} has times_column {reward.times_column!r}, which the"
                f" private rows lack; their columns are {', '.join(columns)}"
            )
        if reward.by_turn and recipe.rollout.agent is None:
            raise DprlhfError(
                f"rewards: {reward.name!r} scores the turns of an agent (rollout.agent), and a"
                f" response without one is a single turn: leave {BY_TURN} out"
            )
        if reward.by_turn and not recipe.update.turn_rewards:
            raise DprlhfError(
                f"rewards: {reward.name!r} scores each turn, which works with update.name"
                f" {updates_that(lambda kind: kind.turn_rewards)}; {recipe.update.name} compares"
                " whole responses: answer one score for each"
            )


def call_size(rows: float) -> int:
    """Return the size of a reward's calls, a power of two, from the rows expected in a round."""
    return min(_LARGEST_CALL, 1 << max(0, math.ceil(rows) - 1).bit_length())


def check_rewards(
    rewards: Sequence[LoadedReward],
    policy: CausalLMPolicy,
    recipe: Recipe,
    public: Prompts,
    columns: Sequence[str],
    *,
    private: bool,  # Whether public are stand-ins, without columns
    most_rows: int,
    state: RoundState,
) -> RewardSummary:
    """Check on public prompts that no reward couples users, and summarise their distribution.

    A reward that needs a column which only the users' rows have cannot be checked on prompts that
    stand in for public ones, and one that answers None, as of a task that they do not have, not on
    any: it is called for one user at a time.
    """
    per_user = any(reward.per_user for reward in rewards)
    # A reward that compares a user's responses cannot be checked on one response alone.
    responses = recipe.rollout.responses if per_user else 1
    wanted = min(len(public), max(2, 16 // responses))
    some = public.take(np.arange(wanted) * len(public) // wanted)  # of every task, if in blocks
    rollout = public_sampling_settings(recipe.rollout, len(some), responses)
    sampled = sample_public(policy, some, recipe, rollout, "evaluation")
    rows = rows_to_score(sampled)
    lacking = {r.name: missing for r in rewards if (missing := lacking_columns(r, rows))}
    unchecked: dict[str, str] = {}
    for name, missing in lacking.items():
        if not (private and {*missing} <= {*columns}):
            column = missing[0]
            needs = f"reward {name!r} needs the column {column!r}, which the"
            if column in columns:
                named = ", ".join(sorted(rows.columns)) or "none"
                raise DprlhfError(
                    f"{needs} users' rows have and the public prompts (evaluation.data) lack; their"
                    f" columns: {named}. Add it there, or give the parameter a default"
                )
            near = nearest(column, columns)
            hint = f"did you mean {near!r}? Or add" if near else "add"
            raise DprlhfError(
                f"{needs} prompts lack (their columns: {', '.join(columns)}): {hint} it, or give"
                " the parameter a default"
            )
        unchecked[name] = f"needs {', '.join(missing)}, which no public prompt has"
    checked, reports, nowhere = [], [], None
    with captured(None):  # a reward's own output would corrupt a plan that is printed as JSON
        for reward in rewards:
            if reward.name in lacking:
                continue
            try:
                report = check_reward(
                    reward,
                    rows.prompts,
                    rows.completions,
                    rows.columns,
                    completion_ids=rows.completion_ids,
                    users=sampled.user.tolist(),
                    turns=rows.turns,
                    bound=recipe.reward_range,
                    most_rows=most_rows,
                    state=state,
                )
            except NeverAppliesError as error:
                nowhere = error
                unchecked[reward.name] = f"answers None to all {len(sampled.user)} public responses"
                continue
            checked.append(reward)
            reports.append(report)
    if nowhere is not None and not reports and not private:
        raise nowhere
    return summarize_rewards(checked, reports, recipe.reward_range, unchecked)
