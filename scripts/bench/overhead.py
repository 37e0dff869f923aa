"""The price of privacy: a private update over the same update without clipping and noise.

The plain update is the one that a non-private baseline of this library makes (an infinite clip
norm): the same micro-batches, autograd's ordinary gradient, one float64 sum. Bare autograd, which
leaves float32 sums in ``.grad``, is timed beside them. Noise, ledger and optimizer come once an
update, whatever its rows; a round of thousands of users has many more micro-batches than this one.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench import models
from bench.measure import interleaved, peak_bytes, ratio, resident_bytes, seconds
from dprlhf.boundary import Private, open_released
from dprlhf.gradients.clipping import ClippedSum, Weighted, clipped_sum
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import Ledger
from dprlhf.privacy.plan import make_plan
from dprlhf.rollout import Responses
from dprlhf.runs.measurements import Result

GOALS = {  # (time, memory)
    ("gpt2", "LoRA"): (1.05, 1.10),
    ("llama", "LoRA"): (1.05, 1.10),
    ("gpt2", "full"): (1.15, 1.20),
    ("llama", "full"): (1.15, 1.20),
}
MICRO_BATCH = {"cpu": 32, "cuda": 128}
SIZES = {  # users, responses of each, tokens of a prompt and of a response
    "cpu": (32, 2, 16, 16),
    "cuda": (128, 4, 64, 64),
}
NAMES = {"gpt2": "GPT-2", "llama": "Llama"}


def results(*, quick: bool, device: str, repeats: int) -> Iterator[Result]:
    """Yield time and peak memory of both kinds of update, for each model."""
    for (kind, part), (time_goal, memory_goal) in GOALS.items():
        model = models.causal_lm(kind, small=quick).to(device)
        policy = models.policy(model, kind, full=part == "full")
        batch = models.responses(*((4, 2, 16, 16) if quick else SIZES[device]))
        with tempfile.TemporaryDirectory() as folder:
            updates = Updates(policy, batch, Path(folder))
            sides = {
                "private": updates.private, "plain": updates.plain, "autograd": updates.autograd,
            }  # fmt: skip
            times = interleaved(sides, repeats)
            resident = resident_bytes(policy.model, updates.optimizer)
            peaks = {
                name: float(peak_bytes(sides[name], resident)) for name in ("private", "plain")
            }
        name = f"private update over plain update, {NAMES[kind]}, {part}"
        yield from ratio(f"{name}: time", times["private"], times["plain"], at_most=time_goal)
        yield from ratio(
            f"{name}: peak memory", [peaks["private"]], [peaks["plain"]], at_most=memory_goal
        )
        release = updates.release_seconds[1 : repeats + 1]
        quiet = [whole - part for whole, part in zip(times["private"], release, strict=True)]
        yield from ratio(f"{name}: time without noise and ledger", quiet, times["plain"])
        yield from ratio(
            f"private update over bare autograd, {NAMES[kind]}, {part}: time",
            times["private"],
            times["autograd"],
        )
        yield seconds(f"private update, {NAMES[kind]}, {part}", times["private"])


class Updates:
    """The updates of one policy on one batch; the optimizer is the recipe's default, Adam."""

    def __init__(self, policy: CausalLMPolicy, batch: Responses, folder: Path) -> None:
        self.policy, self.batch = policy, batch
        self.weights = np.random.default_rng(1).normal(size=len(batch.user))
        self.optimizer = torch.optim.Adam(policy.parameters.values(), lr=1e-6)
        # Enough rounds for all repeats; what they would cost does not matter here.
        self.plan = make_plan(users=1000, rounds=1000, delta=1e-5, noise_multiplier=1.0)
        self.gate = Gate(self.plan, Ledger(folder / "ledger.jsonl", self.plan.terms()), bytes(32))
        self.round = 0
        self.release_seconds: list[float] = []

    def private(self) -> None:
        """Clip each user's gradient, sum, charge, add noise, step."""
        self.round += 1
        S = self.plan.clip_norm
        bounded = clipped(self.policy, self.batch, self.weights, S).bounded
        start = time.perf_counter()
        released = open_released(self.gate.release(self.round, bounded), "the benchmark")
        self.release_seconds.append(time.perf_counter() - start)
        self._step_along(released)

    def plain(self) -> None:
        """Sum the gradients of the same micro-batches, divide, step."""
        total = clipped(self.policy, self.batch, self.weights, math.inf).bounded.total
        self._step_along(total.div_(self.plan.expected_batch_size))

    def _step_along(self, direction: torch.Tensor) -> None:
        offset = 0
        for parameter in self.policy.parameters.values():
            piece = direction[offset : offset + parameter.numel()]
            parameter.grad = -piece.reshape(parameter.shape).to(parameter)
            offset += parameter.numel()
        self._step()

    def autograd(self) -> None:
        """Sum the gradients of the same rows by autograd alone, all at once, step."""
        plain(self.policy, self.batch, self.weights)
        for parameter in self.policy.parameters.values():
            assert parameter.grad is not None
            parameter.grad /= -self.plan.expected_batch_size
        self._step()

    def _step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def clipped(
    policy: CausalLMPolicy,
    batch: Responses,
    weights: NDArray[np.float64],
    clip_norm: float,
) -> ClippedSum:
    """Return the clipped sum over the users of a batch."""
    return clipped_sum(
        policy,
        Private(Weighted(batch, weights, np.empty((batch.users, 0)), 0.0)),
        clip_norm=clip_norm,
        batch_size=min(MICRO_BATCH[policy.device.type], len(batch.user)),
        reduce=lambda total: total,
    )


def weighted_logprobs(
    policy: CausalLMPolicy, batch: Responses, weights: NDArray[np.float64]
) -> torch.Tensor:
    """Return weight · log π(y|x) of each row, ``[rows]``, all rows in one micro-batch."""
    tokens, mask = batch.tokens.to(policy.device), batch.mask.to(policy.device)
    shared_rows = policy.shared_rows(
        batch.num_generations, tokens.shape[1] - batch.max_new_tokens, batch.max_new_tokens
    )
    logprobs = policy.response_logprobs(tokens, mask, batch.max_new_tokens, shared_rows)
    of_rows = torch.where(mask[:, -batch.max_new_tokens :].bool(), logprobs, 0.0).sum(1)
    return of_rows * torch.from_numpy(weights).to(of_rows)


def plain(policy: CausalLMPolicy, batch: Responses, weights: NDArray[np.float64]) -> None:
    """Leave the sum of the rows' gradients in ``.grad``: autograd and nothing else."""
    weighted_logprobs(policy, batch, weights).sum().backward()  # type: ignore[no-untyped-call]
