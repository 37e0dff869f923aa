"""Optimizers that torch has not: for gradients of which most is noise."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from dprlhf import recipe
from dprlhf.recipe.sections import BETAS

_ADAM_EPSILON = 1e-8  # torch's own

NOISE_FLOOR = 0.1
"""Lower bound on a corrected second moment, as a share of the noise's variance."""


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


class NoiseCorrectedAdam(torch.optim.Optimizer):
    """Adam without the noise in its second moment (DP-AdamBC, Tang et al., arXiv 2312.14334).

    Where noise outweighs the gradient, Adam's v is σ² everywhere. v̂ − σ² has the gradient's own
    scale; it is held above :data:`NOISE_FLOOR` · σ², where the paper has a constant. Under
    correlated noise σ differs between rounds: σ² is then its average with the weights that v̂ gives
    the rounds.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], spec: recipe.Optimizer, noise_std: float
    ) -> None:
        super().__init__(parameters, {"lr": spec.learning_rate, "noise_std": noise_std})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Descend along the parameters' gradients."""
        first, second = BETAS
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
