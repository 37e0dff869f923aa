"""What a model may not have: layers that mix users' rows, and hooks of others that see texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from dprlhf.errors import DprlhfError


def mixing_layers(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield each layer whose output for a row depends on other rows, and how it does."""
    config: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is not None:
        method = config.get("quant_method") if isinstance(config, dict) else config.quant_method
        method = getattr(method, "value", method)
        # Other ways of quantising may take a scale from the batch.
        if method != "bitsandbytes":
            yield f"the model ({type(model).__name__})", _SCALES.format(method)
    for path, module in model.named_modules():
        name = f"'{path}' ({type(module).__name__})"
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            yield name, "normalises by the batch"
        # Tokens grouped by expert: a product's shape, and rounding, that all users decide.
        if "experts" in dict(module.named_children()) or "Experts" in type(module).__name__:
            yield name, _EXPERTS
        # LLM.int8() (arXiv 2208.07339): columns in which any token has an outlier.
        if getattr(getattr(module, "state", None), "threshold", 0.0) > 0.0:
            yield name, _OUTLIERS


_EXPERTS = "sends the tokens of a batch through its experts together"
_SCALES = (
    "is quantised by {}, and whether a scale is taken from the batch is not known (bitsandbytes is"
    " known)"
)
_OUTLIERS = (
    "computes a column in 16 bit for all rows where one of them has an outlier (give"
    " BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), or 4 bit)"
)


def refuse_mixing(model: nn.Module, *, alone: bool = False) -> str | None:
    """Refuse a model in which one row's values depend on the other rows of its pass."""
    # Experts are no reason where a pass has one user alone, who then decides its shapes.
    reason = None
    for name, how in mixing_layers(model):
        if not (alone and how == _EXPERTS):
            raise DprlhfError(
                f"{name} mixes the users of a batch: it {how}, so one user's influence cannot be"
                " bounded; choose a model without such layers"
            )
        reason = reason or f"{name} {how}"
    return reason


_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_post_accumulate_grad_hooks",
)

_NEEDED = {
    "accelerate.hooks": "",
    "bitsandbytes": "",
    "dprlhf": "",
    "peft": "",
    "torch.distributed": "",
    "torch.nn.utils": "",  # the norm of weights
    "transformers": "enable_input_require_grads",  # its other hooks are for debugging
}
"""Modules whose hooks stay, with what the name of the function must hold."""


def refuse_foreign_hooks(model: Any, what: str) -> None:
    """Refuse a model with hooks of others, or a program in which torch shows others all it does.

    ``wandb.watch`` puts such hooks, and so do tools that look at activations. Those that
    accelerate, PEFT, transformers and torch's sharding need look at nothing, and stay.
    """
    for place, hook in _foreign(model):
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        raise DprlhfError(
            f"{what}: there is a hook {place} ({name}), as wandb.watch puts: it would see users'"
            " texts before any noise is added. Remove it, or load the model afresh (for W&B:"
            " WANDB_WATCH=false, and report_to)"
        )


def _foreign(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield where there is a hook of others, and the hook."""
    owners = {**dict(model.named_modules()), **dict(model.named_parameters())}
    for owner_name, owner in owners.items():
        hooks = [hook for name in _HOOKS for hook in (getattr(owner, name, None) or {}).values()]
        own = getattr(owner, "_hf_hook", None)  # accelerate calls it around the forward pass
        hooks += getattr(own, "hooks", None) or ([] if own is None else [own])
        for hook in hooks:
            if not _needed(hook):
                yield f"in {owner_name!r}" if owner_name else "in the whole model", hook
    for name in _HOOKS[:-1]:
        for hook in getattr(global_hooks, f"_global{name}").values():
            yield "in all modules of the process (torch.nn.modules.module)", hook
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes += torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    for mode in modes:
        if not type(mode).__module__.startswith("torch.utils._device"):
            yield "on every operation of torch (a mode of torch)", mode
    if saved := torch._C._autograd._top_saved_tensors_default_hooks(True):
        yield "on what torch saves for the backward pass (saved_tensors_hooks)", saved[0]


def _needed(hook: Any) -> bool:
    """Return whether a hook belongs to a library that needs it to compute."""
    hook = getattr(hook, "func", hook)  # of functools.partial
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    module, name = str(named.__module__), str(named.__qualname__)
    return any(
        (module == own or module.startswith(f"{own}.")) and part in name
        for own, part in _NEEDED.items()
    )
