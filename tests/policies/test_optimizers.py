"""The server-side optimizers and learning rates."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from dprlhf import recipe
from dprlhf.policies.optimizers import learning_rate, make_optimizer, set_learning_rate, set_noise


def spec_of(**changes: Any) -> recipe.Optimizer:
    return recipe.Optimizer.model_validate(changes)


def run(spec: recipe.Optimizer, gradients: torch.Tensor, noise_std: float) -> torch.Tensor:
    """Descend along the gradients ``[steps, d]`` from zero."""
    parameter = torch.nn.Parameter(torch.zeros(gradients.shape[1], dtype=torch.float64))
    optimizer = make_optimizer(spec, [parameter], noise_std)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


GRADIENTS = torch.randn(30, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_without_noise_the_corrected_adam_is_adam() -> None:
    mine, plain = (spec_of(name=n) for n in ("adam-corrected", "adam"))
    torch.testing.assert_close(
        run(mine, GRADIENTS, 0.0), run(plain, GRADIENTS, 0.0), rtol=1e-9, atol=0
    )
    assert not torch.allclose(run(mine, GRADIENTS, 0.5), run(plain, GRADIENTS, 0.5), rtol=1e-2)


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_the_normalized_steps_length_is_over_all_parameters(scale: float) -> None:
    spec = spec_of(name="normalized-sgd", learning_rate=0.3, momentum=0.9)
    shapes, generator = [(3, 2), (4,)], torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    optimizer = make_optimizer(spec, parameters, 1.0)
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
    assert torch.equal(run(spec, zeros, 1.0), zeros[0])
    between = torch.cat([GRADIENTS[:1], zeros, GRADIENTS[1:2]])
    assert torch.equal(run(spec, between, 1.0), run(spec, GRADIENTS[:2], 1.0))
    opposite = torch.cat([GRADIENTS[:1], -0.9 * GRADIENTS[:1]])  # the momentum itself vanishes
    assert torch.equal(run(spec, opposite, 1.0), run(spec, GRADIENTS[:1], 1.0))


def test_the_correction_follows_noise_that_changes_from_round_to_round() -> None:
    """Second moment and noise have the same weights over the rounds, by hand."""
    stds, g = np.array([1.0, 3.0, 0.5]), np.array([2.0, 5.0, 4.0])
    spec = spec_of(name="adam-corrected", learning_rate=1.0)
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = make_optimizer(spec, [parameter], 7.0)
    expected = 0.0
    for t in range(3):
        set_noise(optimizer, float(stds[t]))
        parameter.grad = torch.tensor([g[t]], dtype=torch.float64)
        optimizer.step()
        share = 0.9 ** np.arange(t + 1)[::-1]
        square, noise = (share @ v[: t + 1] ** 2 / share.sum() for v in (g, stds))
        mean = share @ g[: t + 1] / share.sum()
        expected -= mean / math.sqrt(max(square - noise, 0.1 * noise))
    assert float(parameter.detach()) == pytest.approx(expected, rel=1e-7)
    plain = make_optimizer(spec_of(name="adam"), [parameter], 7.0)
    set_noise(plain, 1.0)  # changes nothing where it is not used
    assert "noise_std" not in plain.param_groups[0]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0.0, 0.3])
def test_the_schedule(schedule: str, warmup: float) -> None:
    spec = spec_of(learning_rate=2.0, schedule=schedule, warmup=warmup)
    rates = [learning_rate(spec, t, 10) for t in range(1, 11)]
    warm = round(10 * warmup)
    np.testing.assert_allclose(rates[:warm], [2 * t / 3 for t in range(1, warm + 1)])
    done = np.arange(10 - warm) / (10 - warm)
    after = {
        "constant": np.ones_like(done),
        "linear": 1 - done,
        "cosine": (1 + np.cos(math.pi * done)) / 2,
    }
    np.testing.assert_allclose(rates[warm:], 2 * after[schedule])
    assert min(rates) > 0
    optimizer = make_optimizer(spec, [torch.nn.Parameter(torch.zeros(1))], 0.0)
    set_learning_rate(optimizer, spec, 9, 10)
    assert optimizer.param_groups[0]["lr"] == rates[8]
