"""A whole private round against a training step of TRL, which has no privacy.

Both sample, score and differentiate 48 prompts × 2 responses × 16 tokens, for the same model,
LoRA and Python reward, and take one optimizer step. A round of ours also charges the ledger, draws
the noise and saves a checkpoint; TRL saves and logs nothing. Three comparisons:

- alike: both in float32, and TRL with the settings that were fastest for it: no gradient
  checkpointing, dropout off, β = 0 (no reference model), all responses generated in one call and
  differentiated in MICRO_BATCH rows at once;
- bfloat16: the same, with the frozen weights of both in bfloat16 and no autocast;
- as they come: what a user gets who sets nothing but the task. TRL then computes under bfloat16
  autocast, checkpoints activations, keeps β = 0.05 and differentiates 8 rows at once; a recipe of
  ours says ``dtype: auto``, which is bfloat16 weights where the processor multiplies in it.
"""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from bench import models
from bench.measure import Tick, Turns, ratio, seconds
from dprlhf import train
from dprlhf.assets import resolve
from dprlhf.errors import DprlhfError
from dprlhf.runs.measurements import Result

PROMPTS, RESPONSES, TOKENS = 48, 2, 16
LONGEST = 12  # tokens of a prompt; TRL pads to what it finds in a batch, ours to a public number
ROWS = PROMPTS * RESPONSES
MICRO_BATCH = 96
Loop = Callable[[Callable[[], None]], None]


def results(
    *, quick: bool, device: str, repeats: int, tick: Tick = lambda: None
) -> Iterator[Result]:
    """Yield the time of a TRL step over the time of a private round."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    steps = repeats + 1
    prompts = [f"Film {i}: when the story began," for i in range(PROMPTS * steps)]
    with tempfile.TemporaryDirectory() as folder:
        model = _model(Path(folder), quick)

        def ours(name: str, dtype: str) -> Loop:
            return lambda lap: _ours(model, prompts, steps, Path(folder) / name, lap, dtype)

        def trl(algorithm: str, dtype: torch.dtype = torch.float32, *, tuned: bool = True) -> Loop:
            sides = {"RLOO": (RLOOTrainer, RLOOConfig), "GRPO": (GRPOTrainer, GRPOConfig)}
            return lambda lap: trl_steps(
                *sides[algorithm], model, prompts, steps, device, lap, dtype, tuned=tuned
            )

        comparisons: list[dict[str, Loop]] = [  # our side first
            {
                "private round, bfloat16": ours("bfloat16", "bfloat16"),
                "RLOO, bfloat16": trl("RLOO", torch.bfloat16),
                "GRPO, bfloat16": trl("GRPO", torch.bfloat16),
            },
            {
                "private round, as it comes": ours("as-it-comes", "auto"),
                "RLOO, as it comes": trl("RLOO", tuned=False),
            },
            {"private round": ours("alike", "float32"), "RLOO": trl("RLOO"), "GRPO": trl("GRPO")},
        ]
        for comparison in comparisons:  # one after the other: all at once need more than 20 GB
            turns = Turns(comparison)
            turns.run(tick)
            first, *others = comparison
            for name in others:
                yield from ratio(
                    f"a TRL step ({name}) over a {first}: time",
                    turns.laps[name],
                    turns.laps[first],
                    at_least=3.0 if device == "cpu" else None,  # the goal is one for a CPU
                )
            for name, times in turns.laps.items():
                yield seconds(name, times)
            del turns
            gc.collect()


def reward(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Prefer short completions."""
    return [-len(text.encode()) / 10 for text in completions]


def _model(folder: Path, quick: bool) -> str:
    """Return SmolLM2-135M's folder, or, without the asset, a random model of its shape."""
    if not quick:
        try:
            return resolve("asset:smollm2-135m")
        except DprlhfError:
            pass
    models.causal_lm("llama", small=quick).save_pretrained(folder / "model")
    models.byte_tokenizer().save_pretrained(folder / "model")
    return str(folder / "model")


def _ours(
    model: str,
    prompts: list[str],
    rounds: int,
    folder: Path,
    lap: Callable[[], None],
    dtype: str,
) -> None:
    train(
        model=model,
        prompts=prompts,
        reward=reward,
        policy__dtype=dtype,
        policy__adapter={
            "type": "lora", "rank": 4, "alpha": 4.0, "target_modules": ["q_proj", "v_proj"],
        },
        data__max_prompt_tokens=LONGEST,
        rollout={"responses": RESPONSES, "max_new_tokens": TOKENS, "batch_size": ROWS},
        update={"batch_size": ROWS},
        privacy={"noise_multiplier": 1.0, "partition": "fixed"},  # rounds of exactly 48 users
        rounds=rounds,
        output_dir=folder,
        callbacks=[lambda metrics: lap()],
        quiet=True,
    )  # fmt: skip


def trl_steps(
    trainer: type[RLOOTrainer | GRPOTrainer],
    config: type[RLOOConfig | GRPOConfig],
    model: str,
    prompts: list[str],
    steps: int,
    device: str,
    lap: Callable[[], None],
    dtype: torch.dtype = torch.float32,
    *,
    tuned: bool = True,
) -> None:
    """Take ``steps`` training steps and call ``lap`` after each; ``tuned`` for speed, or not.

    Args:
        dtype: of the model's weights; the adapter's are float32.
    """
    fast: dict[str, Any] = {
        "bf16": False, "gradient_checkpointing": False, "disable_dropout": True, "beta": 0.0,
    }  # fmt: skip
    micro_batch = MICRO_BATCH if tuned else config.per_device_train_batch_size

    class Laps(TrainerCallback):
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            lap()

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    with tempfile.TemporaryDirectory() as folder:
        loop = trainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=dtype),
            reward_funcs=reward,
            args=config(
                output_dir=folder,
                use_cpu=device == "cpu",
                **(fast if tuned else {}),
                max_steps=steps,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=math.ceil(ROWS / micro_batch),
                num_generations=RESPONSES,
                max_completion_length=TOKENS,
                temperature=1.0,
                learning_rate=1e-3,
                shuffle_dataset=False,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            callbacks=[Laps()],
            peft_config=peft.LoraConfig(
                r=4, lora_alpha=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"],
                task_type="CAUSAL_LM",
            ),
        )  # fmt: skip
        loop.remove_callback(PrinterCallback)
        loop.train()
