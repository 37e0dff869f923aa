"""Load the recipe's policy, and decide what depends on it before a run.

That is the micro-batch of sampling, the adapter's start and the clip norm, from public data alone.
"""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Any

import numpy as np

from dprlhf.data.public import CONTRASTED, Guides, held_out, leftover
from dprlhf.data.users import Users
from dprlhf.errors import DprlhfError
from dprlhf.policies.activations import align_with_activations
from dprlhf.policies.causal_lm import CausalLMPolicy, prompt_room
from dprlhf.policies.loading import load_policy
from dprlhf.policies.protocol import Sampling
from dprlhf.privacy.plan import Plan
from dprlhf.recipe import Recipe
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

_MEASURED = 512
"""Public prompts whose lengths decide the longest prompt."""


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
            some = public.select(np.arange(min(_MEASURED, public.count)))
            with contextlib.suppress(Exception):  # their own check says what is wrong with them
                whole = policy.encode(some.prompts, sys.maxsize, some.for_template)
                usual = np.quantile([len(tokens) for tokens in whole], 0.99, method="higher")
                longest = 16 * max(1, math.ceil(usual / 16))
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
