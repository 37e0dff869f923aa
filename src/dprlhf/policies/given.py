"""What a program gives in place of names: model, tokenizer, PEFT's and bitsandbytes' configs."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import torch

from dprlhf.errors import DprlhfError, extra
from dprlhf.policies.refusals import refuse_foreign_hooks

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


_REFUSED = {
    "XLORA": "it mixes trained adapters, which have to come from somewhere",
    "POLY": "it needs the number of a task with each row",
    "ADAPTION_PROMPT": "its learnt tokens stand beside a prompt, which sampling does not know",
}
_FROM_DATA = ("eva", "corda", "lora_ga")


def config_of(fields: dict[str, Any], model: Any) -> Any:
    """Return the PEFT configuration with these fields, unless it could not be trained."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    types = {str(kind.value): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    name = str(fields["peft_type"]).upper()
    if name not in types:
        raise DprlhfError(
            f"policy.adapter.peft: peft_type {name} is unknown to PEFT; it has"
            f" {', '.join(sorted(types))}"
        )
    config = types[name](**{key: value for key, value in fields.items() if key != "peft_type"})
    if isinstance(start := getattr(config, "init_lora_weights", None), str):
        config.init_lora_weights = start.lower()  # as PEFT reads it
    reason = _REFUSED.get(name)
    if config.is_prompt_learning:
        reason = "its learnt tokens stand before a prompt, which sampling does not know: take LORA"
    elif getattr(config, "alora_invocation_tokens", None):
        reason = "alora_invocation_tokens decides by the text before, which sampling does not know"
    elif getattr(config, "layer_replication", None):
        reason = "layer_replication makes another base model"
    elif getattr(config, "bias", "none") != "none":
        reason = "bias trains weights of the base, which stay without the adapter: leave it out"
    elif getattr(config, "ensure_weight_tying", False):
        reason = "ensure_weight_tying adapts a layer that PEFT does not save: leave it out"
    elif "_niter_" in str(getattr(config, "init_lora_weights", True)):
        reason = (
            f"init_lora_weights {config.init_lora_weights} is drawn again at loading: take pissa"
        )
    elif getattr(config, "init_lora_weights", True) in _FROM_DATA:
        reason = (
            f"init_lora_weights {config.init_lora_weights} reads data; policy.adapter.type lora has"
            " init: public-activations for that"
        )
    elif name == "ADALORA" and config.target_r != config.init_r:
        reason = "it prunes ranks by users' gradients: set target_r to init_r, which prunes nothing"
    if reason is not None:
        raise DprlhfError(f"policy.adapter.peft: {name} is not trained: {reason}")
    for field in vars(config):
        if "dropout" in field and isinstance(getattr(config, field), float):
            setattr(config, field, 0.0)  # it would be a second source of randomness
    if hasattr(config, "fan_in_fan_out"):
        config.fan_in_fan_out = model.config.model_type == "gpt2"
    config.inference_mode = False
    return config


def quantization_config(name: str, dtype: torch.dtype) -> Any:
    """Return transformers' ``BitsAndBytesConfig`` of a recipe's ``policy.quantization``.

    A quantised layer dequantises its weight and multiplies, so a row's output depends on that row
    alone; LLM.int8()'s columns of outliers do not, and are switched off
    (:mod:`dprlhf.policies.refusals`). The trained adapter stays in float32 beside it.
    """
    from transformers import BitsAndBytesConfig

    with extra("quantization", "policy.quantization"):
        import bitsandbytes  # noqa: F401 - transformers uses it
    if name == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    kind, _, double = name.partition("-")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=bool(double),
        bnb_4bit_compute_dtype=dtype,
    )


def quantization_of(config: Any) -> dict[str, str]:
    """Return the keys of a recipe's section ``policy`` that stand for a ``BitsAndBytesConfig``."""
    if config is None:
        return {}
    if getattr(config, "load_in_8bit", False):
        if config.llm_int8_threshold:
            raise DprlhfError(
                "quantization_config: LLM.int8() computes a column in 16 bit for all rows of a"
                " batch where one of them has an outlier, which would couple the users: give"
                " llm_int8_threshold=0.0, or load_in_4bit=True"
            )
        return {"quantization": "int8"}
    if not getattr(config, "load_in_4bit", False):
        raise DprlhfError(
            f"quantization_config: a {type(config).__name__} is not offered: give"
            " BitsAndBytesConfig(load_in_4bit=True), or load_in_8bit=True, llm_int8_threshold=0.0"
        )
    double = "-double" if config.bnb_4bit_use_double_quant else ""
    dtype = str(config.bnb_4bit_compute_dtype).removeprefix("torch.")
    return {"quantization": config.bnb_4bit_quant_type + double, "dtype": dtype}


def check_given(model: Any, tokenizer: Any, *, whole: bool) -> None:
    """Refuse objects that no policy can be made of; None stands for what was not given."""
    if hasattr(model, "peft_config"):
        raise DprlhfError(
            "model: it has an adapter already: load the base model afresh, as to continue a run;"
            " or merge it (merge_and_unload()) to build on it, and say what to train"
        )
    if isinstance(tokenizer, str):
        raise DprlhfError(
            f"processing_class={tokenizer!r}: give the tokenizer, such as"
            f" AutoTokenizer.from_pretrained({tokenizer!r}); None takes the model's own"
        )
    if hasattr(tokenizer, "tokenizer"):
        raise DprlhfError("processing_class: prompts are text here: give the processor's tokenizer")
    if tokenizer is not None and not hasattr(tokenizer, "pad_token_id"):
        raise DprlhfError(
            f"processing_class: give a tokenizer of transformers, not a {type(tokenizer).__name__}"
        )
    if model is not None:
        refuse_foreign_hooks(model, "model")
        _check_model(model, whole=whole)
    if model is not None and tokenizer is None and not model.config._name_or_path:
        raise DprlhfError(
            "processing_class: a model that was not loaded from a hub id or a folder does not say"
            " which tokenizer it has: give it"
        )


def _check_model(model: Any, *, whole: bool) -> None:
    """Refuse an object that is no causal language model, is spread over devices, or is frozen."""
    if model.config.is_encoder_decoder or not hasattr(model, "prepare_inputs_for_generation"):
        raise DprlhfError(
            f"model: a {type(model).__name__} is no causal language model: load it with"
            " AutoModelForCausalLM"
        )
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise DprlhfError(
            "model: it was made inside torch.inference_mode(), so that it takes no gradients: make"
            " it outside"
        )
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(places) > 1 or "disk" in places:
        raise DprlhfError(
            f"model: device_map spread it over {', '.join(sorted(places))}: load it without"
            " device_map; a large one is shared out among GPUs by accelerate launch with"
            " distributed_type: FSDP, or loaded in 4 bit (policy.quantization)"
        )
    if whole:
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        if 0 < len(frozen) < sum(1 for _ in model.parameters()):
            raise DprlhfError(
                f"model: {len(frozen)} of its parameters are frozen ({frozen[0]}, …), and without"
                " an adapter all weights are trained: say what to train with an adapter"
                " (peft_config), or unfreeze them (model.requires_grad_(True))"
            )
