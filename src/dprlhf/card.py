"""The privacy card: what a run guarantees, in JSON and in the model card."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dprlhf.plan import Plan
from dprlhf.privacy.gaussian import upwards
from dprlhf.recipe import Recipe

_NEIGHBOURS = {
    "add-remove": "one user is added or removed",
    "zero-out": "one user's data is replaced by nothing",
    "replace-one": "one user's data is replaced by another user's",
}

_FITTED = {
    False: "it was not fitted on the users",
    True: "declared as fitted on the users, at a privacy cost that is not counted here",
}


def privacy_card(recipe: Recipe, plan: Plan, dimension: int) -> dict[str, Any]:
    """Return the guarantee and everything that it rests on, JSON-ready."""
    unit = (
        f"all rows with one value of '{recipe.data.user_column}'"
        if recipe.data.user_column
        else "one row of the prompt dataset"
    )
    released = ["the noised mean gradient of each round, and what follows from it: the policy"]
    if recipe.privacy.reward_share:
        released.append("the noised mean reward and count of each round, in the same release")
    critic = getattr(recipe.update, "critic", None)
    if critic is not None:
        released.append(
            f"the noised step of a critic of {1 + critic.features} numbers in each round, in the"
            f" same release: {critic.share:g} of its budget, at noise multiplier"
            f" {plan.noise_multiplier / critic.share**0.5:.4g}"
        )
    return {
        "private": plan.private,
        "unit": f"user = {unit}, at most {recipe.data.max_prompts_per_user} prompts",
        "neighbouring": _NEIGHBOURS[plan.adjacency],
        **plan.terms(),
        "sensitivity": plan.sensitivity if plan.private else None,
        "dimension": dimension,
        "noise_to_clip_ratio": plan.noise_to_clip_ratio(dimension),
        "released": released,
        "assumed_public": [
            f"the base model {recipe.policy.model_name_or_path}: "
            + _FITTED[recipe.policy.trained_on_private_users],
            *(
                f"the reward {name}: {_FITTED[reward.trained_on_private_users]}"
                for name, reward in zip(reward_names(recipe), recipe.rewards, strict=True)
            ),
            f"the number of users, {plan.users}",
            "the recipe, its seed, and the public evaluation prompts",
        ],
        "assumptions": [
            *plan.guarantee.assumptions,
            "secret/ stays secret: it holds the key that allocation and noise come from",
            "the recipe was not tuned on the same users; each tuning run on them costs its own ε",
        ],
    }


def reward_names(recipe: Recipe) -> list[str]:
    """Return what the recipe calls its rewards."""
    return [str(r.function or r.classifier or r.plugin) for r in recipe.rewards]


def is_hub_id(model: str) -> bool:
    """Return whether a model's name is that of a hub repository, not a folder or an asset."""
    return bool(re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", model)) and not Path(model).exists()


def guarantee_sentence(card: dict[str, Any]) -> str:
    """Return the guarantee in one sentence."""
    if not card["private"]:
        return "No privacy: this run adds no noise. It is a baseline for comparison."
    return (
        f"({upwards(card['epsilon'], 4)}, {upwards(card['delta'], 3)})-differential privacy where"
        f" neighbouring datasets differ in that {card['neighbouring']}; {card['unit']}; partition"
        f" {card['partition']}, {card['rounds']} rounds, noise multiplier"
        f" {card['noise_multiplier']:.4g}."
    )


def model_card(recipe: Recipe, card: dict[str, Any]) -> str:
    """Return the adapter's README with the standard metadata and a privacy section."""
    public = "\n".join(f"- {line}" for line in card["assumed_public"])
    assumptions = "\n".join(f"- {line}" for line in card["assumptions"])
    base = recipe.policy.model_name_or_path
    # The hub refuses a card whose base model is no repository.
    named = f"base_model: {base}\nbase_model_relation: adapter\n" if is_hub_id(base) else ""
    return f"""---
{named}library_name: peft
pipeline_tag: text-generation
tags:
- dprlhf
- differential-privacy
- reinforcement-learning
---

# {recipe.policy.model_name_or_path} tuned with dprlhf

A LoRA adapter ({recipe.policy.adapter.type}, rank {recipe.policy.adapter.rank}), tuned on private
prompts by the update `{recipe.update.name}` with the rewards {", ".join(reward_names(recipe))}.

## Privacy

{guarantee_sentence(card)}

Accountant: {card["accountant"]}; lower bound on the same ε: {card["epsilon_lower"]}.

Assumed public:

{public}

Assumptions:

{assumptions}
"""
