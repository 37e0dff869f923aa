"""Growth with the length of texts, and with responses, users, rounds and adapter size.

    python scripts/bench/long_texts.py --only growth     # a small architecture, some minutes
    python scripts/bench/long_texts.py --only growth --quantities prompt users
    python scripts/bench/long_texts.py --only rounds
    python scripts/bench/long_texts.py --only trl        # the same work by TRL's RLOO
    python scripts/bench/long_texts.py --only large      # 1.2 billion weights, bfloat16: 6 GB
    python scripts/bench/long_texts.py --only plot

Each part writes its rows to docs/results/long_texts.json at once and can be repeated alone. One
quantity grows at a time, the others stay at ``BASE``; sampling and the clipped sum are timed apart.
A fitted exponent is the slope of log time over log quantity by least squares. Attention's own part
is counted beside it: per layer and pair of tokens that a row lets see each other 4 · hidden
operations, against 2 for each weight and token.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench import models
from bench.measure import peak_bytes, resident_bytes
from bench.overhead import clipped
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.recipe import Adapter
from dprlhf.rollout import decoding
from dprlhf.runs.measurements import Result, write_results

OUT = Path(__file__).resolve().parents[2] / "docs" / "results" / "long_texts.json"
PLOT = OUT.with_suffix(".png")
MICRO_BATCH = 8  # rows of an update pass


@dataclass(frozen=True)
class Work:
    """What a round computes; tokens of a prompt and of a response, rows of an update pass."""

    prompt: int = 128
    response: int = 128
    responses: int = 4
    users: int = 2
    rank: int = 4

    @property
    def tokens(self) -> int:
        """Tokens of all rows, prompts once for each response."""
        return self.users * self.responses * (self.prompt + self.response)


BASE = Work()
GROWTH = {
    "prompt": (64, 128, 256, 512),
    "response": (64, 128, 256, 512),
    "responses": (2, 4, 8, 16),
    "users": (2, 4, 8, 16),
    "rank": (4, 16, 64),
}
SMALL = LlamaConfig(
    hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, vocab_size=8192, max_position_embeddings=2048, bos_token_id=0,
    eos_token_id=0,
)  # fmt: skip


def policy_of(config: LlamaConfig, rank: int) -> CausalLMPolicy:
    """Return a policy with random bfloat16 weights, whose responses never end early."""
    torch.manual_seed(0)
    model = models.in_bfloat16(config)
    adapter = Adapter(type="lora", rank=rank, alpha=4.0, target_modules=["q_proj", "v_proj"])
    policy = make_policy(model, models.byte_tokenizer(), adapter)
    policy.end_tokens = []
    return policy


def phases(policy: CausalLMPolicy, work: Work) -> dict[str, Callable[[], object]]:
    """Return the two phases of a round that grow with texts."""
    uniforms = torch.rand(work.users, work.responses, work.response, dtype=torch.float64)
    prompts = [[place % 256 + 1 for place in range(work.prompt)]] * work.users
    batch = models.responses(work.users, work.responses, work.prompt, work.response)
    weights = np.random.default_rng(1).normal(size=len(batch.user))
    return {
        "sampling": lambda: decoding.decode(
            policy, prompts, uniforms, size=work.users, width=work.prompt
        ),
        "clipped sum": lambda: clipped(policy, batch, weights, 1.0),
    }


def measured(policy: CausalLMPolicy, work: Work, repeats: int) -> dict[str, tuple[float, float]]:
    """Return the least seconds and the peak memory in bytes of each phase."""
    found = {}
    for name, run in phases(policy, work).items():
        peak = peak_bytes(run, resident_bytes(policy.model))
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        found[name] = (min(times), float(peak))
    return found


def counted(config: LlamaConfig, policy: CausalLMPolicy, work: Work) -> dict[str, Any]:
    """Return operations of the matrix products, and of attention, by phase."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    of_head = hidden // config.num_attention_heads * config.num_key_value_heads
    weights = layers * (2 * hidden * (hidden + of_head) + 3 * hidden * config.intermediate_size)
    head, rows = hidden * config.vocab_size, work.users * work.responses
    pair = 4 * hidden * layers
    # Sampling: a prompt once, then each token of each response; it reads all places before it.
    shared = policy.shared_cache(work.responses, work.prompt, work.response)
    places = work.prompt + shared * (work.response - 1) / 2
    sampled = rows * work.response
    # The update: a row of shared responses, all places by all places, forward and backward.
    together = policy.shared_rows(math.gcd(work.responses, MICRO_BATCH), work.prompt, work.response)
    row = work.prompt + together * (work.response - 1)
    return {
        "sampling": (
            2 * (weights * (work.users * work.prompt + sampled) + head * sampled),
            pair * (work.users * work.prompt**2 + sampled * places),
        ),
        "clipped sum": (
            2 * 2 * (weights * rows / together * row + head * sampled),
            3 * pair * rows / together * row**2,
        ),
    }


def slope(x: list[float], y: list[float]) -> float:
    """Return the exponent of a power law through the points."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def growth(repeats: int, quantities: list[str]) -> list[Result]:
    """Return points and exponents of a small architecture."""
    rows: list[Result] = []
    for quantity in quantities:
        values = GROWTH[quantity]
        points: dict[str, list[tuple[float, float, float, float]]] = {}
        for value in values:
            work = replace(BASE, **{quantity: value})
            policy = policy_of(SMALL, work.rank)
            counts = counted(SMALL, policy, work)
            for phase, (time_, peak) in measured(policy, work, repeats).items():
                points.setdefault(phase, []).append((time_, peak, *counts[phase]))
                rows += [
                    Result(f"{phase}, {quantity} {value}: time", time_, "s"),
                    Result(f"{phase}, {quantity} {value}: peak memory", peak / 2**20, "MiB"),
                ]
        for phase, found in points.items():
            times, peaks, products, attention = (
                list(column) for column in zip(*found, strict=True)
            )
            x = [float(v) for v in values]
            name = f"{phase}, growth with {quantity}"
            both = [a + b for a, b in zip(products, attention, strict=True)]
            fitted = slope(x, times)
            allowed = max(1.0, slope(x, both)) + 0.05
            rows += [
                Result(
                    f"{name}: exponent of time", fitted, "1",
                    "at most 1.05, or what attention's part adds by count", fitted <= allowed,
                ),
                Result(f"{name}: exponent of the counted products", slope(x, products), "1"),
                Result(f"{name}: the same with attention", slope(x, both), "1"),
                Result(f"{name}: attention's share at {values[-1]}", attention[-1] / both[-1], "1"),
                Result(f"{name}: exponent of peak memory", slope(x, peaks), "1"),
            ]  # fmt: skip
        write_results(OUT, rows)
    return rows


def rounds(repeats: int) -> list[Result]:
    """Return the time of a round of one user in whole runs, over their number of rounds.

    The median over all rounds but each run's first. Runs of all lengths take turns, up and down:
    otherwise load that changes from run to run would read as growth.
    """
    numbers = (4, 8, 16, 32)
    laps: dict[int, list[float]] = {number: [] for number in numbers}
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder) / "model")
        LlamaForCausalLM(SMALL).save_pretrained(model)
        models.byte_tokenizer().save_pretrained(model)
        _laps_of(model, 2, Path(folder) / "first")  # imports, and what is made once
        for repeat in range(repeats):
            for number in numbers[:: 1 if repeat % 2 else -1]:
                place = Path(folder) / f"{repeat}-{number}"
                laps[number] += _laps_of(model, number, place)
    each = [statistics.median(laps[number]) for number in numbers]
    fitted = 1 + slope([float(n) for n in numbers], each)
    rows = [
        Result(f"round of one user, {n} rounds: time", t, "s")
        for n, t in zip(numbers, each, strict=True)
    ]
    rows.append(
        Result("growth with rounds: exponent of time", fitted, "1", "at most 1.05", fitted <= 1.05)
    )
    write_results(OUT, rows)
    return rows


def _laps_of(model: str, number: int, folder: Path) -> list[float]:
    """Return the seconds of each round but the first of a run with a user a round."""
    from dprlhf import train

    ends: list[float] = []
    train(
        model=model,
        prompts=[f"Film {i}: when the story began," for i in range(number)],
        reward=lambda prompts, completions, **_: [-len(c) / 10 for c in completions],
        policy__adapter={"type": "lora", "rank": 4, "target_modules": ["q_proj"]},
        data__max_prompt_tokens=32,
        rollout={"responses": 2, "max_new_tokens": 16, "batch_size": 2},
        update={"batch_size": 2},
        privacy={"noise_multiplier": 1.0, "partition": "fixed"},
        rounds=number,
        output_dir=folder,
        callbacks=[lambda metrics: ends.append(time.perf_counter())],
        quiet=True,
    )
    return [later - earlier for earlier, later in itertools.pairwise(ends)]


def against_trl(steps: int) -> list[Result]:
    """Return the time of a step of TRL's RLOO over a private round, at long texts."""
    shapes = ((2, 4, 256, 64), (1, 8, 256, 128))
    return [row for shape in shapes for row in _beside_trl(*shape, steps)]


def _beside_trl(users: int, responses: int, prompt: int, response: int, steps: int) -> list[Result]:
    import datasets
    from transformers.utils import logging
    from trl import RLOOConfig, RLOOTrainer

    from bench import against_trl as bench
    from bench.measure import Turns, ratio, seconds

    logging.set_verbosity_error()
    datasets.disable_progress_bars()
    work = bench.Work(users, responses, response, prompt, min(8, users * responses))
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder) / "model")
        LlamaForCausalLM(SMALL).save_pretrained(model)
        models.byte_tokenizer().save_pretrained(model)
        turns = Turns(
            {
                "ours": lambda lap: bench.private_rounds(
                    model, work, steps + 1, Path(folder) / "run", lap, "float32"
                ),
                "TRL": lambda lap: bench.trl_steps(
                    RLOOTrainer, RLOOConfig, model, work, steps + 1, "cpu", lap
                ),
            }
        )
        turns.run()
    shape = f"{users} prompts of {prompt} tokens, {responses} responses of {response}"
    rows = ratio(
        f"a TRL step (RLOO) over a private round, {shape}: time",
        turns.laps["TRL"],
        turns.laps["ours"],
    )
    rows.append(seconds(f"private round, {shape}", turns.laps["ours"]))
    write_results(OUT, rows)
    return rows


def large(responses: int) -> list[Result]:
    """Return time a token and peak memory of 1.2 billion weights: decoding steps, update passes."""
    policy = policy_of(models.BILLION, 4)
    rows: list[Result] = []
    for at in (16, 256, 512):

        def last_step(at: int = at) -> None:
            decoding.try_last_step(
                policy, size=1, width=16, num_generations=responses, max_new_tokens=at
            )

        last_step()
        start = time.perf_counter()
        last_step()
        rows.append(
            Result(
                f"1.2 billion weights, prompt of 16 and token {at} of {responses} responses: time",
                time.perf_counter() - start, "s",
            )
        )  # fmt: skip
        write_results(OUT, rows)
    for response in (128, 256, 512):
        work = Work(prompt=512, response=response, responses=4, users=1)
        run = phases(policy, work)["clipped sum"]
        start = time.perf_counter()
        peak = peak_bytes(run, resident_bytes(policy.model))
        spent = time.perf_counter() - start
        name = f"1.2 billion weights, clipped sum, a pass of 4 responses of {response} after 512"
        rows += [
            Result(f"{name}: time a token", spent / (512 + 4 * response) * 1e3, "ms"),
            Result(f"{name}: peak memory", peak / 2**30, "GiB", "at most 10", peak < 10 * 2**30),
        ]
        write_results(OUT, rows)
    return rows


def plot() -> list[Result]:
    """Draw the points of the small architecture."""
    import json

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = {row["name"]: row["value"] for row in json.loads(OUT.read_text())}
    figure, axes = plt.subplots(2, 2, figsize=(9, 6.5), sharex="col")
    for column, phase in enumerate(("sampling", "clipped sum")):
        for line, what in enumerate(("time", "peak memory")):
            axis = axes[line][column]
            for quantity, values in GROWTH.items():
                y = [found.get(f"{phase}, {quantity} {v}: {what}", math.nan) for v in values]
                axis.loglog([v / values[0] for v in values], y, "o-", label=quantity)
            axis.set_title(f"{phase}: {what}")
            axis.set_ylabel("s" if what == "time" else "MiB")
            axis.grid(True, which="both", alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("times the smallest value")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(PLOT, dpi=110)
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = ["growth", "rounds", "trl", "large", "plot"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--quantities", nargs="+", choices=GROWTH, default=list(GROWTH))
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    calls: dict[str, Callable[[], list[Result]]] = {
        "growth": lambda: growth(options.repeats, options.quantities),
        "rounds": lambda: rounds(options.repeats),
        "trl": lambda: against_trl(options.repeats),
        "large": lambda: large(16),
        "plot": plot,
    }
    for part in options.only:
        for row in calls[part]():
            print(f"{row.name}: {row.value:.4g} {row.unit} {row.goal} {row.holds}", flush=True)


if __name__ == "__main__":
    main()
