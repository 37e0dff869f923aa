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
from helpers.rounds import flat_gradient
from helpers.runs import ADAPTER

DATA = {"path": "in-memory", "user_column": "user", "max_prompts_per_user": 3}
ROWS = [
    {"user": u, "prompt": p, "completion": c, "label": f, "logprob": q}
    for u, p, c, f, q in [
        ("a", "is it ", "good", 1.0, -26.0), ("b", "so ", "far so very good", -1.0, -80.0),
        ("b", "a prompt that is longer ", "yes", 0.25, -14.0), ("c", "once ", "not", -0.5, -31.0),
        ("b", "then ", "no", 1.0, -19.0), ("c", "and ", "again", 3.0, -29.0),
    ]
]  # fmt: skip


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
        policy, Private(weighted), clip_norm=clip_norm, batch_size=batch_size, reduce=lambda x: x,
        subspace=subspace,
    )  # fmt: skip
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


def stage_of(kind: Any, model: str = "x", **changes: Any) -> Any:
    """Return a recipe of a stage for rows in memory."""
    values: dict[str, Any] = {
        "policy": {"model_name_or_path": model, "adapter": ADAPTER}, "privacy": {"epsilon": 8.0},
        "data": {"path": "in-memory", "user_column": "user", "max_completion_tokens": 8},
        "rounds": 4,
    }  # fmt: skip
    return kind.model_validate(values | changes)


def stage_of_logs(model: str, folder: Path, **changes: Any) -> recipe.FeedbackRecipe:
    """Return a recipe for such rows in memory."""
    return stage_of(recipe.FeedbackRecipe, model, output_dir=str(folder), **changes)


def gained(trained: CausalLMPolicy, prompt: str, completion: str) -> tuple[Any, Any, int]:
    """Return log π and log μ of a completion and its end, and the number of tokens."""
    before = trained.tokenizer(prompt)["input_ids"]
    learnt = [*trained.tokenizer(completion)["input_ids"], 0]
    start = len(before) - 1

    def logprob() -> torch.Tensor:
        logits = trained.model(input_ids=torch.tensor([before + learnt])).logits[0]
        places = range(start, start + len(learnt))
        return torch.log_softmax(logits, -1)[places, learnt].sum()

    with torch.no_grad(), trained.base():
        reference = logprob()
    return logprob(), reference, len(learnt)


def check_user_sums(
    task: Task, trained: CausalLMPolicy, rows: Any, data: recipe.Data, loss: Any
) -> None:
    """Compare clipped sums with autograd's gradients of users' mean losses, clipped or not."""
    of_user = {}
    for user in {row["user"] for row in rows}:
        own = torch.stack([loss(row) for row in rows if row["user"] == user])
        of_user[user] = -flat_gradient(trained, own.mean())
    norms = sorted(float(g.norm()) for g in of_user.values())
    for clip_norm in (1e6, norms[1] * 0.9):
        expected = sum(g * min(1.0, clip_norm / float(g.norm())) for g in of_user.values())
        found, _ = user_sums(task, trained, examples(rows, data), clip_norm, 4)
        # Where it clips, S is made smaller by the margin for rounding.
        error = 1e-11 if clip_norm > norms[-1] else 2e-6
        assert float((found - expected).norm()) < error * norms[-1]


def loss_of_trl(
    trainer: Any, config: Any, trained: CausalLMPolicy, rows: Any, folder: Path, **update: Any
) -> tuple[float, dict[str, float]]:
    """Return TRL's loss on all rows once the adapter is off its start, and its metrics."""
    from datasets import Dataset

    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = "!"
    settings = config(
        output_dir=str(folder), report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, per_device_train_batch_size=len(rows), **update,
    )  # fmt: skip
    made = trainer(
        trained.model, args=settings, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )  # fmt: skip
    moved(trained, 0.3)  # TRL has copied the adapter's start as its reference
    batch = made.data_collator(list(made.train_dataset))
    loss = float(made._compute_loss(trained.model, batch, False).detach())
    return loss, {k: v[-1] for seen in made._metrics.values() for k, v in seen.items() if v}
