"""A whole private round against a training step of TRL, which has no privacy.

Both sample, score and differentiate the same number of prompts, responses and tokens (``WORKS``),
for the same model, LoRA and Python reward, and take one optimizer step. A round of ours also
charges the ledger, draws the noise and saves a checkpoint; TRL saves and logs nothing. Three
comparisons:

- alike: both in float32, and TRL with the settings that were fastest for it: no gradient
  checkpointing, dropout off, β = 0 (no reference model), all responses generated in one call and as
  many rows differentiated at once as ours does;
- bfloat16: the same, with the frozen weights of both in bfloat16 and no autocast;
- as they come: what a user gets who sets nothing but the task. TRL then computes under bfloat16
  autocast, checkpoints activations, keeps β = 0.05 and differentiates 8 rows at once; a recipe of
  ours says ``dtype: auto``, which is bfloat16 weights where the processor multiplies in it.

On a GPU there is more work, in bfloat16 alone, also for a Llama of 1.5 billion weights with longer
texts. (As it comes TRL takes 8 rows at once, which leaves a GPU idle.)
"""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from bench import models
from bench.measure import Turns, ratio, seconds
from dprlhf import train
from dprlhf.assets import resolve
from dprlhf.errors import DprlhfError
from dprlhf.runs.measurements import Result

Loop = Callable[[Callable[[], None]], None]


@dataclass(frozen=True)
class Work:
    """What a round or a step computes.

    Attributes:
        prompts: Prompts of a round, each of a user of its own.
        responses: Responses to each prompt.
        tokens: Tokens of a response.
        longest: Most tokens of a prompt; TRL pads to what it finds in a batch, ours to this.
        micro_batch: Rows that are differentiated at once, where a side is tuned for speed.
        model: Shape of the model; ``llama`` is SmolLM2-135M, with its weights where they are.
        rank: Rank of the LoRA.
    """

    prompts: int = 48
    responses: int = 2
    tokens: int = 16
    longest: int = 12
    micro_batch: int = 96
    model: models.Kind = "llama"
    rank: int = 4

    @property
    def rows(self) -> int:
        """Number of responses."""
        return self.prompts * self.responses

    def texts(self, steps: int) -> list[str]:
        """Return the prompts of all steps; as bytes they fill ``longest`` where it is larger."""
        texts = [f"Film {i}: when the story began," for i in range(self.prompts * steps)]
        return [(text * (self.longest // 30 + 1))[: max(self.longest, 32)] for text in texts]


WORKS: dict[str, dict[str, Work]] = {
    "cpu": {"": Work()},
    "cuda": {
        "": Work(prompts=256, responses=4, tokens=64, micro_batch=256),
        "1.5 billion weights": Work(16, 8, 256, 512, 16, model="billion", rank=8),
    },
}
"""The work by device and by what is said of it in the names of the rows."""
GOALS = {"cpu": {"RLOO": 3.0, "GRPO": 3.0}, "cuda": {"RLOO": 1.5, "GRPO": 1.0}}
"""Least ratio of TRL's time to ours, by device and algorithm."""


def results(*, quick: bool, device: str, repeats: int) -> Iterator[Result]:
    """Yield the time of a TRL step over the time of a private round."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    for label, work in WORKS[device].items():
        with tempfile.TemporaryDirectory() as folder:
            sides = Sides(Path(folder), work, repeats + 1, device, quick)
            for ours, theirs in sides.comparisons():
                yield from _compared(ours, theirs, f", {label}" if label else "", device)
                gc.collect()  # one comparison after the other: all at once need more than 20 GB


def _compared(
    ours: dict[str, Loop], theirs: dict[str, Loop], label: str, device: str
) -> Iterator[Result]:
    turns = Turns(ours | theirs)
    turns.run()
    for name in theirs:
        for mine in ours:
            yield from ratio(
                f"a TRL step ({name}{label}) over a {mine}{label}: time",
                turns.laps[name],
                turns.laps[mine],
                at_least=GOALS[device][name[:4]],
            )
    for name, times in turns.laps.items():
        yield seconds(f"{name}{label}", times)


@dataclass(frozen=True)
class Sides:
    """The loops that are compared, on one model in a folder."""

    folder: Path
    work: Work
    steps: int
    device: str
    quick: bool

    def comparisons(self) -> Iterator[tuple[dict[str, Loop], dict[str, Loop]]]:
        """Yield what is compared side by side: our loops, and TRL's."""
        model = self._model()

        def ours(dtype: str) -> Loop:
            folder = Path(tempfile.mkdtemp(dir=self.folder)) / "run"
            return lambda lap: private_rounds(model, self.work, self.steps, folder, lap, dtype)

        def trl(algorithm: str, dtype: torch.dtype, *, tuned: bool = True) -> Loop:
            classes = {"RLOO": (RLOOTrainer, RLOOConfig), "GRPO": (GRPOTrainer, GRPOConfig)}
            return lambda lap: trl_steps(
                *classes[algorithm], model, self.work, self.steps, self.device, lap, dtype,
                tuned=tuned,
            )  # fmt: skip

        yield (
            {"private round, bfloat16": ours("bfloat16")},
            {f"{name}, bfloat16": trl(name, torch.bfloat16) for name in ("RLOO", "GRPO")},
        )
        if self.device == "cpu":
            yield (
                {"private round, as it comes": ours("auto")},
                {"RLOO, as it comes": trl("RLOO", torch.float32, tuned=False)},
            )
            yield (
                {"private round": ours("float32")},
                {name: trl(name, torch.float32) for name in ("RLOO", "GRPO")},
            )

    def _model(self) -> str:
        """Return the folder of SmolLM2-135M, or of a random model of the work's shape."""
        if not self.quick and self.work.model == "llama":
            try:
                return resolve("asset:smollm2-135m")
            except DprlhfError:
                pass
        models.causal_lm(self.work.model, small=self.quick).save_pretrained(self.folder / "model")
        models.byte_tokenizer().save_pretrained(self.folder / "model")
        return str(self.folder / "model")


def reward(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Prefer short completions."""
    return [-len(text.encode()) / 10 for text in completions]


def private_rounds(
    model: str,
    work: Work,
    rounds: int,
    folder: Path,
    lap: Callable[[], None],
    dtype: str,
) -> None:
    """Train for so many rounds and call ``lap`` after each."""
    train(
        model=model,
        prompts=work.texts(rounds),
        reward=reward,
        policy__dtype=dtype,
        policy__adapter={
            "type": "lora", "rank": work.rank, "alpha": float(work.rank),
            "target_modules": models.TARGETS[work.model],
        },
        data__max_prompt_tokens=work.longest,
        rollout={
            "responses": work.responses, "max_new_tokens": work.tokens, "batch_size": work.rows,
        },
        update={"batch_size": work.micro_batch},
        privacy={"noise_multiplier": 1.0, "partition": "fixed"},  # a round's users exactly
        rounds=rounds,
        output_dir=folder,
        callbacks=[lambda metrics: lap()],
        quiet=True,
    )  # fmt: skip


def trl_steps(
    trainer: type[RLOOTrainer | GRPOTrainer],
    config: type[RLOOConfig | GRPOConfig],
    model: str,
    work: Work,
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
    micro_batch = work.micro_batch if tuned else config.per_device_train_batch_size

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
                gradient_accumulation_steps=math.ceil(work.rows / micro_batch),
                num_generations=work.responses,
                max_completion_length=work.tokens,
                temperature=1.0,
                learning_rate=1e-3,
                shuffle_dataset=False,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=datasets.Dataset.from_dict({"prompt": work.texts(steps)}),
            processing_class=tokenizer,
            callbacks=[Laps()],
            peft_config=peft.LoraConfig(
                r=work.rank, lora_alpha=work.rank, lora_dropout=0.0, task_type="CAUSAL_LM",
                target_modules=models.TARGETS[work.model],
            ),
        )  # fmt: skip
        loop.remove_callback(PrinterCallback)
        loop.train()
