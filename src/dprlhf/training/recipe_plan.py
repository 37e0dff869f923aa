"""The privacy plan of a recipe of any stage, and the dtype that a recipe leaves to the machine."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import torch

from dprlhf.data.in_memory import InMemoryInputs, R
from dprlhf.data.users import Users
from dprlhf.hardware import native_dtype
from dprlhf.privacy.plan import Plan, check_promise, make_plan
from dprlhf.recipe import IN_MEMORY, AnyRecipe


def resolve_dtype(recipe: R, sources: InMemoryInputs) -> R:
    """Settle the dtype, so that a resumed run computes as it did before.

    It is the machine's choice; of a model that was given in Python, that of its weights.
    """
    if recipe.policy.dtype != "auto":
        return recipe
    dtype = str(native_dtype()).removeprefix("torch.")
    if recipe.classifier:
        dtype = "float32"
    elif recipe.policy.model_name_or_path == IN_MEMORY and sources.policy is not None:
        own = sources.policy.network.get_input_embeddings().weight.dtype
        dtype = "bfloat16" if own == torch.bfloat16 else "float32"
    trained = recipe.policy.model_copy(update={"dtype": dtype})
    return cast(R, recipe.model_copy(update={"policy": trained}))


def plan_of_run(
    recipe: AnyRecipe, users: Users, opened: Mapping[str, Any], sources: InMemoryInputs
) -> Plan:
    """Return the plan of a private run, or that of a run on stand-ins, which states no ε."""
    if sources.stand_in_plan is None:
        return plan_of(recipe, users, opened)
    plan = sources.stand_in_plan(recipe)
    if plan.private or plan.users != users.count:
        raise ValueError(
            "the plan of a run on stand-ins is for its own users and states no epsilon"
        )
    return plan


def plan_of(
    recipe: AnyRecipe, users: Users | int, opened: Mapping[str, Any] = MappingProxyType({})
) -> Plan:
    """Return the privacy plan of a recipe of any stage.

    ``opened`` has the terms that the ledger of a continued run states, whose adjacency, noise and ε
    it keeps; a new run has none.
    """
    privacy = recipe.privacy
    stated = opened.get("adjacency")
    if stated is None:
        check_promise(privacy.adjacency)
    settings: dict[str, Any] = {
        "users": users if isinstance(users, int) else users.count,
        "rounds": recipe.rounds,
        "delta": privacy.delta,
        "clip_norm": recipe.update.clip_norm,
        "partition": privacy.partition,
        "adjacency": stated or privacy.adjacency,
        "participations": privacy.participations,
        "releases_per_round": recipe.update.releases,
        "bands": privacy.bands,
    }
    if opened and privacy.max_guess is not None:
        # The search for the noise may end elsewhere on another processor: the stated one stays.
        privacy = privacy.asking(noise_multiplier=opened["noise_multiplier"])
    if privacy.max_guess is None:
        settings |= {"epsilon": privacy.epsilon, "noise_multiplier": privacy.noise_multiplier}
        return make_plan(**settings).continued(opened)
    from dprlhf.privacy.max_guess import plan_within

    return plan_within(privacy.max_guess, **settings).continued(opened)
