"""Fixed places: which kernels the check at the start accepts, what neighbours move, what fits.

Writes rows to ``docs/results/places.json``::

    python -m scripts.review.places
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig

from bench import models, overhead
from bench.measure import peak_bytes, resident_bytes
from dprlhf import recipe
from dprlhf.boundary import Private
from dprlhf.data.users import Prompts
from dprlhf.errors import DprlhfError
from dprlhf.gradients.clipping import Weighted, clipped_sum
from dprlhf.policies.loading import make_policy
from dprlhf.rollout import sample
from dprlhf.runs.measurements import Result, at_most, write_results
from dprlhf.training import made_up_rounds
from dprlhf.training.memory import memory_of
from helpers import kernels, tiny
from rollout.test_rollout import neighbours, policy_of
from training.test_layout import check, shapes_of
from training.test_layout import policy_of as of_layout

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "results" / "places.json"


def verdicts() -> list[Result]:
    """Try the check at the start, and neighbouring rounds, on stand-in kernels."""
    stand_ins = {
        "its place": (kernels.by_place, True),
        "the shape": (kernels.by_shape, True),
        "the contents of other rows": (kernels.by_contents, False),
        "chance": (kernels.at_random(), False),
    }
    found = []
    for name, (kernel, sound) in stand_ins.items():
        made, accepted = of_layout(), True
        kernels.attach(made, kernel)
        made_up_rounds._KNOWN.clear()
        try:
            check(made, shapes_of())
        except DprlhfError:
            accepted = False
        row = f"accepted at the start: a kernel in which a row rounds by {name}"
        goal = "accepted" if sound else "refused"
        found.append(Result(row, float(accepted), "1", goal, accepted == sound))
        if sound:
            tiny_policy = policy_of("gpt2", torch.float32)
            kernels.attach(tiny_policy, kernel)
            _, whole = neighbours(tiny_policy, [])
            moved = 0
            for absent in range(6):
                _, fewer = neighbours(tiny_policy, [absent])
                moved += sum(
                    not torch.equal(a, b)
                    for user, (a, b) in enumerate(zip(whole, fewer, strict=True))
                    if user != absent
                )
            what = "contributions of others that a blank user moves by a bit, of 30"
            found.append(Result(f"{what}: rounding by {name}", moved, "1", "0", moved == 0))
    return found


USERS, WIDTHS = 64, 16
MIXTURES = {  # tokens of a prompt: median and spread of a lognormal law, longest
    "reviews cut to 16 tokens": (40.0, 0.5, 16),
    "chat": (40.0, 0.8, 192),
    "maths": (60.0, 0.4, 128),
}


def one_width() -> list[Result]:
    """Compare a round at one public width with one whose prompts go together by their length.

    Each class of widths has micro-batches of its own, filled up to the public size.
    """
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=8192, n_positions=256, n_embd=256, n_layer=6, n_head=4)
    adapter = recipe.Adapter(rank=8, target_modules=["c_attn", "c_proj", "c_fc"])
    made = make_policy(GPT2LMHeadModel(config), tiny.tokenizer(), adapter)
    made.end_tokens = []
    spec = recipe.Rollout(responses=2, max_new_tokens=32, batch_size=64)

    def seconds(lengths: Any, width: int, number: int) -> float:
        users = np.arange(len(lengths))
        prompts = Prompts(["x" * int(n) for n in lengths], users, np.zeros_like(users), {})
        start = time.process_time()
        rows = sample(
            made, prompts, spec, key=bytes(32), context=(number,), max_prompt_tokens=width,
            keep="gradients",
        )  # fmt: skip
        weighted = Weighted(rows, np.ones(len(rows.user)), np.zeros((len(users), 0)), 0.0)
        clipped_sum(
            made, Private(weighted), clip_norm=1.0, batch_size=64, reduce=lambda total: total
        )
        return time.process_time() - start

    found = []
    for mixture, (median, spread, longest) in MIXTURES.items():
        random, ratios = np.random.default_rng(0), []
        for number in range(4):
            lengths = np.exp(np.log(median) + spread * random.standard_normal(USERS))
            lengths = np.clip(lengths, 1, longest).astype(int)
            classes = -(-lengths // WIDTHS) * WIDTHS
            together = seconds(lengths, longest, number)
            apart = sum(seconds(lengths[classes == w], w, number) for w in np.unique(classes))
            ratios.append(together / apart)
        ratio = statistics.median(ratios[1:])  # the first warms up
        name = "processor time of a round on one thread, one width over width classes"
        found.append(at_most(f"{name}: {mixture}, {USERS} prompts", ratio, "1", 1.1))
    return found


SHAPES = {  # hidden, inner, layers, heads, groups; the vocabulary of Llama 3
    "1.24 billion weights": (2048, 8192, 16, 32, 8),
    "8.0 billion weights": (4096, 14336, 32, 32, 8),
}
TRAINED: dict[str, dict[str, Any]] = {
    "lora": {"adapter": {"rank": 16, "target_modules": "all-linear"}},
    "lora on 4 bit": {
        "adapter": {"rank": 16, "target_modules": "all-linear"}, "quantization": "nf4-double"
    },
    "full": {"adapter": {"type": "full"}},
}  # fmt: skip


def recipe_of(folder: str, config: Any, prompt: int, response: int, **policy: Any) -> Any:
    """Save a configuration, and return a recipe for it with eight responses to a prompt."""
    config.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return recipe.Recipe.model_validate(
        {
            "policy": {"model_name_or_path": folder, **policy},
            "data": {"path": "prompts.jsonl", "max_prompt_tokens": prompt},
            "rewards": [{"function": "module:reward"}], "privacy": {"epsilon": 1.0}, "rounds": 8,
            "rollout": {"responses": 8, "max_new_tokens": response},
        }
    )  # fmt: skip


def memories() -> list[Result]:
    """Return what larger models take of 80 GB, and how near the estimate comes to a peak."""
    found = []
    for (shape, sizes), (how, spec) in itertools.product(SHAPES.items(), TRAINED.items()):
        hidden, inner, layers, heads, groups = sizes
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=groups, vocab_size=128256,
            tie_word_embeddings=hidden == 2048, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            memory = memory_of(recipe_of(folder, config, 256, 256, dtype="bfloat16", **spec))
        fixed = memory.weights + memory.trained + memory.logits
        row = f"80 GB, estimated: {shape}, {how}"
        found.append(Result(f"{row}: weights, training and logits", fixed / 1e9, "GB"))
        found += [
            Result(f"{row}: largest {key}", count, "responses")
            for key, count in memory.fitting(80e9).items()
        ]
    users, each, prompt, response = 4, 8, 64, 32
    for kind, full in (("gpt2", False), ("llama", False), ("llama", True)):
        model = models.causal_lm(kind, small=False)
        made = models.policy(model, kind, full=full)
        batch, ones = models.responses(users, each, prompt, response), np.ones(users * each)
        overhead.clipped(made, batch, ones, 1.0)
        peak = peak_bytes(
            lambda made=made, batch=batch, ones=ones: overhead.clipped(made, batch, ones, 1.0),
            resident_bytes(made.model),
        )
        adapter = {"rank": 4, "target_modules": models.TARGETS[kind]}
        spec = {"dtype": "float32", "adapter": {"type": "full"} if full else adapter}
        with tempfile.TemporaryDirectory() as folder:
            memory = memory_of(recipe_of(folder, model.config, prompt, response, **spec))
        # Without optimizer and, in full fine-tuning, the start: the gradient alone is measured.
        estimate = memory.weights + 12 * memory.dimension + memory.logits
        ratio = (estimate + users * each * memory.updated_response) / peak
        what = f"{overhead.NAMES[kind]}, {'full' if full else 'LoRA'}"
        name = f"estimated over measured peak memory of an update: {what}"
        found.append(Result(name, ratio, "1", "within 25% of 1", abs(ratio - 1) <= 0.25))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for part in (verdicts, one_width, memories):
        write_results(OUT, part(), show=True)
