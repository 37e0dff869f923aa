"""The private trainers against TRL's own: what they learn without noise.

    python -m scripts.review.against_trl              # writes docs/results/trl.json

The same model, prompts, reward, batches and optimizer go through TRL's trainer and through the
private one at ε = ∞, five seeds. Both start from a tiny random model; the reward is the share of a
completion's characters that are lower-case letters. What is compared is the mean reward of
completions that ``model.generate`` of transformers samples from both models after training.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from peft import LoraConfig
from scripts.review.first_run import byte_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import dprlhf.trl
from dprlhf.runs.measurements import Result, write_results

OUT = Path(__file__).resolve().parents[2] / "docs" / "results" / "trl.json"
STEPS, PROMPTS, GENERATIONS, TOKENS = 40, 16, 8, 16
TRAINERS = {
    "GRPO": (trl.GRPOTrainer, trl.GRPOConfig),
    "RLOO": (trl.RLOOTrainer, trl.RLOOConfig),
}
PRIVATE = {
    "GRPO": (dprlhf.trl.PrivateGRPOTrainer, dprlhf.trl.PrivateGRPOConfig),
    "RLOO": (dprlhf.trl.PrivateRLOOTrainer, dprlhf.trl.PrivateRLOOConfig),
}
ALIKE: dict[str, Any] = {
    "learning_rate": 5e-4,
    "lr_scheduler_type": "constant",
    "num_generations": GENERATIONS,
    "max_completion_length": TOKENS,
    "beta": 0.0,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
}
"""Settings of both trainers; AdamW has no weight decay, and without noise nothing is clipped."""


def letters(completions: Sequence[str], **_: Any) -> list[float]:
    """Return the share of a completion's characters that are lower-case letters."""
    return [sum("a" <= c <= "z" for c in text) / TOKENS for text in completions]


def trained(name: str, model: Path, seed: int, folder: Path, *, private: bool) -> Any:
    """Train the tiny model and return the trainer."""
    trainer, config = (PRIVATE if private else TRAINERS)[name]
    given = ALIKE | {
        "output_dir": str(folder),
        "seed": seed,
        "max_steps": STEPS,
        "per_device_train_batch_size": PROMPTS * GENERATIONS,
    }
    if private:
        # Rounds of exactly PROMPTS users, as TRL's batches are.
        given |= {"privacy_epsilon": math.inf, "privacy_partition": "fixed"}
    else:
        given |= {"max_grad_norm": 1e9, "save_strategy": "no", "gradient_checkpointing": False}
    if name == "GRPO":
        given["loss_type"] = "grpo"
    prompts = [f"Day {i}: " for i in range(STEPS * PROMPTS)]
    transformers.set_seed(seed)
    loop = trainer(
        model=str(model),
        reward_funcs=letters,
        args=config(**given),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        peft_config=LoraConfig(
            r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    loop.remove_callback(PrinterCallback)
    loop.train()
    return loop


def reward_of(model: Any, tokenizer: Any, seed: int) -> float:
    """Return the mean reward of 512 sampled completions of prompts that no run has seen."""
    tokenizer.padding_side = "left"
    asked = tokenizer([f"Day {i}: " for i in range(1000, 1512)], return_tensors="pt", padding=True)
    torch.manual_seed(seed)
    with torch.no_grad():
        tokens = model.eval().generate(
            **asked, max_new_tokens=TOKENS, do_sample=True, top_k=0, top_p=1.0, temperature=1.0
        )
    texts = tokenizer.batch_decode(tokens[:, asked.input_ids.shape[1] :], skip_special_tokens=True)
    return statistics.mean(letters(texts))


def sharp_model(folder: Path) -> Path:
    """Save a tiny model whose hidden states decide what it writes; a random head is nearly flat."""
    tokenizer = byte_tokenizer("qwen3")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=4096,
        bos_token_id=0, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return folder


def learning(seeds: int) -> Iterator[Result]:
    """Yield the rewards after training with TRL and with the private trainer at ε = ∞."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = sharp_model(folder / "model")
        tokenizer = AutoTokenizer.from_pretrained(model)
        before = reward_of(AutoModelForCausalLM.from_pretrained(model), tokenizer, 0)
        yield Result("learning: reward before", before, "reward")
        for name in TRAINERS:
            after: dict[bool, list[float]] = {True: [], False: []}
            for seed in range(seeds):
                for private in (False, True):
                    run = folder / f"{name}-{seed}-{private}"
                    loop = trained(name, model, seed, run, private=private)
                    after[private].append(reward_of(loop.model, tokenizer, seed))
            difference = statistics.mean(after[True]) - statistics.mean(after[False])
            error = math.sqrt(sum(statistics.variance(x) / seeds for x in after.values()))
            for private, values in after.items():
                whose = "private trainer, epsilon inf" if private else "TRL"
                row = f"learning, {name}: reward after, {whose}"
                yield Result(row, statistics.mean(values), "reward")
            row, ratio = f"learning, {name}: difference in standard errors", difference / error
            yield Result(row, ratio, "standard errors", "within 2", abs(ratio) <= 2)
            yield Result(f"learning, {name}: standard error of the difference", error, "reward")


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    write_results(OUT, learning(given.seeds), show=True)


if __name__ == "__main__":
    main()
