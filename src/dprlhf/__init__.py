"""Reinforcement-learning fine-tuning of language models with differential privacy for prompts."""

import os
from typing import TYPE_CHECKING, Any

# Who tunes which model on private prompts is nobody else's business. Read when the hub's library
# is loaded.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from dprlhf.api import generate, resume, train
    from dprlhf.errors import DprlhfError
    from dprlhf.privacy.plan import Plan, make_plan
    from dprlhf.recipe import Recipe, load_recipe
    from dprlhf.training.supervised import resume_stage, train_stage

_HOMES = {
    "DprlhfError": "errors",
    "Plan": "privacy.plan",
    "Recipe": "recipe",
    "generate": "api",
    "load_recipe": "recipe",
    "make_plan": "privacy.plan",
    "resume": "api",
    "resume_stage": "training.supervised",
    "train": "api",
    "train_stage": "training.supervised",
}

__all__ = [
    "DprlhfError",
    "Plan",
    "Recipe",
    "generate",
    "load_recipe",
    "make_plan",
    "resume",
    "resume_stage",
    "train",
    "train_stage",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the accounting commands start without torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'dprlhf' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"dprlhf.{_HOMES[name]}"), name)
