"""Shapes that one user causes, before and after: passes, experts, calls of a reward, layout.

Writes its rows to ``docs/results/soundness.json``. On one slow core it takes about two minutes.

    python scripts/soundness/shapes.py
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from dprlhf import recipe  # noqa: E402
from dprlhf.errors import DprlhfError  # noqa: E402
from dprlhf.gradients.micro_batches import micro_batches  # noqa: E402
from dprlhf.policies.causal_lm import CausalLMPolicy  # noqa: E402
from dprlhf.policies.loading import make_policy  # noqa: E402
from dprlhf.rewards import LoadedReward, Scorer, check_reward  # noqa: E402
from dprlhf.runs.measurements import Result, write_results  # noqa: E402
from dprlhf.training import layout  # noqa: E402
from helpers import tiny  # noqa: E402
from helpers.batches import Shape, batch_of  # noqa: E402

OUT = ROOT / "docs" / "results" / "soundness.json"
BATCH_SIZE = 64


def row(name: str, value: float, unit: str, goal: str, holds: bool | None = None) -> Result:
    return Result(f"shapes: {name}", value, unit, goal, holds)


def heavy_user() -> list[Result]:
    """40 users with one prompt and one with 64, eight responses each."""
    responses = batch_of(Shape([[3]] * 40 + [[3] * 64], k=8, length=4), seed=0)
    batches = list(micro_batches(responses, BATCH_SIZE))
    largest = max(part.height for batch in batches for part in batch.parts())
    goal = f"at most {BATCH_SIZE}"
    return [
        row("rows of the largest pass, a user with 64 prompts, before", 512, "rows", goal, None),
        row(
            "rows of the largest pass, a user with 64 prompts",
            largest,
            "rows",
            goal,
            largest <= BATCH_SIZE,
        ),
    ]


def experts() -> list[Result]:
    """A mixture of experts for each update; the policy is refused before any update sees it."""
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        )
    )  # fmt: skip
    refused = 0
    try:
        make_policy(model, tiny.tokenizer(), recipe.Adapter(target_modules=["q_proj"]))
    except DprlhfError:
        refused = 1
    goal = "refused as it is loaded, for every update and stage"
    return [
        row("mixture of experts refused for ppo, before", 0, "1", goal, None),
        row("mixture of experts refused for every update", refused, "1", goal, bool(refused)),
    ]


def reward_calls() -> list[Result]:
    """A private call of 500 rows, with a reward whose scores move from 128 rows on."""

    def from_128(completions: list[str], **_: Any) -> list[float]:
        return [len(text) + 1e-9 * (len(completions) >= 128) for text in completions]

    called: list[int] = []

    def counting(completions: list[str], **named: Any) -> list[float]:
        called.append(len(completions))
        return from_128(completions)

    texts = [f"text {'x' * (i % 17)}" for i in range(500)]
    report = check_reward(from_128, texts[:16], texts[:16], most_rows=256)
    reward = LoadedReward(counting, "r").in_calls_of(report.checked_rows)
    users = np.arange(500) // 4
    scores = Scorer([reward], 100.0).score(texts, texts, [[]] * 500, {}, users, private=True)
    moved = int((scores.values != [float(len(text)) for text in texts]).sum())
    goal = "no size that was not tried"
    return [
        row("rows of a private call of a reward tried on 32 rows, before", 500, "rows", goal, None),
        row("rows of a private call of a reward", max(called), "rows", goal, max(called) <= 64),
        row(
            "scores moved by a reward that couples from 128 rows on", moved, "rows", "0", moved == 0
        ),
    ]


class OneProcess:
    """One process, as the check of the layout asks for."""

    main = False

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values


def demo_policy(attention: str) -> tuple[CausalLMPolicy, layout.Shapes]:
    """A model of the demo's size with random weights, and the demo's shapes."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
            num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
            bos_token_id=0, eos_token_id=0, attn_implementation=attention,
        )
    ).eval()  # fmt: skip
    adapter = recipe.Adapter(
        type="ffa-lora", rank=1, target_modules=["v_proj"], layers=list(range(16, 24))
    )
    return make_policy(model, tiny.tokenizer(), adapter), demo_shapes()


def by_place(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    place = torch.arange(len(output), dtype=output.dtype).view(-1, *[1] * (output.ndim - 1))
    return output * (1 + 1e-6 * place)


def settled(policy: CausalLMPolicy, shapes: layout.Shapes) -> tuple[layout.Shapes, str, float]:
    layout._KNOWN.clear()
    start = time.process_time()
    with contextlib.redirect_stderr(None):
        chosen, sentence = layout.settle_layout(policy, shapes, OneProcess())  # type: ignore[arg-type]
    return chosen, sentence, time.process_time() - start


def start_up() -> list[Result]:
    """What the check costs at the demo's start, and what it finds."""
    torch.set_num_threads(1)
    policy, shapes = demo_policy("eager")
    _, _, seconds = settled(policy, shapes)
    rows = [
        row(
            "start-up check at the demo's shapes, one core",
            round(seconds, 1),
            "s of processor time",
            "at most 10",
            seconds <= 10,
        )
    ]
    torch.set_num_threads(2)
    _, sentence, _ = settled(*small())
    found = "eager attention" in sentence
    name = "fused attention that rounds by place on 2 threads, found"
    rows.append(row(name, float(found), "1", "found", found))
    torch.set_num_threads(1)
    policy, shapes = small()
    policy.model.get_base_model().model.layers[0].mlp.register_forward_hook(by_place)
    chosen, _, _ = settled(policy, shapes)
    alone = chosen.update.batch_size == 2
    goal = "one prompt in a batch"
    rows.append(row("planted layer that rounds by place, found", float(alone), "1", goal, alone))
    return rows


def small() -> tuple[CausalLMPolicy, layout.Shapes]:
    """A tiny model at the demo's shapes."""
    adapter = recipe.Adapter(target_modules=["q_proj"])
    return make_policy(tiny.model("llama"), tiny.tokenizer(), adapter), demo_shapes()


def demo_shapes() -> layout.Shapes:
    """The shapes of ``recipes/imdb_sentiment.yaml``."""
    return layout.Shapes(
        prompt=16,
        response=16,
        rows=2,
        num_generations=2,
        prompts=1,
        update=recipe.PG(name="pg", batch_size=32),
        rollout=recipe.Rollout(responses=2, max_new_tokens=16, batch_size=64),
    )


PARTS: dict[str, Callable[[], list[Result]]] = {
    "heavy": heavy_user,
    "experts": experts,
    "rewards": reward_calls,
    "start": start_up,
}


def main() -> None:
    """Measure the parts that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=list(PARTS))
    for part in parser.parse_args().parts:
        rows = PARTS[part]()
        for result in rows:
            print(f"{result.name}: {result.value:g} {result.unit} ({result.goal}: {result.holds})")
        write_results(OUT, rows)


if __name__ == "__main__":
    main()
