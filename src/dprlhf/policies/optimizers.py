"""The server-side optimizers and their learning rates: post-processing of released values."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from dprlhf import recipe
from dprlhf.boundary import Released, open_released
from dprlhf.recipe.sections import BETAS


class NormalizedSGD(torch.optim.Optimizer):
    """Momentum SGD with steps of fixed length (Cutkosky & Mehta 2020, arXiv 2002.03305).

    b ← μb + g, then θ ← θ − lr · b/‖b‖, with the L2 norm over all parameters: Algorithm 1 without
    extrapolation. Noise turns a step but does not lengthen it, and ``learning_rate`` is the
    distance of a round, whatever the gradient's unit. A gradient that is zero everywhere moves
    nothing.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], spec: recipe.Optimizer) -> None:
        super().__init__(parameters, {"lr": spec.learning_rate})
        self._momentum = spec.momentum

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Descend along the momentum of the parameters' gradients by the learning rate."""
        held = [(p, group["lr"]) for group in self.param_groups for p in group["params"]]
        if not any(bool(parameter.grad.any()) for parameter, _ in held):
            return
        for parameter, _ in held:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            state["momentum_buffer"].mul_(self._momentum).add_(parameter.grad)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter, _ in held]
        # In float64, where squares neither overflow nor vanish.
        norm = math.hypot(*(float(torch.linalg.vector_norm(b.double())) for b in buffers))
        if norm == 0:
            return
        for (parameter, rate), buffer in zip(held, buffers, strict=True):
            parameter -= (rate / norm * buffer.double()).to(parameter)


def make_optimizer(
    spec: recipe.Optimizer, parameters: Iterable[torch.Tensor]
) -> torch.optim.Optimizer:
    """Return the server-side optimizer that a recipe names."""
    if spec.name == "sgd":
        return torch.optim.SGD(parameters, lr=spec.learning_rate, momentum=spec.momentum)
    if spec.name == "adam":
        return torch.optim.Adam(parameters, spec.learning_rate, betas=BETAS)

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
    """Return the learning rate of round t = 1..T.

    >>> spec = recipe.Optimizer(learning_rate=1.0, schedule="linear")
    >>> [learning_rate(spec, t, 4) for t in range(1, 5)]
    [1.0, 0.75, 0.5, 0.25]
    """
    done = (t - 1) / rounds
    if spec.schedule == "linear":
        return spec.learning_rate * (1 - done)
    if spec.schedule == "cosine":
        return spec.learning_rate * (1 + math.cos(math.pi * done)) / 2
    return spec.learning_rate
