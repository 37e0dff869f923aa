"""The clipped sum over users against Opacus, on the same model and rows, a row a user.

Opacus clips rows, so every row is a user here. Its ghost clipping takes two backward passes; its
hooks hold every row's gradient. Both get the log-probabilities that this library computes (no
logits over the prompt), and the sums must agree before anything is timed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

from bench import models
from bench.measure import interleaved, peak_bytes, ratio, resident_bytes
from bench.overhead import NAMES, clipped, weighted_logprobs
from dprlhf.boundary import open_private
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.runs.measurements import Result

CASES: list[tuple[models.Kind, str]] = [
    ("gpt2", "LoRA"), ("llama", "LoRA"), ("gpt2", "full"), ("llama", "full"),
]  # fmt: skip
SIZES = {"cpu": (16, 16), "cuda": (128, 64)}
"""Rows, and tokens of a prompt and of a response, by device."""
TOLERANCE = 1e-4

Losses = Callable[[], torch.Tensor]
"""The loss of each row, ``[rows]``."""


def results(*, quick: bool, device: str, repeats: int) -> Iterator[Result]:
    """Yield Opacus' time and memory over ours, for each model."""
    for kind, part in CASES:
        yield from _case(kind, part, quick, device, repeats)


def _case(kind: models.Kind, part: str, quick: bool, device: str, repeats: int) -> Iterator[Result]:
    rows, tokens = (8, 16) if quick else SIZES[device]
    sides, owners, _ = case(kind, part, quick, device, rows=rows, tokens=tokens)
    opacus = list(sides)[1:]
    expected = sides["ours"]().float().cpu()
    for name in opacus:
        error = float((sides[name]().cpu() - expected).norm() / expected.norm())
        title = f"clipped sum by Opacus {name}, {NAMES[kind]}, {part}: relative difference"
        yield Result(title, error, "1", f"at most {TOLERANCE:g}", error <= TOLERANCE)

    times = interleaved(sides, repeats)
    peaks = {n: [float(peak_bytes(c, resident_bytes(owners[n])))] for n, c in sides.items()}
    for name in opacus:
        title = f"Opacus {name} over ours, {NAMES[kind]}, {part}"
        time_goal, memory_goal = (1.5, 1.0) if name == "ghost clipping" else (None, None)
        yield from ratio(f"{title}: time", times[name], times["ours"], at_least=time_goal)
        yield from ratio(f"{title}: peak memory", peaks[name], peaks["ours"], at_least=memory_goal)


def case(
    kind: models.Kind, part: str, quick: bool, device: str, *, rows: int, tokens: int = 16
) -> tuple[dict[str, Callable[[], torch.Tensor]], dict[str, torch.nn.Module], Losses]:
    """Return the clipped sum by ours and by Opacus, their models, and the loss alone."""
    # Ghost clipping refuses tied embeddings, so they are untied for all sides.
    model = models.causal_lm(kind, small=quick, tied=part == "LoRA").to(device)
    policy = models.policy(model, kind, full=part == "full")
    batch = models.a_row_a_user(models.responses(rows // 2, each=2, prompt=tokens, response=tokens))
    weights = np.random.default_rng(1).normal(size=rows)
    norms = open_private(clipped(policy, batch, weights, 1.0).norms)
    clip_norm = float(np.median(norms))  # so half of the rows are clipped

    sides: dict[str, Callable[[], torch.Tensor]]
    sides = {"ours": lambda: clipped(policy, batch, weights, clip_norm).bounded.total}
    owners: dict[str, torch.nn.Module] = {"ours": policy.model}
    for name, method in OPACUS.items():
        if part == "full" and name == "hooks":
            continue  # every row's gradient of 10⁸ parameters at once does not fit
        other = CausalLMPolicy(copy.deepcopy(policy.model), policy.tokenizer)
        losses = functools.partial(weighted_logprobs, other, batch, weights)
        sides[name], owners[name] = method(other.model, losses, clip_norm), other.model
    return sides, owners, functools.partial(weighted_logprobs, policy, batch, weights)


def ghost(model: Any, losses: Losses, clip_norm: float) -> Callable[[], torch.Tensor]:
    """Return the clipped sum by ghost clipping, as DPLossFastGradientClipping does it."""
    module = GradSampleModuleFastGradientClipping(
        model.train(), loss_reduction="sum", max_grad_norm=clip_norm
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(parameters), noise_multiplier=0.0, max_grad_norm=clip_norm,
        expected_batch_size=None, loss_reduction="sum",
    )  # fmt: skip

    def total() -> torch.Tensor:
        DPTensorFastGradientClipping(module, optimizer, losses(), "sum").backward()
        flat = torch.cat([p.grad.flatten() for p in parameters])
        optimizer.zero_grad(set_to_none=True)
        return flat

    return total


def hooks(model: Any, losses: Losses, clip_norm: float) -> Callable[[], torch.Tensor]:
    """Return the clipped sum from each row's gradient."""
    GradSampleModule(model.train(), loss_reduction="sum")
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = DPOptimizer(
        torch.optim.SGD(parameters), noise_multiplier=0.0, max_grad_norm=clip_norm,
        expected_batch_size=None, loss_reduction="sum",
    )  # fmt: skip

    def total() -> torch.Tensor:
        losses().sum().backward()
        optimizer.clip_and_accumulate()
        flat = torch.cat([p.summed_grad.flatten() for p in parameters])
        optimizer.zero_grad(set_to_none=True)
        return flat

    return total


OPACUS = {"ghost clipping": ghost, "hooks": hooks}
