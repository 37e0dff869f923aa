"""Layers that mix the rows of a pass: a pass has one user, or no user's influence is bounded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

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
