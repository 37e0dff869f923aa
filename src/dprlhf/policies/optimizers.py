"""The server-side optimizers and their learning rates: post-processing of released values."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from dprlhf import recipe
from dprlhf.boundary import Released, open_released
from dprlhf.recipe.sections import BETAS


def make_optimizer(
    spec: recipe.Optimizer, parameters: Iterable[torch.Tensor]
) -> torch.optim.Optimizer:
    """Return the server-side optimizer that a recipe names."""
    if spec.name == "sgd":
        return torch.optim.SGD(parameters, lr=spec.learning_rate, momentum=spec.momentum)
    if spec.name == "adam":
        return torch.optim.Adam(parameters, spec.learning_rate, betas=BETAS)
    from dprlhf.policies.normalized_sgd import NormalizedSGD

    return NormalizedSGD(parameters, spec)


def ascend(
    parameters: Iterable[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    direction: Released[torch.Tensor],  # [dimension]; its negative becomes the parameters' gradient
) -> None:
    """Take one optimizer step uphill along a released direction."""
    # The only place where a released value reaches the model.
    vector, offset = open_released(direction, "ascend"), 0
    for parameter in parameters:
        piece = vector[offset : offset + parameter.numel()]
        parameter.grad = -piece.reshape(parameter.shape).to(parameter)
        offset += parameter.numel()
    optimizer.step()
    optimizer.zero_grad()


def set_learning_rate(
    optimizer: torch.optim.Optimizer, spec: recipe.Optimizer, t: int, rounds: int
) -> None:
    """Set the learning rate of a round. No state is kept, so that a resumed run needs none."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(spec, t, rounds)


def learning_rate(spec: recipe.Optimizer, t: int, rounds: int) -> float:
    """Return the learning rate of round t = 1..T: linear warm-up, then the schedule.

    It rises in equal steps over the first ``warmup`` share of the rounds, reaches the recipe's
    ``learning_rate`` in the last of them, and falls from the round after.

    >>> spec = recipe.Optimizer(learning_rate=1.0, schedule="linear", warmup=0.5)
    >>> [learning_rate(spec, t, 8) for t in range(1, 9)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    warm = round(spec.warmup * rounds)
    if t <= warm:
        return spec.learning_rate * t / warm
    done = (t - 1 - warm) / (rounds - warm)
    if spec.schedule == "linear":
        return spec.learning_rate * (1 - done)
    if spec.schedule == "cosine":
        return spec.learning_rate * (1 + math.cos(math.pi * done)) / 2
    return spec.learning_rate
