"""Supervised stages on a tiny model: a policy in float64, rows of users, and their clipped sum."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dprlhf import recipe
from dprlhf.boundary import Private
from dprlhf.data.given_rows import rows_from
from dprlhf.data.users import Prompts, Users
from dprlhf.gradients.clipping import Weighted, clipped_sum
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.rollout import Responses
from dprlhf.training.tasks import Task
from helpers import tiny
from helpers.runs import ADAPTER


@torch.no_grad()
def moved(policy: Any, scale: float) -> Any:
    """Return a policy in float64, with its adapter off its start."""
    policy.model.double()
    torch.manual_seed(1)
    for parameter in policy.parameters.values():
        parameter.add_(scale * torch.randn_like(parameter))
    return policy


def wide_policy(scale: float) -> CausalLMPolicy:
    adapter = recipe.Adapter.model_validate(ADAPTER)
    return moved(make_policy(tiny.model(), tiny.tokenizer(), adapter), scale)


def examples(rows: list[dict[str, Any]], data: recipe.Data) -> Prompts:
    """Return all rows of all users."""
    users = Users(rows_from(rows, data.prompt_column), data)
    return users.select(np.arange(users.count))


def user_sums(
    task: Task,
    policy: Any,
    rows: Prompts,
    clip_norm: float,
    batch_size: int = 3,
    subspace: Any = None,
) -> tuple[torch.Tensor, Responses]:
    """Return the clipped sum that a stage releases, and the rows as they are encoded."""
    encoded = task.encode(policy, rows)
    weights = task.weights(policy, encoded, batch_size)
    weighted = Weighted(encoded, weights, np.zeros((encoded.users, 0)), 0.0)
    total = clipped_sum(
        policy,
        Private(weighted),
        clip_norm=clip_norm,
        batch_size=batch_size,
        reduce=lambda x: x,
        subspace=subspace,
    )
    return total.bounded.total, encoded


def people(first: int, count: int) -> list[dict[str, str]]:
    """Return documents, one of each user."""
    numbers = range(first, first + count)
    return [{"user": f"u{i}", "prompt": "it was", "completion": " aaaa"} for i in numbers]


def preferences(first: int, count: int) -> list[dict[str, str]]:
    """Return pairs of answers, one of each user."""
    answers = {"prompt": "it was", "chosen": " aaaa", "rejected": " zzz"}
    return [{"user": f"u{i}", **answers} for i in range(first, first + count)]


def logs(first: int, count: int, **changes: Any) -> list[dict[str, Any]]:
    """Return one row of each user: "aaaa" is liked, and "zzz" is not."""
    return [
        {"user": f"u{i}", "prompt": "it was", "completion": " zzz" if i % 2 else " aaaa",
         "label": i % 2 == 0} | changes
        for i in range(first, first + count)
    ]  # fmt: skip


def stage_of_logs(model: str, folder: Path, **changes: Any) -> recipe.FeedbackRecipe:
    """Return a recipe for such rows in memory."""
    values: dict[str, Any] = {
        "policy": {"model_name_or_path": model, "adapter": ADAPTER},
        "data": {"path": "in-memory", "user_column": "user", "max_completion_tokens": 8},
        "privacy": {"epsilon": 8.0},
        "rounds": 4,
        "output_dir": str(folder),
    }
    return recipe.FeedbackRecipe.model_validate(values | changes)
