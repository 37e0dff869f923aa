"""The recipe: strict, typed settings, read from YAML, from ``key=value`` overrides or from Python.

An unknown key or a bad value is refused before anything is loaded, with the nearest known key.
"""

from dprlhf.recipe.base import IN_MEMORY, PositiveFloat, PositiveInt, Settings
from dprlhf.recipe.loading import (
    STAGES,
    AnyRecipe,
    dump_recipe,
    known_keys,
    load_any_recipe,
    load_recipe,
    make_recipe,
)
from dprlhf.recipe.rl import Recipe
from dprlhf.recipe.sections import (
    KL,
    Adapter,
    Data,
    Documents,
    Evaluation,
    Optimizer,
    Policy,
    Preferences,
    Privacy,
    Reward,
    Rollout,
    Tracking,
)
from dprlhf.recipe.supervised import RewardRecipe, SFTRecipe
from dprlhf.recipe.updates import GRPO, NPG, PG, PPO, REBEL, Critic, Oracle, TrustRegion, Update

__all__ = [
    "GRPO",
    "IN_MEMORY",
    "KL",
    "NPG",
    "PG",
    "PPO",
    "REBEL",
    "STAGES",
    "Adapter",
    "AnyRecipe",
    "Critic",
    "Data",
    "Documents",
    "Evaluation",
    "Optimizer",
    "Oracle",
    "Policy",
    "PositiveFloat",
    "PositiveInt",
    "Preferences",
    "Privacy",
    "Recipe",
    "Reward",
    "RewardRecipe",
    "Rollout",
    "SFTRecipe",
    "Settings",
    "Tracking",
    "TrustRegion",
    "Update",
    "dump_recipe",
    "known_keys",
    "load_any_recipe",
    "load_recipe",
    "make_recipe",
]
