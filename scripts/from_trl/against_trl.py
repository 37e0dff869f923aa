"""The private trainers against TRL's own: what they learn without noise, and what a step costs.

    python scripts/from_trl/against_trl.py              # writes docs/results/trl.json

- learning: the same model, prompts, reward, batches and optimizer through TRL's trainer and through
  the private one at ε = ∞, five seeds. Both start from a tiny random model; the reward is the share
  of a completion's characters that are lower-case letters. What is compared is the mean reward of
  completions that ``model.generate`` of transformers samples from both models after training.
- time: a step of TRL's trainer over a step of the private one at ε = 8, alternating in one process,
  for the same rows. The private step also clips each user, draws noise, charges the ledger and
  saves a checkpoint; TRL's saves and logs nothing.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]
import dprlhf.trl  # noqa: E402
from bench import models  # noqa: E402
from bench.measure import Turns, ratio  # noqa: E402
from dprlhf.assets import resolve  # noqa: E402
from dprlhf.errors import DprlhfError  # noqa: E402
from dprlhf.runs.measurements import Result, write_results  # noqa: E402
from from_trl.stand_ins import tiny_model  # noqa: E402

RESULTS = ROOT / "docs/results/trl.json"
STEPS, PROMPTS, GENERATIONS, TOKENS = 40, 16, 8, 16
LEARNING_RATE = 5e-4
TRAINERS = {
    "GRPO": (trl.GRPOTrainer, trl.GRPOConfig),
    "RLOO": (trl.RLOOTrainer, trl.RLOOConfig),
}
PRIVATE = {
    "GRPO": (dprlhf.trl.PrivateGRPOTrainer, dprlhf.trl.PrivateGRPOConfig),
    "RLOO": (dprlhf.trl.PrivateRLOOTrainer, dprlhf.trl.PrivateRLOOConfig),
}
ALIKE: dict[str, Any] = {
    "learning_rate": LEARNING_RATE,
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


def adapter() -> LoraConfig:
    """Return the adapter of both trainers."""
    return LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )


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
        peft_config=adapter(),
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
    tiny_model(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
    model.save_pretrained(folder)
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
                    print(f"{name} seed {seed} private {private}: {after[private][-1]:.3f}")
            difference = statistics.mean(after[True]) - statistics.mean(after[False])
            error = math.sqrt(sum(statistics.variance(x) / seeds for x in after.values()))
            for private, values in after.items():
                whose = "private trainer, epsilon inf" if private else "TRL"
                yield Result(
                    f"learning, {name}: reward after, {whose}", statistics.mean(values), "reward"
                )
            yield Result(
                f"learning, {name}: difference in standard errors",
                difference / error,
                "standard errors",
                "within 2",
                abs(difference) <= 2 * error,
            )
            yield Result(f"learning, {name}: standard error of the difference", error, "reward")


def steps(
    kind: tuple[Any, Any], model: str, count: int, lap: Callable[[], None], **given: Any
) -> None:
    """Take training steps on 12 prompts × 8 responses × 16 tokens; call ``lap`` after each."""
    trainer, config = kind

    class Laps(TrainerCallback):
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            lap()

    prompts = [f"Film {i}: when the story began," for i in range(12 * count)]
    with tempfile.TemporaryDirectory() as folder:
        loop = trainer(
            model=model,
            reward_funcs=letters,
            args=config(
                **ALIKE | {"learning_rate": 1e-3},
                output_dir=f"{folder}/run",
                max_steps=count,
                per_device_train_batch_size=96,
                model_init_kwargs={"dtype": "float32"},
                **given,
            ),
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
            callbacks=[Laps()],
            peft_config=LoraConfig(
                r=4, lora_alpha=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"],
                task_type="CAUSAL_LM",
            ),
        )  # fmt: skip
        loop.remove_callback(PrinterCallback)
        loop.train()


def overhead(repeats: int) -> Iterator[Result]:
    """Yield the time of a private step over that of TRL's."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = resolve("asset:smollm2-135m")
        except DprlhfError:  # a random model of its shape
            model = f"{folder}/model"
            models.causal_lm("llama", small=False).save_pretrained(model)
            models.byte_tokenizer().save_pretrained(model)
        budget = {"privacy_epsilon": 8.0, "privacy_partition": "fixed"}
        fast = {"gradient_checkpointing": False, "save_strategy": "no", "logging_strategy": "no"}
        for name in TRAINERS:  # one pair at a time: each loop holds a model and its activations
            loss = {"loss_type": "grpo"} if name == "GRPO" else {}
            loops: dict[str, Callable[[Callable[[], None]], object]] = {}
            for whose, kinds, given in (("TRL", TRAINERS, fast), ("private", PRIVATE, budget)):
                loops[whose] = lambda lap, k=kinds[name], g=given | loss: steps(  # type: ignore[misc]
                    k, model, repeats + 1, lap, **g
                )
            turns = Turns(loops)
            turns.run()
            laps = turns.laps
            yield from ratio(
                f"a private {name} step over TRL's: time", laps["private"], laps["TRL"]
            )


def main() -> None:
    """Measure both and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", choices=("learning", "overhead"))
    given = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    rows: list[Result] = []
    if given.only != "overhead":
        rows += learning(given.seeds)
    if given.only != "learning":
        rows += overhead(given.repeats)
    for row in rows:
        print(f"{row.name}: {row.value:.3f} {row.unit} {row.goal} {row.holds}")
    write_results(RESULTS, rows)


if __name__ == "__main__":
    main()
