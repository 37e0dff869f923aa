"""LLaMA-Factory's training files: the settings of its stages pt, sft, rm, ppo and dpo.

Names and defaults are those of its ``hparams`` and of transformers' ``TrainingArguments``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dprlhf.errors import DprlhfError
from dprlhf.recipe.conversion.rules import (
    CLIPPED,
    EMPTY,
    LOGGED,
    NO_DECAY,
    NO_DROPOUT,
    NO_SPLIT,
    OPTIMIZER,
    PREPARED,
    SCHEDULE,
    SHARED,
    SPEED,
    UNREADABLE,
    Draft,
    Finding,
    Rule,
    count,
    off,
    one_of,
    refused,
    reports,
    steps,
    taken,
    to,
    unused,
    warmup_steps,
    whole,
)

STAGES = {"pt": "sft", "sft": "sft", "rm": "reward", "dpo": "dpo", "ppo": "rl"}
"""The stage of a recipe for each of LLaMA-Factory's that has one."""

DEFAULTS: dict[str, Any] = {
    "lora_rank": 8,
    "lora_target": "all",
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "num_train_epochs": 3.0,
    "cutoff_len": 2048,
    "ppo_epochs": 4,
    "per_device_train_batch_size": 8,
    "seed": 42,
}
"""Its defaults that differ from a recipe's, which apply where the file does not name them."""

READ: dict[str, Callable[[Any], Any]] = {
    "lora_rank": count,
    "per_device_train_batch_size": count,
    "gradient_accumulation_steps": count,
    "num_train_epochs": float,
    "max_steps": whole,
}
"""The settings that others build on, each with what reads its value."""

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


def _limit(name: str, value: Any, draft: Draft) -> Finding:
    """Map a number of rows; max_samples counts those that an entry's num_samples leaves."""
    before = draft.settings.get("data", {}).get("limit", value)
    return to("data.limit", lambda rows: min(count(rows), count(before)))(name, value, draft)


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
    "max_samples": _limit,
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
    "template": off(_TEMPLATE, also=["empty"]),
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
"""The settings that become something by themselves; those of steps belong together."""


def stage_of(given: dict[str, Any]) -> str:
    """Return the recipe's stage.

    Raises:
        DprlhfError: There is none for the file's stage.
    """
    stage = given.get("stage", "sft")
    if stage not in list(STAGES):  # a list has no hash
        raise DprlhfError(
            f"stage {stage!r} has no private counterpart: {', '.join(STAGES)} have one"
        )
    return STAGES[stage]


def together(draft: Draft) -> dict[str, Finding]:
    """Map the settings that mean something only together: stage, rank and steps."""
    given = draft.given
    rank = given["lora_rank"]
    draft.put("model.adapter.type", "lora")
    draft.put("model.adapter.rank", rank)
    draft.put("model.adapter.alpha", 2.0 * rank)  # what lora_alpha is without a value
    found = [taken("lora_rank", "adapter.rank", "adapter.alpha"), _stage(draft)]
    batch = given["per_device_train_batch_size"] * (given.get("gradient_accumulation_steps") or 1)
    found += steps(
        draft,
        batch=batch,
        epochs=given["num_train_epochs"],
        max_steps=given.get("max_steps"),
        names=[name for name in _STEPS if name in given],
    )
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


def _length(name: str, value: Any, draft: Draft) -> Finding:
    kept = "a longer prompt keeps its last tokens, not its first"
    if draft.stage == "rl":
        return to("data.max_prompt_tokens", int, kept)(name, value, draft)
    if draft.stage == "reward":
        return to("data.max_tokens", int)(name, value, draft)
    return refused(
        name,
        "prompt and completion have a limit each: give data.max_prompt_tokens and"
        " data.max_completion_tokens",
        *_LENGTHS,
    )


def _data(name: str, value: Any, draft: Draft) -> Finding:
    """Look the data set up in ``dataset_info.json``, as LLaMA-Factory does."""
    folder = Path(str(draft.given.get("dataset_dir") or "data"))
    names = _split(value) if isinstance(value, str) else list(value)
    if len(names) != 1:
        return refused(name, "a run has one data set: join the files", "data.path")
    listing = folder / "dataset_info.json"
    try:
        entry = dict(json.loads(listing.read_text("utf-8"))[names[0]])
        columns = dict(entry.pop("columns", _COLUMNS))
    except (OSError, *UNREADABLE):
        reason = f"{names[0]!r} is not found in {listing}, or not readable: give data.path"
        return refused(name, reason, "data.path")
    path = entry.get("hf_hub_url") or (
        str(folder / entry["file_name"]) if "file_name" in entry else None
    )
    if path is None:
        reason = f"{names[0]!r} of {listing} is neither a file nor on the hub: give data.path"
        return refused(name, reason, "data.path")
    wanted = {"prompt": "prompt"} | _WANTED[draft.given.get("stage", "sft")]
    if reason := _rewritten(entry, columns, wanted):
        return refused(name, f"{reason}, and give data.path", "data.path")
    draft.put("data.path", path)
    for theirs, key in _ENTRY.items():
        if entry.get(theirs):
            draft.put(key, entry[theirs])
    _limit("num_samples", entry.get("num_samples"), draft)
    for theirs, ours in wanted.items():
        draft.put(f"data.{ours}_column", columns[theirs])
    rows = "; the first rows, not random ones" if entry.get("num_samples") else ""
    return taken(name, "data.path", "data.…_column", note=f"of dataset_info.json{rows}")


_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
"""The columns of an entry that has no ``columns``; one that has some has only these."""

_PAIR = {"chosen": "chosen", "rejected": "rejected"}
_WANTED: dict[str, dict[str, str]] = {
    "pt": {}, "sft": {"response": "completion"}, "rm": _PAIR, "dpo": _PAIR, "ppo": {},
}  # fmt: skip
"""The columns of a stage beside the prompt, with the recipe's words for them."""

_ENTRY = {"subset": "data.name", "split": "data.split", "revision": "data.revision"}
_KNOWN = {
    "hf_hub_url", "ms_hub_url", "om_hub_url", "file_name", "formatting", "ranking", "num_samples",
    *_ENTRY, *_COLUMNS, *_PAIR,
}  # fmt: skip
"""What an entry and its columns may have; all else would change the rows."""


def _rewritten(entry: dict[str, Any], columns: dict[str, Any], wanted: dict[str, str]) -> str:
    """Return how the program's rows differ from those of the file; empty where they do not."""
    if entry.get("formatting", "alpaca") != "alpaca":
        return (
            "conversations in one column: write rows with a prompt and a completion (messages"
            " with role and content)"
        )
    if columns.get("query"):
        return (
            f"its prompt is two columns, {columns.get('prompt')} and {columns['query']}: join them"
        )
    if missing := [column for column in wanted if not columns.get(column)]:
        return f"its columns name no {', '.join(missing)}: give data.…_column"
    given = (entry | columns).items()
    if others := [name for name, value in given if value not in EMPTY and name not in _KNOWN]:
        return f"its entry's {', '.join(others)} would change the rows: write them as they then are"
    return ""


def _split(names: str) -> list[str]:
    return [name.strip() for name in str(names).split(",") if name.strip()]


FIELDS |= {"dataset": _data, "cutoff_len": _length}
