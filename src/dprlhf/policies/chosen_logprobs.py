"""log softmax at one token a row, with a backward pass that keeps no float32 copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def chosen_logprobs(logits: torch.Tensor, chosen: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return log softmax(logits / temperature) at one token a row, in float32 or wider."""
    found: torch.Tensor = _ChosenLogProbs.apply(logits, chosen, temperature)  # type: ignore[no-untyped-call]
    return found


class _ChosenLogProbs(torch.autograd.Function):
    """The function behind :func:`chosen_logprobs`, with float32 copies of some rows at a time."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, chosen: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        scale = 1 / temperature
        normalizers = torch.empty(len(logits), dtype=wide, device=logits.device)
        for rows in row_parts(logits):
            torch.logsumexp(logits[rows].to(wide) * scale, 1, out=normalizers[rows])
        ctx.save_for_backward(logits, chosen, normalizers)
        ctx.scale = scale
        return logits.gather(1, chosen[:, None])[:, 0].to(wide) * scale - normalizers

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, chosen, normalizers = ctx.saved_tensors
        of_logits = torch.empty_like(logits)
        gradient = gradient * ctx.scale
        for rows in row_parts(logits):
            part = logits[rows].to(gradient.dtype) * ctx.scale  # a copy: the rest is in place
            part = part.sub_(normalizers[rows, None]).exp_().mul_(-gradient[rows, None])
            of_logits[rows] = part.scatter_add_(1, chosen[rows, None], gradient[rows, None])
        return of_logits, None, None


def row_parts(logits: torch.Tensor, on_gpu: int = 2**28) -> Iterator[slice]:
    """Cut rows into parts whose copies stay in a CPU's cache, or of ``on_gpu`` numbers."""
    size = max(1, (on_gpu if logits.is_cuda else 2**21) // logits.shape[1])
    for start in range(0, len(logits), size):
        yield slice(start, min(start + size, len(logits)))
