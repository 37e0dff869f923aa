"""The recipe: strict, typed settings, read from YAML, from ``key=value`` overrides or from Python.

An unknown key or a bad value is refused before anything is loaded, with the nearest known key.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dprlhf.recipe.base import (
    IN_MEMORY,
    Experimental,
    PositiveFloat,
    PositiveInt,
    Settings,
    experimental,
)
from dprlhf.recipe.data import (
    Data,
    Documents,
    LoggedFeedback,
    PreferencePairs,
    Preferences,
    PublicData,
)
from dprlhf.recipe.loading import (
    AnyRecipe,
    dump_recipe,
    load_any_recipe,
    load_recipe,
    make_recipe,
    without_effect,
)
from dprlhf.recipe.policy import ADAPTERS, Adapter, Policy, Source
from dprlhf.recipe.privacy import Privacy
from dprlhf.recipe.private_update import Oracle, PrivateUpdate, Subspace
from dprlhf.recipe.rl import Recipe
from dprlhf.recipe.sections import KL, Agent, Evaluation, Optimizer, Reward, Rollout, Tracking
from dprlhf.recipe.updates import GRPO, NPG, PG, PPO, REBEL, UPDATE_SETTINGS, Update

if TYPE_CHECKING:
    from dprlhf.recipe.plugins import UpdatePlugin, update_plugin
    from dprlhf.recipe.refusals import known_keys
    from dprlhf.recipe.supervised import (
        STAGES,
        DPORecipe,
        FeedbackRecipe,
        RewardRecipe,
        SFTRecipe,
        StageRecipe,
    )

__all__ = [
    "ADAPTERS",
    "GRPO",
    "IN_MEMORY",
    "KL",
    "NPG",
    "PG",
    "PPO",
    "REBEL",
    "STAGES",
    "UPDATE_SETTINGS",
    "Adapter",
    "Agent",
    "AnyRecipe",
    "DPORecipe",
    "Data",
    "Documents",
    "Evaluation",
    "Experimental",
    "FeedbackRecipe",
    "LoggedFeedback",
    "Optimizer",
    "Oracle",
    "Policy",
    "PositiveFloat",
    "PositiveInt",
    "PreferencePairs",
    "Preferences",
    "Privacy",
    "PrivateUpdate",
    "PublicData",
    "Recipe",
    "Reward",
    "RewardRecipe",
    "Rollout",
    "SFTRecipe",
    "Settings",
    "Source",
    "StageRecipe",
    "Subspace",
    "Tracking",
    "Update",
    "UpdatePlugin",
    "dump_recipe",
    "experimental",
    "known_keys",
    "load_any_recipe",
    "load_recipe",
    "make_recipe",
    "update_plugin",
    "without_effect",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use: a run of an update of this package needs none of them.
    home = "supervised" if name == "STAGES" or name.endswith("Recipe") else _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'dprlhf.recipe' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dprlhf.recipe.{home}"), name)


_HOMES = {"UpdatePlugin": "plugins", "update_plugin": "plugins", "known_keys": "refusals"}
