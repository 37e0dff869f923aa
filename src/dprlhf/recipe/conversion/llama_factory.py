"""LLaMA-Factory's training files: the settings of its stages pt, sft, rm, ppo and dpo.

Names and defaults are those of its ``hparams`` and of transformers' ``TrainingArguments``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dprlhf.errors import DprlhfError
from dprlhf.recipe.conversion.rules import (
    CLIPPED,
    LOGGED,
    NO_DECAY,
    NO_DROPOUT,
    NO_SPLIT,
    OPTIMIZER,
    PREPARED,
    SCHEDULE,
    SHARED,
    SPEED,
    Draft,
    Finding,
    Rule,
    off,
    one_of,
    refused,
    reports,
    steps,
    taken,
    to,
    unused,
    warmup_steps,
)

STAGES = {"pt": "sft", "sft": "sft", "rm": "reward", "dpo": "dpo", "ppo": "rl"}
"""The stage of a recipe for each of LLaMA-Factory's that has one."""

DEFAULTS: dict[str, Any] = {
    "lora_rank": 8,
    "lora_target": "all",
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 8,
    "seed": 42,
}
"""Its defaults that differ from a recipe's, which apply where the file does not name them."""

_TEMPLATE = (
    "text prompts are read as they are, and conversations by the tokenizer's own chat template:"
    " give rows as messages, or with the template's words in the text, and leave this out"
)
_LENGTHS = ("data.max_prompt_tokens", "data.max_completion_tokens")
_STEPS = (
    "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
)  # fmt: skip


def _bits(name: str, value: Any, draft: Draft) -> Finding:
    """Map a frozen base model in 4 or 8 bit, whose scales are quantised, too, by default."""
    kind = draft.given.get("quantization_type", "nf4")
    double = "-double" if draft.given.get("double_quantization", True) else ""
    kinds = {4: f"{kind}{double}", 8: "int8"}
    return one_of("model.quantization", kinds, "4 or 8 bit are offered")(name, value, draft)


FIELDS: dict[str, Rule] = {
    "model_name_or_path": to("model.model_name_or_path"),
    "model_revision": to("model.revision"),
    "trust_remote_code": to("model.trust_remote_code"),
    "flash_attn": SPEED,
    "enable_liger_kernel": SPEED,
    "use_unsloth": SPEED,
    "rope_scaling": off("the model's own positions are kept"),
    "adapter_name_or_path": off("name the merged model in policy.model_name_or_path"),
    "quantization_bit": _bits,
    "quantization_method": off("the base model is quantized with bitsandbytes", also=["bnb"]),
    "quantization_type": unused("it is in quantization_bit's key"),
    "double_quantization": unused("it is in quantization_bit's key"),
    "do_train": unused("it is a training file"),
    "do_eval": unused("evaluation.data says whether"),
    "do_predict": off("dprlhf generate shows responses"),
    "finetuning_type": one_of(
        "model.adapter.type",
        {"lora": "lora"},
        "write lora; for all weights, write a recipe with policy.adapter.type: full",
    ),
    "lora_alpha": to("model.adapter.alpha", float),
    "lora_dropout": NO_DROPOUT,
    "lora_target": to(
        "model.adapter.target_modules",
        lambda v: "all-linear" if v == "all" else v if isinstance(v, list) else _split(v),
    ),
    "use_rslora": to("model.adapter.use_rslora"),
    "use_dora": to("model.adapter.use_dora"),
    "pissa_init": off("A starts at random, or from public activations (policy.adapter.init)"),
    "loraplus_lr_ratio": off("all trained parameters have one learning rate"),
    "additional_target": off("the adapter alone is trained"),
    "pref_beta": to("update.beta", float),
    "pref_loss": one_of(
        "update.loss_type",
        {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo"},
        "the losses of a pair are sigmoid, hinge, ipo and robust",
        ["update.loss_type"],
    ),
    "pref_ftx": off("one loss is taken"),
    "dpo_label_smoothing": off("write update.loss_type=robust", ["update.loss_type"]),
    "ref_model": off("the reference is the policy with its adapter off"),
    "ld_alpha": off("all tokens of a completion count alike"),
    "reward_model": off(
        "its reward models are adapters with a value head: name a sequence classifier, as dprlhf"
        " reward leaves, in rewards=[{classifier: …}]",
        ["rewards"],
    ),
    "reward_model_type": unused("rewards says which"),
    "ppo_epochs": to("update.epochs", int, "passes over a user's own responses"),
    "ppo_buffer_size": off("a round's responses serve one step", also=[1]),
    "ppo_score_norm": off("rewards are not normalised over users"),
    "ppo_whiten_rewards": off("advantages are not whitened over users"),
    "ppo_target": off("the coefficient of the KL penalty is fixed: kl.beta", ["kl.beta"]),
    "max_samples": to("data.limit", int),
    "streaming": PREPARED,
    "dataset_dir": unused("it is where dataset was looked up"),
    "overwrite_cache": PREPARED,
    "preprocessing_num_workers": PREPARED,
    "preprocessing_batch_size": PREPARED,
    "dataloader_num_workers": PREPARED,
    "tokenized_path": PREPARED,
    "packing": off("rows of different users share no sequence"),
    "neat_packing": off("rows of different users share no sequence"),
    "train_on_prompt": off("the loss is taken on completions", ["data.completion_column"]),
    "mask_history": off("a row is one prompt and one completion"),
    "template": off(_TEMPLATE, also=["default", "empty"]),
    "val_size": NO_SPLIT,
    "eval_dataset": NO_SPLIT,
    "eval_strategy": unused("evaluation.every says how often"),
    "eval_steps": unused("evaluation.every says how often"),
    "per_device_eval_batch_size": SPEED,
    "compute_accuracy": unused("a reward model's accuracy is always measured"),
    "output_dir": to("output_dir"),
    "overwrite_output_dir": unused("a run folder is never overwritten: name a new one"),
    "logging_steps": LOGGED,
    "save_steps": LOGGED,
    "save_strategy": LOGGED,
    "save_total_limit": LOGGED,
    "save_only_model": LOGGED,
    "plot_loss": unused("dprlhf report draws the plots"),
    "report_to": reports,
    "run_name": unused("the run folder's name is the run's"),
    "learning_rate": to("optimizer.learning_rate", float),
    "lr_scheduler_type": SCHEDULE,
    "warmup_ratio": to("optimizer.warmup", float),
    "warmup_steps": warmup_steps,
    "optim": OPTIMIZER,
    "weight_decay": NO_DECAY,
    "max_grad_norm": CLIPPED,
    "bf16": one_of("model.dtype", {True: "bfloat16", False: "float32"}, "write true or false"),
    "pure_bf16": off("adapters are trained in float32"),
    "fp16": off("float16 is not offered: write bf16: true"),
    "tf32": SPEED,
    "gradient_checkpointing": to("model.gradient_checkpointing"),
    "disable_gradient_checkpointing": SPEED,
    "seed": to("seed", int),
    "ddp_timeout": SHARED,
    "deepspeed": SHARED,
    "fsdp": SHARED,
    "resume_from_checkpoint": off("dprlhf resume RUN goes on with a run"),
    "push_to_hub": off("dprlhf push uploads a finished run"),
    "max_new_tokens": to("rollout.max_new_tokens", int),
    "temperature": to("rollout.temperature", float),
    "top_p": to("rollout.top_p", float),
    "top_k": to("rollout.top_k", int),
    "repetition_penalty": to("rollout.repetition_penalty", float),
}  # fmt: skip
"""The settings that become something by themselves; those of steps and data belong together."""


def stage_of(given: dict[str, Any]) -> str:
    """Return the recipe's stage.

    Raises:
        DprlhfError: There is none for the file's stage.
    """
    stage = given.get("stage", "sft")
    if stage not in STAGES:
        raise DprlhfError(
            f"stage {stage!r} has no private counterpart: {', '.join(STAGES)} have one"
        )
    return STAGES[stage]


def together(draft: Draft) -> dict[str, Finding]:
    """Map the settings that mean something only together: stage, rank, steps, data, lengths."""
    given = draft.given
    rank = int(given["lora_rank"])
    draft.put("model.adapter.type", "lora")
    draft.put("model.adapter.rank", rank)
    draft.put("model.adapter.alpha", 2.0 * rank)  # what lora_alpha is without a value
    found = [taken("lora_rank", "adapter.rank", "adapter.alpha"), _stage(draft)]
    batch = int(given["per_device_train_batch_size"]) * int(
        given.get("gradient_accumulation_steps") or 1
    )
    found += steps(
        draft,
        batch=batch,
        epochs=given["num_train_epochs"],
        max_steps=given.get("max_steps"),
        names=[name for name in _STEPS if name in given],
    )
    found += [_data(draft)] if "dataset" in given else []
    found += [_length(draft)] if "cutoff_len" in given else []
    return {finding.name: finding for finding in found}


def _stage(draft: Draft) -> Finding:
    name = draft.given.get("stage", "sft")
    if draft.stage == "rl":
        draft.put("update.name", "ppo")
        note = "no value head: a user's baseline comes from its own other responses"
        return taken("stage", "update.name: ppo", note=note)
    if name == "pt":
        draft.put("data.completion_column", None)
    draft.put("stage", draft.stage)
    return taken("stage", f"stage: {draft.stage}")


def _length(draft: Draft) -> Finding:
    length = int(draft.given["cutoff_len"])
    kept = "a longer prompt keeps its last tokens, not its first"
    if draft.stage == "rl":
        return to("data.max_prompt_tokens", int, kept)("cutoff_len", length, draft)
    if draft.stage == "reward":
        return to("data.max_tokens", int)("cutoff_len", length, draft)
    return refused(
        "cutoff_len",
        "prompt and completion have a limit each: give data.max_prompt_tokens and"
        " data.max_completion_tokens",
        *_LENGTHS,
    )


def _data(draft: Draft) -> Finding:
    """Look the data set up in ``dataset_info.json``, as LLaMA-Factory does."""
    name, folder = draft.given["dataset"], Path(draft.given.get("dataset_dir", "data"))
    names = _split(name) if isinstance(name, str) else list(name)
    if len(names) != 1:
        return refused("dataset", "a run has one data set: join the files", "data.path")
    listing = folder / "dataset_info.json"
    try:
        entry = json.loads(listing.read_text("utf-8"))[names[0]]
    except (OSError, ValueError, KeyError):
        return refused(
            "dataset", f"{names[0]!r} is not found in {listing}: give data.path", "data.path"
        )
    path = entry.get("hf_hub_url") or (
        str(folder / entry["file_name"]) if "file_name" in entry else None
    )
    if path is None:
        return refused("dataset", "neither a file nor on the hub: give data.path", "data.path")
    columns = entry.get("columns", {})
    if entry.get("formatting", "alpaca") != "alpaca":
        return refused(
            "dataset",
            "conversations in one column: write rows with a prompt and a completion (messages"
            " with role and content), and give data.path",
            "data.path",
        )
    if columns.get("query", "input") is not None and "query" in columns:
        return refused(
            "dataset",
            "its prompt is two columns, instruction and input: join them and give data.path",
            "data.path",
        )
    draft.put("data.path", path)
    draft.put("data.prompt_column", columns.get("prompt", "instruction"))
    if entry.get("subset"):
        draft.put("data.name", entry["subset"])
    if draft.stage == "sft" and draft.given.get("stage") != "pt":
        draft.put("data.completion_column", columns.get("response", "output"))
    if draft.stage in ("dpo", "reward"):
        draft.put("data.chosen_column", columns.get("chosen", "chosen"))
        draft.put("data.rejected_column", columns.get("rejected", "rejected"))
    return taken("dataset", "data.path", "data.…_column", note="of dataset_info.json")


def _split(names: str) -> list[str]:
    return [name.strip() for name in str(names).split(",") if name.strip()]
