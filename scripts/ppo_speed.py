"""Measure DP-PPO's batched local training against a loop; writes docs/results/utility.json.

    python scripts/ppo_speed.py            # 64 users, a small Llama: a minute on an idle core
    python scripts/ppo_speed.py --full     # in the shape of SmolLM2-135M

The loop gives each user a policy of its own (the adapter is put back in between) and trains it by
torch's own optimizer, one user's micro-batch after the other, with the same projection. Both sides
run in one process in alternation; the figure is the median of the paired ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench import models
from dprlhf import recipe
from dprlhf.gradients.micro_batches import micro_batches
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rollout import Responses
from dprlhf.runs.measurements import Result, write_results
from dprlhf.updates.ppo import project, train_copies

OUT = Path(__file__).resolve().parents[1] / "docs" / "results" / "utility.json"
USERS, RESPONSES, PROMPT, RESPONSE = 64, 2, 16, 8
GOAL, TOLERANCE = 10.0, 1e-4
RADIUS = 1.0


def together(
    policy: CausalLMPolicy, batch: Responses, weights: np.ndarray, spec: recipe.PPO
) -> torch.Tensor:
    """Return all users' moves, ``[users, dimension]``, as the update trains them."""
    moves = torch.zeros(batch.users, policy.dimension)
    for part in micro_batches(batch, spec.batch_size):
        trained = train_copies(policy, batch, weights, part, spec, RADIUS, None)
        moves[part.users] = project(trained[: len(part.users)], RADIUS).cpu()
    return moves


def loop(
    policy: CausalLMPolicy, batch: Responses, weights: np.ndarray, spec: recipe.PPO
) -> torch.Tensor:
    """Return the same by an ordinary optimizer, one user after the other."""
    parameters = list(policy.parameters.values())
    start = [p.detach().clone() for p in parameters]
    shared_rows = policy.shared_rows(batch.num_generations, PROMPT, batch.max_new_tokens)
    moves = []
    for user in range(batch.users):
        rows = np.flatnonzero(batch.user == user)
        pair = batch.micro_batch(rows, int(batch.widths[rows].max()), len(rows))
        tokens, mask = (x.to(policy.device) for x in pair)
        weight = torch.from_numpy(weights[rows]).float().to(policy.device)
        optimizer = torch.optim.SGD(parameters, spec.local_learning_rate, maximize=True)
        old = None
        for _ in range(spec.epochs):
            logprobs = policy.response_logprobs(tokens, mask, batch.max_new_tokens, shared_rows)
            old = logprobs.detach() if old is None else old
            optimizer.zero_grad()
            ((logprobs - old).exp() * weight).sum().backward()
            optimizer.step()
            with torch.no_grad():
                move = torch.cat(
                    [(p - s).flatten() for p, s in zip(parameters, start, strict=True)]
                )
                scale = min(1.0, RADIUS / max(float(move.norm()), 1e-30))
                for p, s in zip(parameters, start, strict=True):
                    p.copy_(s + scale * (p - s))
        moves.append(move.cpu() * scale)
        with torch.no_grad():
            for p, s in zip(parameters, start, strict=True):
                p.copy_(s)
    for p in parameters:
        p.grad = None
    return torch.stack(moves)


def small_llama(width: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width, intermediate_size=3 * width, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
            max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def timed(action: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    value = action()
    return time.perf_counter() - start, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true", help="in the shape of SmolLM2-135M")
    parser.add_argument("--width", type=int, default=32, help="of the small model")
    parser.add_argument("--attention", default="sdpa", choices=["sdpa", "eager"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, default=OUT)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # deprecations of the libraries
    model = models.causal_lm("llama", small=False) if options.full else small_llama(options.width)
    model.set_attn_implementation(options.attention)
    policy = models.policy(model.to(options.device), "llama", full=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # away from B = 0, where A has no gradient
        for parameter in policy.parameters.values():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(parameter))
    batch = models.responses(USERS, RESPONSES, PROMPT, RESPONSE)
    weights = np.random.default_rng(0).uniform(-1, 1, (len(batch.user), RESPONSE))
    spec = recipe.PPO.model_validate(
        {"name": "ppo", "epochs": 2, "batch_size": USERS * RESPONSES, "local_learning_rate": 0.5}
    )
    sides = (together, loop)
    ratios, errors = [], []
    for repeat in range(options.repeats + 1):
        (fast, mine), (slow, truth) = (
            timed(partial(side, policy, batch, weights, spec)) for side in sides
        )
        if repeat:  # the first warms up
            ratios.append(slow / fast)
            errors.append(float((mine - truth).norm() / truth.norm()))
    shape = "SmolLM2-135M" if options.full else f"a Llama of 4 layers and width {options.width}"
    what = (
        f"DP-PPO, {USERS} users of {RESPONSES} responses, 2 local epochs, {shape},"
        f" {options.attention} attention, {options.device}"
    )
    ratio, error = statistics.median(ratios), max(errors)
    rows = [
        Result(
            f"{what}: loop over users / batched training, time", ratio, "1",
            f"at least {GOAL:g}", ratio >= GOAL,
        ),
        Result(
            f"{what}: largest relative difference of the moves", error, "1",
            f"at most {TOLERANCE:g}", error <= TOLERANCE,
        ),
    ]  # fmt: skip
    write_results(options.results, rows)
    print(f"ratios {[round(r, 1) for r in sorted(ratios)]}")
    for row in rows:
        print(f"{'holds' if row.holds else 'SHORT':<6} {row.value:<10.3g} {row.name}")


if __name__ == "__main__":
    main()
