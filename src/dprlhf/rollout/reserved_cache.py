"""A key-value cache in reserved memory: transformers' own copies all of it at every step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import DynamicLayer


class ReservedLayer(DynamicLayer):  # type: ignore[misc]
    """A layer's keys and values, ``[rows, heads, places, size]``, with room for further places."""

    def __init__(self, layer: DynamicLayer, more: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True
        self._room = [F.pad(x, (0, 0, 0, more)) for x in (layer.keys, layer.values)]
        self._show(layer.keys.shape[2])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values behind those that are there, and return all of them as views."""
        start, more = self.keys.shape[2], key_states.shape[2]
        self._show(start + more)
        self.keys[:, :, start:], self.values[:, :, start:] = key_states, value_states
        return self.keys, self.values

    def _show(self, places: int) -> None:
        if places > self._room[0].shape[2]:
            raise ValueError(f"{places} places where {self._room[0].shape[2]} are reserved")
        self.keys, self.values = (room[:, :, :places] for room in self._room)


def reserve(cache: Any, more: int) -> None:
    """Reserve room for so many places in each layer that grows by copying."""
    layers = getattr(cache, "layers", [])
    for number, layer in enumerate(layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            layers[number] = ReservedLayer(layer, more)
