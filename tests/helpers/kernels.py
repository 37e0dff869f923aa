"""Stand-ins for kernels, as forward hooks: what the rounding of a layer's output depends on."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Kernel = Callable[[Any, Any, torch.Tensor], torch.Tensor]

_ERROR = 1e-6


def _scaled(output: torch.Tensor, size: torch.Tensor | float) -> torch.Tensor:
    return output * (1 + _ERROR * size)


def by_place(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """As a kernel that cuts its work among threads: rows round by their place."""
    place = torch.arange(len(output), dtype=output.dtype).view(-1, *[1] * (output.ndim - 1))
    return _scaled(output, place)


def by_shape(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """As a kernel that is chosen by the shape."""
    return _scaled(output, float(np.prod(output.shape[:-1]) % 97))


def by_contents(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """As one scale for all rows, of the largest number among them (FP8)."""
    return _scaled(output, output.detach().abs().max())


def at_random() -> Kernel:
    """As atomic additions, whose order is another each time."""
    random = np.random.default_rng(0)
    return lambda module, inputs, output: _scaled(output, random.random())


def attach(policy: Any, kernel: Kernel | None) -> None:
    """Let the attention and the feed-forward network of each decoder layer round so."""
    for layer in policy.network.modules() if kernel is not None else ():
        if type(layer).__name__ in ("GPT2MLP", "LlamaMLP", "Conv1D", "Linear"):
            layer.register_forward_hook(kernel)
