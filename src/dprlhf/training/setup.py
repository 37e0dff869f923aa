"""Load the recipe's policy, decide what depends on it before a run, and check the rewards.

What is decided is the micro-batch of sampling, the adapter's start and the clip norm, from public
data alone. The rewards are checked on public prompts: that they work, and couple no users.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from dprlhf.data.given_rewards import BY_TURN
from dprlhf.data.public import CONTRASTED, Guides, held_out, leftover
from dprlhf.data.users import Prompts, Users
from dprlhf.errors import DprlhfError, nearest
from dprlhf.policies.activations import align_with_activations
from dprlhf.policies.causal_lm import LENGTH_ROWS, CausalLMPolicy, prompt_room, usual_length
from dprlhf.policies.loading import load_policy
from dprlhf.policies.protocol import Sampling
from dprlhf.privacy.plan import Plan
from dprlhf.recipe import Recipe
from dprlhf.recipe.rl import updates_that
from dprlhf.rewards import LoadedReward, RewardSummary, check_reward, summarize_rewards
from dprlhf.rewards.check import NeverAppliesError, lacking_columns
from dprlhf.rewards.isolation import captured
from dprlhf.rewards.reward import RoundState
from dprlhf.rewards.scoring import rows_to_score
from dprlhf.rollout import public_sampling_settings, resolve_batch_size, sample_public


def load_policy_of(recipe: Recipe, **given: Any) -> CausalLMPolicy:
    """Load the recipe's policy, and check that prompts and responses fit into its context."""
    temperature, seed = recipe.rollout.temperature, recipe.seed
    policy = load_policy(recipe.policy, temperature=temperature, seed=seed, **given)
    with_sampling(policy, recipe)
    recipe = with_prompt_width(recipe, policy)
    prompt, response = recipe.data.max_prompt_tokens, recipe.rollout.max_new_tokens
    policy.check_context_length(
        prompt + response,
        f"data.max_prompt_tokens {prompt} + rollout.max_new_tokens {response} is",
        recipe.policy.model_name_or_path,
    )
    return policy


LONGEST_PROMPT = 512
"""The longest prompt of a long context, in tokens, where no public rows show how long they are."""


def with_prompt_width(
    recipe: Recipe, policy: CausalLMPolicy, public: Users | None = None, tools: int = 0
) -> Recipe:
    """Settle the longest prompts where the recipe states none.

    They are as long as 99 of 100 public prompts, up to a multiple of 16; without public rows 512
    tokens and what an agent's tools take; and never more than a response leaves of the model's
    context.
    """
    data = recipe.data
    if "max_prompt_tokens" not in data.model_fields_set:
        longest = LONGEST_PROMPT + tools
        if public is not None and recipe.rollout.agent is None:  # environments add to prompts
            some = public.select(np.arange(min(LENGTH_ROWS, public.count)))
            with contextlib.suppress(Exception):  # their own check says what is wrong with them
                whole = policy.encode(some.prompts, sys.maxsize, some.for_template)
                longest = usual_length([len(tokens) for tokens in whole])
        width = prompt_room(policy.room, recipe.rollout.max_new_tokens, longest)
        data = data.model_copy(update={"max_prompt_tokens": width})
    if tools > data.max_prompt_tokens:
        raise DprlhfError(
            f"data.max_prompt_tokens {data.max_prompt_tokens}: the tools alone take {tools} tokens"
            " of each prompt, and a longer prompt loses its start: raise it"
        )
    return recipe.model_copy(update={"data": data})


def with_sampling(policy: CausalLMPolicy, recipe: Recipe) -> CausalLMPolicy:
    """Give a policy the recipe's way of sampling, stop strings and chat template settings."""
    rollout = recipe.rollout
    policy.sampling = Sampling.of(rollout)
    policy.stop = None
    if rollout.stop:
        from dprlhf.policies.warpers import StopStrings

        policy.stop = StopStrings(policy.tokenizer, rollout.stop)
    policy.chat_template_kwargs = recipe.policy.chat_template_kwargs
    return policy


def with_batch_size(recipe: Recipe, plan: Plan, policy: CausalLMPolicy, processes: int) -> Recipe:
    """Decide the micro-batch of sampling, where the recipe says ``auto``, from public numbers."""
    rollout = resolve_batch_size(
        recipe.rollout,
        policy,
        rows=plan.expected_batch_size * recipe.rollout.responses / processes,
        max_prompt_tokens=recipe.data.max_prompt_tokens,
    )
    return recipe.model_copy(update={"rollout": rollout})


def start_adapter(
    policy: CausalLMPolicy, recipe: Recipe, public: Users | None, guides: Guides | None
) -> None:
    """Give the adapter the start that ``policy.adapter.init`` names, from public prompts."""
    adapter = recipe.policy.adapter
    column = adapter.contrast_column
    if public is None or adapter.init == "random":
        return
    prompts, classes = held_out(recipe, public), None
    if column is not None:
        prompts = (guides or leftover(recipe, public)).first_rows(CONTRASTED)
        if column not in prompts.columns:
            raise DprlhfError(
                f"policy.adapter.contrast_column: the public rows have no column {column!r}; they"
                f" have {sorted(prompts.columns)}"
            )
        classes = [str(value) for value in prompts.columns[column]]
        if len(set(classes)) <= adapter.rank:
            raise DprlhfError(
                f"policy.adapter.contrast_column: {len(classes)} public rows have"
                f" {len(set(classes))} different values of {column!r}; rank {adapter.rank} needs"
                f" {adapter.rank + 1}: give more public rows, or lower the rank"
            )
    one = public_sampling_settings(recipe.rollout, len(prompts), 1)
    some = sample_public(policy, prompts, recipe, one, "alignment")
    align_with_activations(policy, some.tokens, some.mask, recipe.update.batch_size, classes)


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
