"""Reinforcement-learning fine-tuning of language models with differential privacy for prompts.

The folders, in the order in which a user's data pass through them (docs/architecture.md):

- ``recipe/``: the settings of a run, strict and typed.
- ``data/``: private users and public prompts, read from files, data sets and memory.
- ``policies/``: the models that are trained: causal language models, adapters, classifiers.
- ``rollout/``: sampled responses and their log-probabilities, the same in every micro-batch.
- ``rewards/``: reward functions and reward models, checked for coupling between users.
- ``agents/``: responses of several turns, with tools and environments that keep users apart.
- ``gradients/``: per-user gradients, of many users or of one in a pass, clipped and summed.
- ``updates/``: one file for each algorithm: what a user contributes, and the step that follows.
- ``privacy/``: partition, plan, accounting, ledger, and the gate that adds the noise.
- ``budget/``: the budget book: what each user has spent, over all runs.
- ``training/``: the loop, and what surrounds it: assembly, evaluation, processes, dry run.
- ``runs/``: the folder that a run leaves: checkpoint, privacy card, report, publishing.
- ``tuning/``: settings chosen on public prompts that stand in for users, at no privacy cost.
- ``audit/``: attacks on the guarantee, as lower bounds on ε.
- ``assets/``: the models and data of the demo, fetched once and verified.
- ``testing/``: contract tests for extensions: what an update, a reward or a partition must do.
- ``trl/``: TRL's trainers with a guarantee: change the import, and add a budget (extra ``trl``).
- ``cli/``: the command line.
"""

import os
from typing import TYPE_CHECKING, Any

# Who tunes which model on private prompts is nobody else's business. Read when the hub's library
# is loaded.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from dprlhf.api import resume, train
    from dprlhf.errors import DprlhfError
    from dprlhf.generation import generate
    from dprlhf.privacy.plan import Plan, make_plan
    from dprlhf.recipe import Recipe, load_recipe
    from dprlhf.runs.publish import merge
    from dprlhf.runs.withdrawal import erase
    from dprlhf.stages import resume_stage, train_stage

_HOMES = {
    "DprlhfError": "errors",
    "Plan": "privacy.plan",
    "Recipe": "recipe",
    "erase": "runs.withdrawal",
    "generate": "generation",
    "load_recipe": "recipe",
    "make_plan": "privacy.plan",
    "merge": "runs.publish",
    "resume": "api",
    "resume_stage": "stages",
    "train": "api",
    "train_stage": "stages",
}

__all__ = [
    "DprlhfError",
    "Plan",
    "Recipe",
    "erase",
    "generate",
    "load_recipe",
    "make_plan",
    "merge",
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
