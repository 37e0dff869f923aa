"""Per-user copies of the trainable layers, evaluated together in one batched pass.

Inside :func:`local_copies` every trainable layer multiplies a user's rows by that user's weight, in
one batched product; a batch has the same number of rows for each user. Frozen layers see an
ordinary batch, and autograd returns each copy's gradient. A batched product does not mix its
members: a copy that overflows affects no other user's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dprlhf.errors import DprlhfError


@contextlib.contextmanager
def local_copies(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], moves: torch.Tensor, rows: int
) -> Iterator[None]:
    """Use the parameters θ + moves[u] for the rows of user u in every batch of the context."""
    sizes = [p.numel() for p in parameters.values()]
    pieces = zip(parameters.items(), torch.split(moves, sizes, dim=1), strict=True)
    with contextlib.ExitStack() as stack:
        for (name, parameter), piece in pieces:
            weights = parameter + piece.view(-1, *parameter.shape)
            layer = linear_layer(model, name)
            # Not a hook: it would run after the layer's own product, whose result is not needed.
            stack.callback(setattr, layer, "forward", layer.forward)
            layer.forward = _of_copies(name, layer, weights, rows)  # type: ignore[method-assign]
        yield


def linear_layer(model: nn.Module, name: str) -> nn.Linear:
    """Return the linear layer that a parameter is the weight of."""
    path, _, local = name.rpartition(".")
    layer = model.get_submodule(path)
    if not isinstance(layer, nn.Linear) or local != "weight":
        raise DprlhfError(
            f"'{name}' ({type(layer).__name__}) cannot be trained by update.name: ppo, which copies"
            " the weights of LoRA for each user; use policy.adapter.type: lora or ffa-lora, or"
            " update.name: pg"
        )
    return layer


def _of_copies(name: str, layer: nn.Linear, weights: torch.Tensor, rows: int) -> Any:
    users, plain = len(weights), layer.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if len(x) != rows:
            if x.shape[:-1].numel() == 1:
                return plain(x)
            raise DprlhfError(
                f"'{name}' does not get a batch's rows first, so users cannot be told apart; leave"
                " it frozen"
            )
        product = (x.reshape(users, -1, x.shape[-1]) @ weights.mT).view(*x.shape[:-1], -1)
        return product if layer.bias is None else product + layer.bias

    return forward
