"""axolotl's training files: supervised fine-tuning, reward models, DPO, IPO and GRPO.

Names and defaults are those of its configuration schema.
"""

from __future__ import annotations

from collections.abc import Callable
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
    count,
    off,
    one_of,
    refused,
    reports,
    steps,
    taken,
    to,
    unreadable,
    unused,
    warmup_steps,
    whole,
)

RL = {"dpo": "dpo", "ipo": "dpo", "grpo": "rl"}
"""The stage of a recipe for each of axolotl's ``rl`` that has one."""

DEFAULTS: dict[str, Any] = {
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_epochs": 1.0,
    "sequence_len": 512,
    "lr_scheduler": "cosine",
}
"""Its defaults that differ from a recipe's, which apply where the file does not name them."""

READ: dict[str, Callable[[Any], Any]] = {
    "micro_batch_size": count,
    "gradient_accumulation_steps": count,
    "num_epochs": float,
    "max_steps": whole,
    "trl.num_generations": count,
    "trl.reward_weights": lambda weights: [float(weight) for weight in weights],
}
"""The settings that others build on, each with what reads its value."""

_TRL = "trl."
_COLUMNS = ("data.prompt_column",)
_STEPS = ("num_epochs", "max_steps", "micro_batch_size", "gradient_accumulation_steps")
_WANDB = unused("only tracking.report_to and tracking.project are passed on")


def _quantized(kind: str) -> Rule:
    """Return the rule of a switch for the frozen base model in 4 or 8 bit."""

    def rule(name: str, value: Any, draft: Draft) -> Finding:
        if not value:
            return Finding(name, "no effect", "as it is here")
        return to("model.quantization", lambda _: kind)(name, value, draft)

    return rule


FIELDS: dict[str, Rule] = {
    "base_model": to("model.model_name_or_path"),
    "revision_of_model": to("model.revision"),
    "trust_remote_code": to("model.trust_remote_code"),
    "model_type": unused("the model's own files say which"),
    "tokenizer_type": unused("the model's own files say which"),
    "strict": unused("an unknown setting is always refused"),
    "load_in_8bit": _quantized("int8"),
    "load_in_4bit": _quantized("nf4-double"),
    "gptq": off("the base model is quantized with bitsandbytes"),
    "adapter": one_of(
        "model.adapter.type", {"lora": "lora", "qlora": "lora"}, "write lora or qlora"
    ),
    "lora_model_dir": off("name the merged model in base_model"),
    "lora_r": to("model.adapter.rank", int),
    "lora_alpha": to("model.adapter.alpha", float),
    "lora_dropout": NO_DROPOUT,
    "lora_target_linear": one_of(
        "model.adapter.target_modules", {True: "all-linear"}, "write true or leave it out"
    ),
    "lora_target_modules": to("model.adapter.target_modules"),
    "peft_layers_to_transform": to("model.adapter.layers"),
    "peft_use_rslora": to("model.adapter.use_rslora"),
    "peft_use_dora": to("model.adapter.use_dora"),
    "lora_modules_to_save": off("the adapter alone is trained"),
    "lora_fan_in_fan_out": unused("PEFT sees it from the layer"),
    "lora_mlp_kernel": SPEED,
    "lora_qkv_kernel": SPEED,
    "lora_o_kernel": SPEED,
    "dataset_prepared_path": PREPARED,
    "dataset_processes": PREPARED,
    "dataset_keep_in_memory": PREPARED,
    "remove_unused_columns": unused("rewards get all columns"),
    "test_datasets": NO_SPLIT,
    "val_set_size": NO_SPLIT,
    "eval_table_size": LOGGED,
    "eval_max_new_tokens": LOGGED,
    "evals_per_epoch": unused("evaluation.every says how often"),
    "eval_steps": unused("evaluation.every says how often"),
    "eval_sample_packing": unused("rows are not packed"),
    "sample_packing": off("rows of different users share no sequence"),
    "pad_to_sequence_len": unused("batches have public shapes"),
    "group_by_length": off("users are not sorted by length"),
    "train_on_inputs": off("the loss is taken on completions", ["data.completion_column"]),
    "chat_template": off(
        "conversations are read by the tokenizer's own chat template", also=["tokenizer_default"]
    ),
    "special_tokens": off("the tokenizer is taken as it is: save it with the model", also=[{}]),
    "output_dir": to("output_dir"),
    "hub_model_id": off("dprlhf push uploads a finished run"),
    "logging_steps": LOGGED,
    "saves_per_epoch": LOGGED,
    "save_steps": LOGGED,
    "save_strategy": LOGGED,
    "save_safetensors": LOGGED,
    "early_stopping_patience": off("rounds are fixed before a run: stopping early saves no ε"),
    "resume_from_checkpoint": off("dprlhf resume RUN goes on with a run"),
    "auto_resume_from_checkpoints": off("dprlhf resume RUN goes on with a run"),
    "report_to": reports,
    "wandb_project": to("tracking.project"),
    "wandb_entity": _WANDB,
    "wandb_watch": _WANDB,
    "wandb_name": _WANDB,
    "wandb_run_id": _WANDB,
    "wandb_log_model": _WANDB,
    "learning_rate": to("optimizer.learning_rate", float),
    "lr_scheduler": SCHEDULE,
    "warmup_ratio": to("optimizer.warmup", float),
    "warmup_steps": warmup_steps,
    "optimizer": OPTIMIZER,
    "adam_epsilon": to("optimizer.eps", float),
    "weight_decay": NO_DECAY,
    "max_grad_norm": CLIPPED,
    "bf16": one_of(
        "model.dtype",
        {True: "bfloat16", "auto": "auto", "full": "bfloat16", False: "float32"},
        "write true, false or auto",
    ),
    "fp16": off("float16 is not offered: write bf16: auto"),
    "tf32": SPEED,
    "gradient_checkpointing": one_of(
        "model.gradient_checkpointing", {True: True, False: False}, "write true or false"
    ),
    "gradient_checkpointing_kwargs": SPEED,
    "flash_attention": SPEED,
    "xformers_attention": SPEED,
    "sdp_attention": SPEED,
    "attn_implementation": SPEED,
    "seed": to("seed", int),
    "local_rank": SHARED,
    "deepspeed": SHARED,
    "fsdp": SHARED,
    "fsdp_config": SHARED,
    "vllm": SPEED,
    "debug": unused("nothing is printed of private rows"),
    "reward_model": unused("the stage follows from it"),
    "max_prompt_len": to("data.max_prompt_tokens", int),
    "trl.num_generations": to("rollout.responses", int),
    "trl.max_completion_length": to("rollout.max_new_tokens", int),
    "trl.temperature": to("rollout.temperature", float),
    "trl.top_p": to("rollout.top_p", float),
    "trl.top_k": to("rollout.top_k", int),
    "trl.min_p": to("rollout.min_p", float),
    "trl.repetition_penalty": to("rollout.repetition_penalty", float),
    "trl.beta": to("kl.beta", float, "subtracted from each response's reward"),
    "trl.epsilon": to("update.clip_range", float),
    "trl.scale_rewards": one_of(
        "update.scale_rewards",
        {True: True, False: False, "group": True, "none": False},
        "rewards are scaled within a user, or not",
        ["update.scale_rewards"],
    ),
    "trl.loss_type": off(
        "each response's tokens are averaged, as in grpo; others count a batch's tokens",
        also=["grpo"],
    ),
    "trl.num_iterations": off("a round's responses serve one step", also=[1]),
    "trl.reward_weights": unused("they are in rewards"),
    "trl.use_vllm": unused("rollout.backend=vllm is experimental, on one GPU"),
    "trl.log_completions": off("completions quote private prompts; dprlhf generate shows others"),
    "trl.sync_ref_model": off("the reference is the policy with its adapter off"),
    "trl.ref_model_mixup_alpha": unused("there is no reference that moves"),
    "trl.ref_model_sync_steps": unused("there is no reference that moves"),
    **{
        f"trl.vllm_{name}": SPEED
        for name in (
            "device", "gpu_memory_utilization", "dtype", "max_model_len", "server_host",
            "server_port", "server_timeout", "enable_prefix_caching",
        )
    },
}  # fmt: skip
"""The settings that become something by themselves; those of steps belong together."""


def flat(given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with those of the section ``trl`` as ``trl.name``."""
    inner = given.get("trl")
    if not isinstance(inner, dict):
        return given
    outer = {name: value for name, value in given.items() if name != "trl"}
    return outer | {f"{_TRL}{name}": value for name, value in inner.items()}


def stage_of(given: dict[str, Any]) -> str:
    """Return the recipe's stage.

    Raises:
        DprlhfError: There is none for the file's ``rl``, or it trains no adapter.
    """
    kind = given.get("rl")
    if kind and kind not in list(RL):  # a list has no hash
        raise DprlhfError(f"rl {kind!r} has no private counterpart: {', '.join(RL)} have one")
    if not given.get("adapter"):
        raise DprlhfError(
            "there is no adapter, so all weights would be trained: write adapter: lora, or a recipe"
            " with policy.adapter.type: full"
        )
    return RL[kind] if kind else "reward" if given.get("reward_model") else "sft"


def together(draft: Draft) -> dict[str, Finding]:
    """Map the settings that mean something only together: the kind, and the steps."""
    given = draft.given
    found = [_kind(draft)] if "rl" in given else []
    if draft.stage != "rl":
        draft.put("stage", draft.stage)
    batch = given["micro_batch_size"] * given["gradient_accumulation_steps"]
    if draft.stage == "rl":  # a batch counts responses
        batch = max(1, batch // (given.get("trl.num_generations") or 8))
    found += steps(
        draft,
        batch=batch,
        epochs=given["num_epochs"],
        max_steps=given.get("max_steps"),
        names=[name for name in _STEPS if name in given],
    )
    return {finding.name: finding for finding in found}


def _kind(draft: Draft) -> Finding:
    kind = draft.given["rl"]
    if kind == "grpo":
        draft.put("update.name", "grpo")
        return taken("rl", "update.name: grpo")
    if kind == "ipo":
        draft.put("update.loss_type", "ipo")
        return taken("rl", "stage: dpo", "update.loss_type: ipo")
    return taken("rl", f"stage: {draft.stage}")


def _section(name: str, value: Any, draft: Draft) -> Finding:
    """Refuse what is written in place of a section, whose settings are names of their own."""
    return unreadable(name, value) if value else Finding(name, "no effect", "it is empty")


def _beta(name: str, value: Any, draft: Draft) -> Finding:
    key = "kl.beta" if draft.stage == "rl" else "update.beta"
    if draft.stage in ("sft", "reward"):
        return Finding(name, "no effect", "there is no reference")
    return to(key, float)(name, value, draft)


def _rewards(name: str, value: Any, draft: Draft) -> Finding:
    names = value or []
    weights = draft.given.get("trl.reward_weights") or [1.0] * len(names)
    if len(weights) != len(names) or any("." not in one for one in names):
        return refused(name, "write rewards as module.function, with a weight each", "rewards")
    functions = [":".join(one.rsplit(".", 1)) for one in names]
    draft.settings["rewards"] = [
        {"function": function, "weight": weight}
        for function, weight in zip(functions, weights, strict=True)
    ]
    return taken(name, "rewards", note="importable from where dprlhf is started")


def _data(name: str, value: Any, draft: Draft) -> Finding:
    """Map the one data set, where its type leaves the columns as they are."""
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], dict):
        return refused(name, "a run has one data set: join the files", "data.path")
    entry = dict(value[0])
    draft.put("data.path", entry.pop("path"))
    for part, key in (
        ("name", "data.name"),
        ("split", "data.split"),
        ("revision", "data.revision"),
    ):
        if entry.get(part) is not None:
            draft.put(key, entry.pop(part))
    if (files := entry.pop("data_files", None)) is not None:
        if not isinstance(files, str):
            return refused(name, "data_files: a run has one file", "data.path")
        draft.put("data.path", files)
    entry.pop("ds_type", None)  # the file's suffix says which
    kind = entry.pop("type", None)
    columns = _columns(draft.stage, kind, entry)
    if columns is None or any(left is not None for left in entry.values()):
        return refused(
            name,
            f"type {kind!r} rewrites the rows: write them with a prompt (and chosen and rejected,"
            " or a completion), as text or as messages, and give data.prompt_column",
            *_COLUMNS,
        )
    for column, theirs in columns.items():
        draft.put(f"data.{column}", theirs)
    return taken(name, "data.path", "data.…_column")


def _columns(stage: str, kind: Any, entry: dict[str, Any]) -> dict[str, Any] | None:
    """Return the recipe's columns for a type of data set; None where it changes the rows."""
    if kind == "completion" and stage == "sft":
        return {"prompt_column": entry.pop("field", None) or "text", "completion_column": None}
    if isinstance(kind, dict) and stage == "dpo":
        kind = dict(kind)
        fields = {name: kind.pop(f"field_{name}", None) or name for name in _DPO_COLUMNS}
        plain = all(kind.pop(f"{name}_format", None) in (None, f"{{{name}}}") for name in fields)
        return (
            {f"{n}_column": f for n, f in fields.items()}
            if plain and not any(kind.values())
            else None
        )
    return None


_DPO_COLUMNS = ("prompt", "chosen", "rejected")


def _length(name: str, value: Any, draft: Draft) -> Finding:
    if draft.stage == "reward":
        return to("data.max_tokens", int)(name, value, draft)
    if draft.stage == "rl":
        return Finding(name, "no effect", "prompt and response have a limit each")
    return refused(
        name,
        "prompt and completion have a limit each: give data.max_prompt_tokens and"
        " data.max_completion_tokens",
        "data.max_prompt_tokens",
        "data.max_completion_tokens",
    )


FIELDS |= {
    "trl": _section,
    "rl_beta": _beta,
    "dpo_beta": _beta,
    "trl.reward_funcs": _rewards,
    "datasets": _data,
    "sequence_len": _length,
}
