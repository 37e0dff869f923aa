"""PEFT's configs, read as the section ``policy.adapter`` of a recipe."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from dprlhf.errors import DprlhfError

_COMMON = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path",
    "inference_mode", "revision", "runtime_config",
}  # fmt: skip
_OF_LORA = _COMMON | {
    "r", "lora_alpha", "target_modules", "layers_to_transform",
    "lora_dropout",  # off, as all dropout is: it would be a second source of randomness
    "fan_in_fan_out", "megatron_core", "loftq_config",
}  # fmt: skip
"""The settings of a ``LoraConfig`` that the type ``lora`` has, or that follow from the model."""


def adapter_of(peft_config: Any, *, freeze_a: bool = False) -> dict[str, Any]:
    """Return the section ``policy.adapter`` that stands for a PEFT config."""
    if isinstance(peft_config, Mapping):
        return dict(peft_config)
    name = type(peft_config).__name__
    if not hasattr(peft_config, "peft_type"):
        raise DprlhfError(f"peft_config: give a PEFT config such as LoraConfig, not a {name}")
    kind = str(getattr(peft_config.peft_type, "value", peft_config.peft_type))
    changed = _changed(peft_config)
    others = sorted(set(changed) - _OF_LORA)
    if kind == "LORA" and not others:
        layers, modules = peft_config.layers_to_transform, peft_config.target_modules
        return {
            "type": "ffa-lora" if freeze_a else "lora",
            "target_modules": sorted(modules)
            if isinstance(modules, list | tuple | set)
            else modules,
            "rank": peft_config.r,
            "layers": [layers] if isinstance(layers, int) else layers,
            "alpha": peft_config.lora_alpha,
        }
    if freeze_a:
        what = f"{others[0]} of a LoraConfig" if kind == "LORA" else f"a {name}"
        raise DprlhfError(f"peft_config: A is frozen in a plain LoraConfig, not with {what}")
    fields = {key: _plain(value) for key, value in changed.items() if key not in _COMMON}
    return {"type": "peft", "peft": {"peft_type": kind, **fields}}


def _changed(config: Any) -> dict[str, Any]:
    """Return the settings that are not at their default."""
    changed = {}
    for field in dataclasses.fields(config):
        default = field.default
        if callable(field.default_factory):
            default = field.default_factory()
        if (value := getattr(config, field.name)) != default:
            changed[field.name] = value
    return changed


def _plain(value: Any) -> Any:
    """Return a value as a recipe, which is YAML, can hold it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: _plain(one) for key, one in dataclasses.asdict(value).items()}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, dict) else value
