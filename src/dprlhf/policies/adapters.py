"""The trainable part of the policy: an adapter of PEFT, by the name in a recipe.

``lora``: A and B of LoRA (arXiv 2106.09685). With ``use_dora`` also the magnitudes of DoRA (arXiv
2402.09353), which PEFT divides by the norms of the merged weight. These follow from the current
weights, so they are public, and are constant in the backward pass (section 4.3 of the paper): each
user's gradient is exact. ``ffa-lora``: B alone, with A frozen at its random start (arXiv
2403.12313). ``peft``: whatever a configuration of PEFT trains, if need be with one user a pass.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from dprlhf import recipe
from dprlhf.errors import DprlhfError, one_line
from dprlhf.hardware import forked_rng


def add_adapter(
    model: Any, adapter: recipe.Adapter, *, seed: int, task_type: str = "CAUSAL_LM"
) -> Any:
    """Put a new adapter on a model; its trainable weights are in float32 or wider."""
    import peft

    if adapter.peft and getattr(model.config, "quantization_config", None) is not None:
        raise DprlhfError(
            "policy.adapter.type peft does not work with a quantised base model: take lora or"
            " ffa-lora"
        )
    with forked_rng(), quiet_peft():
        torch.manual_seed(seed)
        try:
            if adapter.peft:
                from dprlhf.policies.given import config_of

                config = config_of(adapter.peft, model)
            else:
                config = _lora(model, adapter)
            config.task_type = task_type
            if idle := modules_without_part(model):
                excluded = rf"({'|'.join(map(re.escape, idle))})(\..*)?"
                config.exclude_modules = getattr(config, "exclude_modules", None) or excluded
            with tempfile.TemporaryDirectory() as folder:  # what PEFT cannot load is no result
                config.save_pretrained(folder)
                peft.PeftConfig.from_pretrained(folder)
            adapted = peft.get_peft_model(model, config)
            if adapter.peft:  # some layers fail as they are called, such as GPT-2's with OLoRA
                with torch.no_grad():
                    adapted(input_ids=torch.ones(1, 4, dtype=torch.long, device=adapted.device))
        except DprlhfError:
            raise
        except Exception as error:
            if adapter.peft is None and not isinstance(error, ValueError | TypeError):
                raise
            raise DprlhfError(f"policy.adapter: {one_line(error)}") from error
    for name, parameter in adapted.named_parameters():
        if adapter.type == "ffa-lora" and ".lora_A." in name:
            parameter.requires_grad_(False)
        if adapter.type == "ffa-lora" and ".lora_embedding_A." in name:
            raise DprlhfError(
                "policy.adapter.type ffa-lora: an embedding's A starts at zero, and would stay"
                " there: leave embeddings out of target_modules, or take lora"
            )
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    _keep_dtypes(adapted)
    if (adapter.peft or {}).get("use_dora"):
        _measure_magnitudes(adapted)
    return adapted


@torch.no_grad()
def modules_without_part(model: Any) -> list[str]:
    """Return the outermost modules with parameters that no pass over text calls (image towers)."""
    # An adapter there would change nothing, and release noise.
    called: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: called.add(name))
        for name, module in model.named_modules()
    ]
    try:
        model(input_ids=torch.ones(1, 2, dtype=torch.long, device=next(model.parameters()).device))
    except Exception:  # such as one that needs more than tokens: where it is used tells the reason
        return []
    finally:
        for hook in hooks:
            hook.remove()
    parts = [name.split(".") for name in called]
    reached = {".".join(part[:count]) for part in parts for count in range(len(part) + 1)}
    return [
        name
        for name, module in model.named_modules()
        if name not in reached
        and name.rpartition(".")[0] in reached
        and next(module.parameters(), None) is not None
    ]


def adapter_rollback(model: Any) -> Callable[[], None]:
    """Return a function that takes off the adapter that is put on a model after this call."""
    # PEFT changes and freezes the model; a program whose model was refused may go on with it.
    if not isinstance(model, nn.Module):
        return lambda: None
    own = vars(model).get("peft_config")
    layers = [(m, name, child) for m in model.modules() for name, child in m.named_children()]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def take_off() -> None:
        for module, name, child in layers:
            setattr(module, name, child)
        for parameter, required in trained:
            if parameter.requires_grad != required:
                parameter.requires_grad_(required)
        vars(model).pop("peft_config", None)
        if own is not None:
            vars(model)["peft_config"] = own

    return take_off


def fresh_lora(model: Any) -> Any:
    """Return the config of a ``PeftModel``'s only adapter, if a LoRA that changes nothing yet."""
    config = next(iter(model.peft_config.values()))
    layers = [module for module in model.modules() if hasattr(module, "get_delta_weight")]
    beside = ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices")
    plain = len(model.peft_config) == 1 and str(config.peft_type.value) == "LORA"
    if not plain or any(getattr(config, name, None) for name in beside):
        return None
    deltas = (layer.get_delta_weight(name) for layer in layers for name in layer.active_adapters)
    return None if any(bool(delta.any()) for delta in deltas) else config


@contextlib.contextmanager
def quiet_peft() -> Iterator[None]:
    """Silence PEFT's warnings, and transformers' to PEFT: about merging, shards, coming names."""
    with warnings.catch_warnings(action="ignore"):
        yield


def base_is_its_start(model: Any) -> bool:
    """Return whether the base policy is the model at its start, not without its adapter."""
    config = getattr(model, "peft_config", {}).get("default")
    return config is None or getattr(config, "init_lora_weights", True) in INTO_ITSELF


@torch.no_grad()
def merged(tuned: Any) -> tuple[Any, bool]:
    """Return a ``PeftModel``'s base with the adapter merged, and whether its logits stayed."""
    probe = torch.arange(1, 17)[None] % tuned.config.get_text_config().vocab_size
    with quiet_peft():
        wanted = tuned(input_ids=probe).logits
        with tuned.disable_adapter():
            untuned = tuned(input_ids=probe).logits
        plain = tuned.merge_and_unload()
    # A merge that drops some of the adapter's weights loses a large part of the adapter's change.
    off = (plain(input_ids=probe).logits - wanted).abs().max()
    allowed = 0.05 * (wanted - untuned).abs().max() + 1e-5 * wanted.abs().max()
    return plain, bool(off <= allowed)


def _lora(model: Any, adapter: recipe.Adapter) -> Any:
    import peft

    return peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=0.0,
        target_modules=_projections(model, adapter),
        layers_to_transform=_layers(model, adapter.layers),
        fan_in_fan_out=model.config.model_type == "gpt2",
    )


INTO_ITSELF = ("pissa", "olora", "loftq")
"""Starts for which PEFT takes the adapter's product away from the base weights."""


@torch.no_grad()
def _measure_magnitudes(model: Any) -> None:
    """Set DoRA's magnitudes to the norms as the forward pass computes them."""
    # PEFT takes them in the base's data type, where rounding would move the policy from the base.
    from peft.tuners.lora import LoraLayer

    layers = [m for m in model.modules() if isinstance(m, LoraLayer)]
    for layer in [m for m in layers if "default" in m.lora_A]:  # an embedding is refused later
        layer.lora_magnitude_vector["default"].update_layer(
            base_layer=layer.get_base_layer(),
            lora_A=layer.lora_A["default"].weight,
            lora_B=layer.lora_B["default"].weight,
            scaling=layer.scaling["default"],
        )


def _keep_dtypes(adapted: Any) -> None:
    """Let the copies of modules that PEFT trains compute in float32 within a half model."""
    frozen = {p.dtype for p in adapted.parameters() if not p.requires_grad}
    narrow = frozen & {torch.bfloat16, torch.float16}
    if not narrow:
        return

    def widen(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        own = next(module.parameters()).dtype
        return tuple(x.to(own) if torch.is_floating_point(x) else x for x in inputs)

    def narrowed(module: nn.Module, inputs: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
        return out.to(next(iter(narrow)))

    for name, module in adapted.named_modules():
        if name.endswith((".modules_to_save.default", ".ln_tuning_layers.default")):
            module.register_forward_pre_hook(widen)
            module.register_forward_hook(narrowed)


_QUERY_AND_VALUE = (
    ("q_proj", "v_proj"), ("query", "value"), ("q_lin", "v_lin"), ("qkv_proj",),
    ("query_key_value",), ("c_attn",), ("Wqkv",),
)  # fmt: skip
"""Names of the query and value projections, which LoRA adapts, alone or fused with the keys'."""


def _projections(model: Any, adapter: recipe.Adapter) -> list[str] | str | None:
    """Return the target modules; None where PEFT has a choice for the architecture."""
    from peft.utils import constants

    known = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    layers = _linear_names(model)
    if adapter.target_modules == "all-linear" and adapter.layers is not None:
        # PEFT takes the word without layers only.
        return _linear_names(model, without=model.get_output_embeddings())
    if adapter.target_modules is not None or model.config.model_type in known:
        return adapter.target_modules or known[model.config.model_type]
    for names in _QUERY_AND_VALUE:
        if set(names) <= set(layers):
            return list(names)
    raise DprlhfError(
        f"policy.adapter.target_modules: name the layers to adapt of a model of type"
        f" {model.config.model_type}, some of [{', '.join(layers)}], or all-linear"
    )


def _linear_names(model: Any, without: nn.Module | None = None) -> list[str]:
    from transformers.pytorch_utils import Conv1D

    linear = nn.Linear | Conv1D
    names = [n for n, m in model.named_modules() if isinstance(m, linear) and m is not without]
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _layers(model: Any, asked: list[int] | None) -> list[int] | None:
    if asked is None:
        return None
    count = model.config.get_text_config().num_hidden_layers
    for layer in asked:
        if not -count <= layer < count:
            raise DprlhfError(f"policy.adapter.layers: {layer}, but the model has {count} layers")
    return [layer % count for layer in asked]
