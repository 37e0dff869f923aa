"""PEFT's configs, read as the section ``policy.adapter`` of a recipe."""

from __future__ import annotations

import dataclasses
from typing import Any

from dprlhf.errors import DprlhfError

_COMMON = "task_type peft_type auto_mapping peft_version base_model_name_or_path inference_mode"
_TAKEN = {
    # Dropout is off, as all dropout is: it would be a second source of randomness.
    "LORA": "r lora_alpha use_rslora use_dora target_modules layers_to_transform lora_dropout"
    " revision fan_in_fan_out runtime_config megatron_core loftq_config",
    "IA3": "target_modules feedforward_modules fan_in_fan_out revision",
    "LN_TUNING": "target_modules revision",
    "VERA": "r target_modules layers_to_transform vera_dropout fan_in_fan_out save_projection"
    " revision",
}
"""The settings of each kind that are taken, or that the adapter decides from the model itself."""

_REASONS = {
    "modules_to_save": "it would train whole modules; without peft_config all weights are trained",
    "bias": "an adapter of its own: LNTuningConfig, or a recipe's policy.adapter.type: biases",
    "lora_bias": "an adapter of its own: a recipe's policy.adapter.type: biases",
    "rank_pattern": "all modules have one rank",
    "alpha_pattern": "all modules have one alpha",
    "target_parameters": "name modules in target_modules",
    "exclude_modules": "name the modules to adapt in target_modules",
    "layer_replication": "layers are adapted where they are",
    "trainable_token_indices": "tokens are not adapted",
    "init_lora_weights": "A starts at random and B at zero; for directions from public text, see"
    " policy.adapter.init: public-activations of a recipe",
    "projection_prng_key": "the trainer's seed draws the projections",
    "d_initial": "the scales start as in PEFT's default",
}


def adapter_of(peft_config: Any, *, freeze_a: bool = False) -> dict[str, Any]:
    """Return the section ``policy.adapter`` that stands for a PEFT config.

    Args:
        peft_config: A ``LoraConfig``, ``IA3Config``, ``LNTuningConfig`` or ``VeraConfig``; None for
            full fine-tuning, as in TRL.
        freeze_a: Train B of a LoRA alone, with A frozen at its random start (FFA-LoRA, arXiv
            2403.12313).

    Raises:
        DprlhfError: The config asks for something that the gradient engine does not train.
    """
    if peft_config is None:
        if freeze_a:
            raise DprlhfError("peft_config: a LoRA whose A is frozen needs a LoraConfig")
        return {"type": "full"}
    name = type(peft_config).__name__
    if not hasattr(peft_config, "peft_type"):
        raise DprlhfError(f"peft_config: give a PEFT config such as LoraConfig, not a {name}")
    kind = str(getattr(peft_config.peft_type, "value", peft_config.peft_type))
    if kind not in _TAKEN:
        raise DprlhfError(
            f"peft_config: {name} is not trained privately: use LoraConfig, IA3Config,"
            " LNTuningConfig or VeraConfig"
        )
    if freeze_a and kind != "LORA":
        raise DprlhfError(f"peft_config: {name} has no A to freeze: use LoraConfig")
    for setting in _changed(peft_config, {*_COMMON.split(), *_TAKEN[kind].split()}):
        reason = _REASONS.get(setting, "the gradient engine does not know this variant")
        given = getattr(peft_config, setting)
        raise DprlhfError(f"peft_config: {setting}={given!r} is not offered: {reason}")
    found: dict[str, Any] = {"target_modules": _modules(peft_config)}
    if kind in ("LORA", "VERA"):
        found |= {"rank": peft_config.r, "layers": _layers(peft_config)}
    if kind == "LORA":
        found["alpha"] = peft_config.lora_alpha
        found |= {name: getattr(peft_config, name) for name in ("use_rslora", "use_dora")}
    types = {"LORA": "ffa-lora" if freeze_a else "lora", "IA3": "ia3", "LN_TUNING": "norms"}
    return {"type": types.get(kind, "vera"), **found}


def _changed(config: Any, known: set[str]) -> list[str]:
    """Return the settings outside ``known`` that are not at their default."""
    changed = []
    for field in dataclasses.fields(config):
        default = field.default
        if callable(field.default_factory):
            default = field.default_factory()
        if field.name not in known and getattr(config, field.name) != default:
            changed.append(field.name)
    return changed


def _modules(config: Any) -> list[str] | str | None:
    modules = config.target_modules
    return sorted(modules) if isinstance(modules, set | list | tuple) else modules


def _layers(config: Any) -> list[int] | None:
    layers = config.layers_to_transform
    return [layers] if isinstance(layers, int) else layers
