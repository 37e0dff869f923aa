"""TRL's names of settings, for flags of ``dprlhf train`` and arguments of :func:`dprlhf.train`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from dprlhf.errors import DprlhfError, nearest

_OF_GENERATE = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "stop_strings": "stop",
    "stop": "stop",
}
"""Arguments of transformers' ``generate`` and vLLM's ``SamplingParams``: keys of ``rollout``."""

_NEEDS_NO_KEY = {
    "do_sample": True, "num_beams": 1, "num_return_sequences": 1, "n": 1, "use_cache": True,
    "repetition_penalty": 1.0,
}  # fmt: skip
"""What a run does anyway."""


def rollout_settings(generation_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of ``rollout`` that TRL's ``generation_kwargs`` stand for.

    >>> rollout_settings({"top_k": 20, "stop_strings": ["END"], "do_sample": True})
    {'top_k': 20, 'stop': ['END']}
    """
    if not isinstance(generation_kwargs, Mapping):
        raise DprlhfError(
            'generation_kwargs: write a mapping, such as {"top_k": 20}, not a'
            f" {type(generation_kwargs).__name__}"
        )
    settings = {}
    for name, value in generation_kwargs.items():
        if name in _OF_GENERATE:
            if value is not None:
                settings[_OF_GENERATE[name]] = value
        elif name not in _NEEDS_NO_KEY or value != _NEEDS_NO_KEY[name]:
            near = nearest(name, _OF_GENERATE)
            hint = f"; did you mean {near}?" if near else f"; known are {', '.join(_OF_GENERATE)}"
            raise DprlhfError(
                f"generation_kwargs: {name}={value!r} would change what is sampled, and the"
                f" gradient's log-probabilities would not follow{hint}"
            )
    return settings


KEYS = {
    "model_name_or_path": "policy.model_name_or_path",
    "model_revision": "policy.revision",
    "trust_remote_code": "policy.trust_remote_code",
    "dtype": "policy.dtype",
    "torch_dtype": "policy.dtype",
    "attn_implementation": "policy.attn_implementation",
    "lora_r": "policy.adapter.rank",
    "lora_alpha": "policy.adapter.alpha",
    "lora_target_modules": "policy.adapter.target_modules",
    "dataset_name": "data.path",
    "dataset_config": "data.name",
    "dataset_train_split": "data.split",
    "max_prompt_length": "data.max_prompt_tokens",
    "num_generations": "rollout.responses",
    "max_completion_length": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_k": "rollout.top_k",
    "top_p": "rollout.top_p",
    "min_p": "rollout.min_p",
    "mask_truncated_completions": "rollout.mask_truncated",
    "chat_template_kwargs": "policy.chat_template_kwargs",
    "per_device_train_batch_size": "update.batch_size",
    "beta": "kl.beta",
    "learning_rate": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
    "report_to": "tracking.report_to",
    "seed": "seed",
}
"""TRL's names (GRPOConfig, ModelConfig, ScriptArguments), each with the recipe's key."""

INSTEAD = {
    "repetition_penalty": "not offered: give a reward that counts repetition, or --top_p",
    "max_steps": "write rounds=N: a round is one step",
    "num_train_epochs": "write rounds=N: a user takes part in one of them"
    " (privacy.participations), so there is one pass",
    "num_iterations": "write update.epochs=N, with update.name=ppo",
    "gradient_accumulation_steps": "not needed: a round adds up all of its users, whatever"
    " update.batch_size is",
    "generation_batch_size": "write rollout.batch_size=N",
    "per_device_eval_batch_size": "write rollout.batch_size=N",
    "use_peft": "not needed: an adapter is always what is trained (policy.adapter)",
    "use_rslora": "write policy.adapter={type: peft, peft: {peft_type: LORA, use_rslora: true, …}}",
    "use_dora": "write policy.adapter={type: peft, peft: {peft_type: LORA, use_dora: true, …}}",
    "lora_dropout": "there is no dropout",
    "load_in_8bit": "write policy.quantization=int8, without LLM.int8()'s outlier columns",
    "load_in_4bit": "write policy.quantization=nf4 or fp4",
    "bf16": "write policy.dtype=auto or bfloat16",
    "fp16": "write policy.dtype=auto or bfloat16",
    "gradient_checkpointing": "write policy.gradient_checkpointing=true",
    "use_vllm": "write rollout.backend=vllm",
    "epsilon": "in TRL this is the clip range, here update.clip_range=…; the budget is"
    " privacy.epsilon=…",
    "delta": "in TRL this is a clip range; δ of the guarantee is privacy.delta=…",
    "epsilon_high": "the clip range has one width, update.clip_range=…",
    "importance_sampling_level": "write update.name=grpo for token, update.name=pg for sequence",
    "steps_per_generation": "a round's responses serve one step: each further one would be a"
    " release of its own; update.name=ppo takes several inside a user",
    "top_entropy_quantile": "not offered: all tokens of a response count",
    "sync_ref_model": "the reference is the policy with its adapter off",
    "log_completions": "not offered: completions quote private prompts; dprlhf generate shows"
    " public ones",
    "reward_funcs": "write rewards.0.function=MODULE:FUNCTION, such as"
    " dprlhf.rewards.verifiable:math_answer",
    "reward_model_name_or_path": "write rewards.0.classifier=… and rewards.0.label=…",
    "reward_weights": "write rewards.0.weight=…",
    "max_grad_norm": "write update.clip_norm=…: it clips each user, not the sum",
    "optim": "write optimizer.name=sgd, normalized-sgd or adam",
    "adam_beta1": "it is 0.9",
    "adam_beta2": "it is 0.9, since a slower average learns little in few rounds",
    "adam_epsilon": "Adam's epsilon is 1e-8",
    "weight_decay": "there is none",
    "warmup_ratio": "there is none: a run has few rounds",
    "warmup_steps": "there is none: a run has few rounds",
    "eval_steps": "write evaluation.every=N",
    "eval_strategy": "write evaluation.every=N",
    "dataset_test_split": "write evaluation.data.split=…",
    "logging_steps": "not needed: every round is logged",
    "save_steps": "not needed: every round leaves a checkpoint",
    "resume_from_checkpoint": "run: dprlhf resume RUN",
    "push_to_hub": "afterwards run: dprlhf push RUN OWNER/NAME",
    "deepspeed": "refused: it owns the backward pass that per-user gradients are taken from;"
    " torchrun and accelerate launch share the work, also with FSDP",
    "fsdp": "write it into the config of accelerate launch (distributed_type: FSDP)",
}
"""TRL's names that no key of the recipe corresponds to, each with what to do instead."""


COMBINED = {
    "generation_kwargs": "rollout.top_k, rollout.top_p, rollout.stop, …",
    "loss_type": "update.name",
    "scale_rewards": "update.scale_rewards",
}
"""TRL's names whose value decides on the recipe's keys."""

_SCALED = {"group": True, "true": True, "none": False, "false": False}


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe's keys as ``section.key``, with values, for settings by TRL's names.

    >>> settings_of({"num_generations": 4, "generation_kwargs": {"top_k": 20}})
    {'rollout.responses': 4, 'rollout.top_k': 20}
    >>> settings_of({"loss_type": "grpo"})
    {'update.name': 'grpo', 'update.scale_rewards': True}
    """
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if name in KEYS:
            settings[KEYS[name]] = value
        elif name == "generation_kwargs":
            settings |= {f"rollout.{key}": one for key, one in rollout_settings(value).items()}
    if "loss_type" in given:
        named = given.keys() & {"loss_type", "scale_rewards"}
        update = update_settings(**{name: given[name] for name in named})
        settings |= {f"update.{key}": value for key, value in update.items()}
    elif "scale_rewards" in given:  # of the recipe's own update, which it does not choose
        settings["update.scale_rewards"] = _is_scaled(given["scale_rewards"])
    return settings


_BY_RESPONSE = ("grpo", "sapo")
_BY_TOKEN = ("dr_grpo", "dapo", "bnpo", "cispo", "luspo", "vespo")
"""TRL's losses that weigh each response alike, and those that weigh each token."""


def update_settings(loss_type: str = "grpo", scale_rewards: Any = "group") -> dict[str, Any]:
    """Return the section ``update`` that stands for two settings of TRL's ``GRPOConfig``."""
    scaled = _is_scaled(scale_rewards)
    # A step is on-policy, where the importance ratio is 1 and TRL's losses differ in their divisor
    # alone. Some divide by the number of tokens in the batch, which would couple the users: here
    # that is a constant, which the clip norm absorbs.
    if loss_type in _BY_TOKEN:
        return {"name": "pg", "baseline": "group" if scaled else "loo"}
    if loss_type in _BY_RESPONSE:
        return {"name": "grpo", "scale_rewards": scaled}
    raise DprlhfError(
        f"loss_type={loss_type!r}: give one of {', '.join((*_BY_RESPONSE, *_BY_TOKEN))}"
    )


def _is_scaled(scale_rewards: Any) -> bool:
    """Return whether advantages are divided by the spread of a prompt's rewards."""
    scaled = _SCALED.get(str(scale_rewards).lower())
    if scaled is None:
        raise DprlhfError(
            f"scale_rewards={scale_rewards!r}: it divides by the spread of the whole batch, which"
            " would couple the users: write group or none"
        )
    return scaled


def overrides_of(arguments: Sequence[str]) -> list[str]:
    """Return ``section.key=value`` texts; ``--name value`` and ``--name=value`` become such texts.

    >>> overrides_of(["rounds=4", "--model_name_or_path", "gpt2", "--learning-rate=1e-3"])
    ['rounds=4', 'policy.model_name_or_path=gpt2', 'optimizer.learning_rate=1e-3']
    """
    left = iter(arguments)
    overrides: list[str] = []
    combined: dict[str, Any] = {}
    place = 0  # of the last of the settings that decide together: what comes later goes before it
    for argument in left:
        if argument[:2] != "--":
            overrides.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        flag, name = f"--{name}", name.replace("-", "_")
        if name in INSTEAD:
            raise DprlhfError(f"flag '{flag}': {INSTEAD[name]}")
        if name not in KEYS and name not in COMBINED:
            near = nearest(name, [*KEYS, *COMBINED])
            hint = f"; did you mean '--{near}'?" if near else "; write section.key=value"
            raise DprlhfError(f"unknown flag '{flag}'{hint}")
        if not equals:
            value = next(left, "")
            if not value or value.startswith("--"):
                raise DprlhfError(f"flag '{flag}' needs a value")
        if name in KEYS:
            overrides.append(f"{KEYS[name]}={value}")
        elif name == "generation_kwargs":
            overrides += _texts({name: _parsed(value)})
        else:
            combined[name], place = _parsed(value), len(overrides)  # two names, one decision
    return overrides[:place] + _texts(combined) + overrides[place:]


def _texts(given: Mapping[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in settings_of(given).items()]


def _parsed(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError):
        return text  # its setting says what it has to be
