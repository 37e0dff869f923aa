"""The server-side optimizers and learning rates."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from dprlhf import recipe
from dprlhf.policies.optimizers import learning_rate, make_optimizer, set_learning_rate


def spec_of(**changes: Any) -> recipe.Optimizer:
    return recipe.Optimizer.model_validate(changes)


def run(spec: recipe.Optimizer, gradients: torch.Tensor) -> torch.Tensor:
    """Descend along the gradients ``[steps, d]`` from zero."""
    parameter = torch.nn.Parameter(torch.zeros(gradients.shape[1], dtype=torch.float64))
    optimizer = make_optimizer(spec, [parameter])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


GRADIENTS = torch.randn(30, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_the_normalized_steps_length_is_over_all_parameters(scale: float) -> None:
    spec = spec_of(name="normalized-sgd", learning_rate=0.3, momentum=0.9)
    shapes, generator = [(3, 2), (4,)], torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    optimizer = make_optimizer(spec, parameters)
    buffer = np.zeros(10)
    for _ in range(5):
        before = torch.cat([p.detach().flatten() for p in parameters]).double()
        for p in parameters:
            p.grad = scale * torch.randn(p.shape, generator=generator)
        buffer = 0.9 * buffer + torch.cat([p.grad.flatten() for p in parameters]).double().numpy()
        optimizer.step()
        moved = torch.cat([p.detach().flatten() for p in parameters]).double() - before
        expected = -0.3 * buffer / np.linalg.norm(buffer)
        np.testing.assert_allclose(moved, expected, atol=1e-6)


def test_a_zero_gradient_is_no_normalized_step() -> None:
    spec = spec_of(name="normalized-sgd", learning_rate=0.3, momentum=0.9)
    zeros = torch.zeros(1, 6, dtype=torch.float64)
    assert torch.equal(run(spec, zeros), zeros[0])
    between = torch.cat([GRADIENTS[:1], zeros, GRADIENTS[1:2]])
    assert torch.equal(run(spec, between), run(spec, GRADIENTS[:2]))
    opposite = torch.cat([GRADIENTS[:1], -0.9 * GRADIENTS[:1]])  # the momentum itself vanishes
    assert torch.equal(run(spec, opposite), run(spec, GRADIENTS[:1]))


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_schedule(schedule: str) -> None:
    spec = spec_of(learning_rate=2.0, schedule=schedule)
    rates = [learning_rate(spec, t, 10) for t in range(1, 11)]
    done = np.arange(10) / 10
    expected = {
        "constant": np.ones_like(done),
        "linear": 1 - done,
        "cosine": (1 + np.cos(math.pi * done)) / 2,
    }
    np.testing.assert_allclose(rates, 2 * expected[schedule])
    assert min(rates) > 0
    optimizer = make_optimizer(spec, [torch.nn.Parameter(torch.zeros(1))])
    set_learning_rate(optimizer, spec, 9, 10)
    assert optimizer.param_groups[0]["lr"] == rates[8]
