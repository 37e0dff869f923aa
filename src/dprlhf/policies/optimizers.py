"""The server-side optimizers and their learning rates: post-processing of released values."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from dprlhf import recipe
from dprlhf.boundary import Released, open_released

_ADAM_EPSILON = 1e-8


def make_optimizer(
    spec: recipe.Optimizer, parameters: Iterable[torch.Tensor], noise_std: float
) -> torch.optim.Optimizer:
    """Return the server-side optimizer that a recipe names.

    Args:
        noise_std: σ = zS/m, the standard deviation of the noise in each released coordinate, as
            long as :func:`set_noise` gives no other.
    """
    if spec.name == "sgd":
        return torch.optim.SGD(parameters, lr=spec.learning_rate, momentum=spec.momentum)
    if spec.name == "adam":
        return torch.optim.Adam(parameters, spec.learning_rate, betas=spec.betas, eps=_ADAM_EPSILON)
    if spec.name == "normalized-sgd":
        return NormalizedSGD(parameters, spec)
    return NoiseCorrectedAdam(parameters, spec, noise_std)


class NormalizedSGD(torch.optim.Optimizer):
    """Momentum SGD with steps of fixed length (Cutkosky & Mehta 2020, arXiv 2002.03305).

    b ← μb + g, then θ ← θ − lr · b/‖b‖, where ‖b‖ is the L2 norm over all parameters together: the
    paper's Algorithm 1 without extrapolation. Noise then turns a step but does not lengthen it, and
    ``learning_rate`` is the distance that the parameters move in a round, whatever the unit of the
    gradient. A gradient that is zero everywhere moves nothing.

    Args:
        spec: Its ``learning_rate`` and ``momentum`` are used.
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


NOISE_FLOOR = 0.1
"""Lower bound on a corrected second moment, as a share of the noise's variance."""


class NoiseCorrectedAdam(torch.optim.Optimizer):
    """Adam without the noise in its second moment (DP-AdamBC, Tang et al., arXiv 2312.14334).

    Where noise outweighs the gradient, Adam's v is σ² in every coordinate, and Adam is SGD with
    momentum and a step of lr/σ. The estimate v̂ − σ² brings the gradient's own scale back. It is
    held above :data:`NOISE_FLOOR` · σ², where the paper has a constant in the unit of the gradient.

    σ may differ between rounds, as it does under correlated noise: what is subtracted is the
    average of σ² with the weights that v̂ gives the rounds. Correlation between rounds does not
    enter the expectation of a square.

    Args:
        spec: Its ``learning_rate`` and ``betas`` are used.
        noise_std: σ, the standard deviation of the noise in each coordinate of the gradients.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], spec: recipe.Optimizer, noise_std: float
    ) -> None:
        super().__init__(parameters, {"lr": spec.learning_rate, "noise_std": noise_std})
        self._spec = spec

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Descend along the parameters' gradients."""
        first, second = self._spec.betas
        for group in self.param_groups:
            now = group["noise_std"] ** 2
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                if "step" not in state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                if "noise" not in state:  # first step, or a state from when σ was the same always
                    before = now * (1 - second ** int(state["step"]))
                    state["noise"] = parameter.new_full((), before)
                state["step"] += 1
                state["noise"].lerp_(torch.full_like(state["noise"], now), 1 - second)
                state["exp_avg"].lerp_(gradient, 1 - first)
                state["exp_avg_sq"].lerp_(gradient**2, 1 - second)
                count = int(state["step"])
                mean = state["exp_avg"] / (1 - first**count)
                square = state["exp_avg_sq"] / (1 - second**count)
                variance = float(state["noise"]) / (1 - second**count)
                square = (square - variance).clamp(min=NOISE_FLOOR * variance)
                parameter -= group["lr"] * mean / (square.sqrt() + _ADAM_EPSILON)


def ascend(
    parameters: Iterable[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    direction: Released[torch.Tensor],
) -> None:
    """Take one optimizer step uphill along a released direction.

    This is the only place where a released value reaches the model.

    Args:
        parameters: The trained parameters, in the order in which ``direction`` has them.
        direction: ``[dimension]``; its negative becomes the parameters' gradient.

    Raises:
        TypeError: The direction did not come from the gate.
    """
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


def set_noise(optimizer: torch.optim.Optimizer, noise_std: float) -> None:
    """Give the optimizer the standard deviation of the round's noise in each coordinate.

    Only :class:`NoiseCorrectedAdam` uses it. No state is kept, as in :func:`set_learning_rate`.
    """
    for group in optimizer.param_groups:
        if "noise_std" in group:
            group["noise_std"] = noise_std


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
