"""The trainable part of the policy: PEFT's low-dimensional adapters, by the name in a recipe.

The norm of a release's noise grows with √d, so what is trained decides utility first. A run stores
its adapter as PEFT does, and ``PeftModel.from_pretrained`` loads it. Which settings an adapter
takes stands in :mod:`dprlhf.recipe.adapters`, which is read without loading torch.

- ``lora``: A and B of LoRA (arXiv 2106.09685). With ``use_dora`` also the magnitudes of DoRA
  (arXiv 2402.09353), which PEFT divides by the norms of the merged weight. These norms follow from
  the current weights, so they are public, and PEFT keeps them constant in the backward pass
  (section 4.3 of the paper): each user's gradient is exact, and a magnitude's is that of a scale.
- ``ffa-lora``: B alone, with A frozen at its random start (FFA-LoRA, arXiv 2403.12313).
- ``lora-xs``: an r × r matrix R between the frozen singular directions of the weight (LoRA-XS,
  arXiv 2405.17604): A holds the right ones, B the left ones times the singular values, R starts at
  zero. PEFT has no such type; it is stored as the LoRA with R A in place of A.
- ``vera``: two vectors in each layer between shared random matrices (arXiv 2310.11454).
- ``ia3``: one scale for each output, or input of a feed-forward layer (arXiv 2205.05638).
- ``norms``: the gains and biases of the norm layers (LN tuning, arXiv 2312.11420).
- ``biases``: a bias for each output of the target layers, whether the model has one there or not
  (compare BitFit, arXiv 2106.10199); stored as a LoRA with ``lora_bias`` whose B stays zero.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dprlhf import recipe
from dprlhf.errors import DprlhfError, one_line
from dprlhf.hardware import forked_rng
from dprlhf.recipe.adapters import ADAPTERS, AdapterType


def add_adapter(
    model: Any, adapter: recipe.Adapter, *, seed: int, task_type: str = "CAUSAL_LM"
) -> Any:
    """Put a new adapter on a model; its trainable weights are in float32 or wider.

    Args:
        model: A transformers model.
        adapter: The recipe's section.
        seed: Seed of random initial weights, which are public.
        task_type: PEFT's task type. With ``SEQ_CLS`` the classification head is trained as well.

    Returns:
        The ``PeftModel``; its parameters that require a gradient are the trained ones.

    Raises:
        DprlhfError: The adapter does not fit the model.
    """
    import peft

    if getattr(model.config, "quantization_config", None) is not None:
        if adapter.use_dora:
            raise DprlhfError("policy.adapter.use_dora does not work with a quantised base model")
        if ADAPTERS[adapter.type].needs_weights:
            raise DprlhfError(
                f"policy.adapter.type {adapter.type} does not work with a quantised base model:"
                " take lora, ffa-lora or biases"
            )
    built = _ADAPTERS[adapter.type]
    with forked_rng(), quiet_peft():
        torch.manual_seed(seed)
        try:
            config = built.config(model, adapter, seed)
            config.task_type = task_type
            if idle := modules_without_part(model):
                config.exclude_modules = rf"({'|'.join(map(re.escape, idle))})(\..*)?"
            adapted = peft.get_peft_model(model, config)
        except (ValueError, TypeError) as error:
            raise DprlhfError(f"policy.adapter: {one_line(error)}") from error
        for name, parameter in adapted.named_parameters():
            if any(part in name for part in built.frozen):
                parameter.requires_grad_(False)
        built.finish(adapted)  # LoRA-XS draws here, too
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    if adapter.use_dora:
        _measure_magnitudes(adapted)
    return adapted


@torch.no_grad()
def modules_without_part(model: Any) -> list[str]:
    """Return the outermost modules with parameters that no pass over text calls.

    Such are the image tower of a model that also reads images, and a projection whose weight
    another module reads by itself. An adapter there would change nothing, and release noise.
    """
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


def taking_off(model: Any) -> Callable[[], None]:
    """Return a function that takes off the adapter that is put on a model after this call.

    PEFT puts its layers into the model that it is given, and freezes the others. A program whose
    model was refused may go on with it as it was.

    Args:
        model: A transformers model without an adapter; for anything else the function does nothing.
    """
    if not isinstance(model, nn.Module) or hasattr(model, "peft_config"):
        return lambda: None
    layers = [(m, name, child) for m in model.modules() for name, child in m.named_children()]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def take_off() -> None:
        for module, name, child in layers:
            setattr(module, name, child)
        for parameter, required in trained:
            if parameter.requires_grad != required:
                parameter.requires_grad_(required)
        vars(model).pop("peft_config", None)

    return take_off


@contextlib.contextmanager
def quiet_peft() -> Iterator[None]:
    """Silence PEFT's warnings, and transformers' to PEFT: about merging, shards, coming names."""
    with warnings.catch_warnings(action="ignore"):
        yield


def stored_state(model: Any) -> dict[str, torch.Tensor]:
    """Return the model's state for ``save_pretrained``, with LoRA-XS written as a plain LoRA."""
    state: dict[str, torch.Tensor] = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, _Core):
            del state[f"{name}.core.weight"], state[f"{name}.directions"]
            state[f"{name}.weight"] = module.weight.detach()
    return state


def check_mergeable(model: Any) -> None:
    """Check that the base model has a place for what the adapter trains, so that it can be merged.

    Args:
        model: A ``PeftModel``, or a model without an adapter.

    Raises:
        DprlhfError: The adapter trains biases of layers that have none.
    """
    from peft.tuners.lora import LoraLayer

    for name, layer in model.named_modules():
        if not (isinstance(layer, LoraLayer) and layer.lora_bias.get("default")):
            continue
        if getattr(layer.get_base_layer(), "bias", None) is None:
            raise DprlhfError(
                "policy.adapter.type biases: the next stage starts from a merged model, and"
                f" {name!r} has no bias of its own to merge into; choose other target_modules, or"
                " another adapter"
            )


def _lora(model: Any, adapter: recipe.Adapter, seed: int) -> Any:
    import peft

    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=0.0,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        target_modules=_projections(model, adapter, "LORA"),
        layers_to_transform=_layers(model, adapter.layers),
        fan_in_fan_out=_fan_in_fan_out(model),
    )


def _biases(model: Any, adapter: recipe.Adapter, seed: int) -> Any:
    config = _lora(model, adapter, seed)
    config.lora_bias = True
    return config


def _vera(model: Any, adapter: recipe.Adapter, seed: int) -> Any:
    import peft

    return peft.VeraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        projection_prng_key=seed,
        target_modules=_projections(model, adapter, "VERA"),
        layers_to_transform=_layers(model, adapter.layers),
        fan_in_fan_out=_fan_in_fan_out(model),
    )


def _ia3(model: Any, adapter: recipe.Adapter, seed: int) -> Any:
    import peft
    from peft.utils import constants

    kind = model.config.model_type
    defaults = constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING
    feedforward = constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING.get(kind, [])
    targets = _named(model, adapter, defaults.get(kind))
    return peft.IA3Config(
        task_type="CAUSAL_LM",
        target_modules=targets,
        feedforward_modules=[t for t in targets if t.endswith(tuple(feedforward))],
        fan_in_fan_out=_fan_in_fan_out(model),
    )


def _norms(model: Any, adapter: recipe.Adapter, seed: int) -> Any:
    import peft

    norms = [n for n, module in model.named_modules() if type(module).__name__.endswith("Norm")]
    kinds = sorted({name.rpartition(".")[2] for name in norms})
    targets = _named(model, adapter, kinds)
    if not set(targets) <= set(norms):
        raise DprlhfError(
            "policy.adapter: norms trains norm layers alone, and target_modules"
            f" {adapter.target_modules} names others: choose from [{', '.join(kinds)}]"
        )
    return peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=targets)


class _Core(nn.Module):
    """LoRA-XS: the trained core R after a frozen A, in place of PEFT's lora_A; x ↦ R (A x)."""

    def __init__(self, directions: torch.Tensor) -> None:
        super().__init__()
        self.directions = nn.Parameter(directions, requires_grad=False)
        rank = len(directions)
        self.core = nn.Linear(rank, rank, bias=False, device=directions.device)
        nn.init.zeros_(self.core.weight)

    @property
    def weight(self) -> torch.Tensor:
        return self.core.weight @ self.directions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.core(nn.functional.linear(x, self.directions))  # type: ignore[no-any-return]


@torch.no_grad()
def _to_lora_xs(model: Any) -> None:
    from peft.tuners.lora import LoraLayer

    for layer in [m for m in model.modules() if isinstance(m, LoraLayer)]:
        if "default" not in layer.lora_A:
            raise DprlhfError(
                "policy.adapter.target_modules: lora-xs adapts linear layers, and a target is"
                f" {type(layer.get_base_layer()).__name__}: leave it out, or take lora"
            )
        weight = layer.get_base_layer().weight.float()
        weight = weight.T if getattr(layer, "fan_in_fan_out", False) else weight
        rank = layer.r["default"]
        if rank > min(weight.shape):
            raise DprlhfError(
                f"policy.adapter.rank {rank} is more than a target layer of shape"
                f" {tuple(weight.shape)} has singular directions"
            )
        oversampled = min(2 * rank + 8, *weight.shape)
        left, singular, right = torch.svd_lowrank(weight, q=oversampled, niter=20)
        layer.lora_A["default"] = _Core(right[:, :rank].T.contiguous())
        layer.lora_B["default"].weight.copy_(left[:, :rank] * singular[:rank])
        layer.lora_B["default"].requires_grad_(False)


@torch.no_grad()
def _measure_magnitudes(model: Any) -> None:
    """Set DoRA's magnitudes to the norms as the forward pass computes them.

    PEFT takes them in the base's data type, where rounding would move the policy from the base.
    """
    from peft.tuners.lora import LoraLayer

    layers = [m for m in model.modules() if isinstance(m, LoraLayer)]
    for layer in [m for m in layers if "default" in m.lora_A]:  # an embedding is refused later
        layer.lora_magnitude_vector["default"].update_layer(
            base_layer=layer.get_base_layer(),
            lora_A=layer.lora_A["default"].weight,
            lora_B=layer.lora_B["default"].weight,
            scaling=layer.scaling["default"],
        )


def _keep_dtype(model: Any) -> None:
    for name, module in model.named_modules():
        if name.endswith(".ln_tuning_layers.default"):
            module.register_forward_hook(_as_input)


def _as_input(module: nn.Module, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> Any:
    """Cast a norm layer's output to its input's data type, because its trained gain is float32."""
    return out.to(inputs[0].dtype)


def _as_it_is(model: Any) -> None:
    """Leave PEFT's model as it is."""


@dataclass(frozen=True)
class _Adapter:
    """How one kind of adapter is built.

    Attributes:
        config: Makes the PEFT configuration from the model, the recipe's section and the seed.
        frozen: Parts of the names of PEFT's trainable parameters that are frozen here.
        finish: Changes the ``PeftModel`` in place after PEFT has made it.
    """

    config: Callable[[Any, recipe.Adapter, int], Any]
    frozen: tuple[str, ...] = ()
    finish: Callable[[Any], None] = _as_it_is


_ADAPTERS: dict[AdapterType, _Adapter] = {
    "lora": _Adapter(_lora),
    "ffa-lora": _Adapter(_lora, frozen=(".lora_A.",)),
    "lora-xs": _Adapter(_lora, finish=_to_lora_xs),
    "vera": _Adapter(_vera),
    "ia3": _Adapter(_ia3),
    "norms": _Adapter(_norms, finish=_keep_dtype),
    "biases": _Adapter(_biases, frozen=(".lora_A.", ".weight")),
}


def _fan_in_fan_out(model: Any) -> bool:
    return bool(model.config.model_type == "gpt2")


_QUERY_AND_VALUE = (
    ("q_proj", "v_proj"), ("query", "value"), ("q_lin", "v_lin"), ("qkv_proj",),
    ("query_key_value",), ("c_attn",), ("Wqkv",),
)  # fmt: skip
"""Names of the query and value projections, which LoRA adapts, alone or fused with the keys'."""


def _projections(model: Any, adapter: recipe.Adapter, kind: str) -> list[str] | str | None:
    """Return the target modules; None where PEFT has a choice for the architecture.

    Raises:
        DprlhfError: Neither PEFT nor the names of the model's layers say what to adapt.
    """
    from peft.utils import constants

    known = getattr(constants, f"TRANSFORMERS_MODELS_TO_{kind}_TARGET_MODULES_MAPPING")
    layers = _linear_names(model)
    if adapter.target_modules == "all-linear" and adapter.layers is not None:
        # PEFT takes the word without layers only.
        return _linear_names(model, without=model.get_output_embeddings())
    if adapter.target_modules is not None or model.config.model_type in known:
        return adapter.target_modules
    for names in _QUERY_AND_VALUE:
        if set(names) <= set(layers):
            return list(names)
    raise DprlhfError(
        f"policy.adapter.target_modules: name the layers to adapt of a model of type"
        f" {model.config.model_type}, some of [{', '.join(layers)}], or all-linear"
    )


def _named(model: Any, adapter: recipe.Adapter, defaults: list[str] | None) -> list[str]:
    """Return the target modules by their full names, in the layers asked for."""
    wanted = adapter.target_modules or defaults
    if wanted is None:
        raise DprlhfError(
            f"policy.adapter: {adapter.type} needs target_modules for a model of type"
            f" {model.config.model_type}, such as [{', '.join(_linear_names(model)[:3])}]"
        )
    ends = tuple([wanted] if isinstance(wanted, str) else wanted)
    layers = _layers(model, adapter.layers)
    found = [
        name
        for name, _ in model.named_modules()
        if any(name == end or name.endswith(f".{end}") for end in ends)
        and (layers is None or any(f".{layer}." in name for layer in layers))
    ]
    if not found:
        raise DprlhfError(
            f"policy.adapter.target_modules {list(ends)}: the model has no such modules"
            + (" in these layers" if layers else "")
        )
    return found


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
