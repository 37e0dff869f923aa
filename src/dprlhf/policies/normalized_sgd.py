"""The optimizer ``normalized-sgd``, which torch has not."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from dprlhf import recipe


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
