"""Layers that mix the rows of a batch, with which no user's influence can be bounded."""

from __future__ import annotations

from torch import nn

from dprlhf.errors import DprlhfError


def mixing_layer(model: nn.Module) -> tuple[str, str] | None:
    """Return the path of a layer whose output for a row depends on other rows, and how it does.

    Batch norm normalises by the batch. A mixture of experts groups the tokens of a batch by expert:
    a matrix product then has a shape, and with it a rounding, that all users decide together.

    Args:
        model: Any module; its submodules are looked at, too.

    Returns:
        The layer's path with its class, and the end of a sentence about it; None without such a
        layer.
    """
    for path, module in model.named_modules():
        name = f"'{path}' ({type(module).__name__})"
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return name, "normalises by the batch"
        if "experts" in dict(module.named_children()) or "Experts" in type(module).__name__:
            return name, "sends the tokens of a batch through its experts together"
    return None


def refuse_mixing(model: nn.Module) -> None:
    """Refuse a model in which one row's values depend on the other rows of its batch.

    Raises:
        DprlhfError: It has such a layer; the message names it.
    """
    if found := mixing_layer(model):
        name, how = found
        raise DprlhfError(
            f"{name} mixes the users of a batch: it {how}, so one user's influence cannot be"
            " bounded; choose a model without such layers"
        )
