"""log π(token) from logits, or from the last hidden states without all tokens' logits.

From hidden states, a token's log-probability depends on its own h alone, with

    ∂ log π(y) / ∂h = (W_y − Σ_v π(v) W_v) / temperature.

Where the vocabulary's weight W is frozen, the forward pass computes it beside log π(y), some tokens
at a time, from logits that are then dropped; the backward pass only scales it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dprlhf.policies import shared_prompt

_PLAIN_HEADS = frozenset(
    {"gemma", "gpt2", "gpt_neox", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"}
)
"""Model types that are tested to have no step between the vocabulary's product and the logits."""

# The most logits that exist at once. Few tokens at a time would read W more often than it pays.
MOST_LOGITS = 2**25


def has_plain_head(model: Any, trained: frozenset[int]) -> bool:
    """Return whether logits are W h (+ b) with a frozen vocabulary weight W."""
    # A model that a program has changed is taken as it is called, by its logits.
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) not in _PLAIN_HEADS or getattr(config, "auto_map", None):
        return False
    if shared_prompt.patched(getattr(model, "get_base_model", lambda: model)()):
        return False
    head = model.get_output_embeddings()
    return type(head) is nn.Linear and trained.isdisjoint(map(id, head.parameters()))


def head_logprobs(
    head: nn.Linear, states: torch.Tensor, chosen: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return log softmax(head(states) / temperature) at one token a row, in float32 or wider."""
    logprobs: torch.Tensor = _HeadLogProbs.apply(  # type: ignore[no-untyped-call]
        states, head.weight, head.bias, chosen, 1 / temperature
    )
    return logprobs


class _HeadLogProbs(torch.autograd.Function):
    """The function behind :func:`head_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        chosen: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        wide = torch.promote_types(states.dtype, torch.float32)
        rows, most = len(states), max(1, MOST_LOGITS // len(weight))
        size = max(1, -(-rows // max(1, -(-rows // most))))
        # Equal parts, also the last: rounding depends on a product's shape.
        missing = -rows % size
        if missing:
            states, chosen = F.pad(states, (0, 0, 0, missing)), F.pad(chosen, (0, missing))
        logprobs = states.new_empty(rows + missing, dtype=wide)
        slopes = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        for start in range(0, len(states), size):
            part = slice(start, start + size)
            logits = F.linear(states[part], weight, bias)
            for inner in row_parts(logits):
                own = slice(start + inner.start, start + inner.stop)
                scores = logits[inner].to(wide).mul_(scale)
                normalizers = scores.logsumexp(1)
                at = chosen[own, None]
                logprobs[own] = scores.gather(1, at)[:, 0] - normalizers
                if slopes is not None:  # ∂ log π / ∂ logits, in the place of the logits
                    scores.sub_(normalizers[:, None]).exp_().mul_(-scale)
                    scores.scatter_add_(1, at, scores.new_full(at.shape, scale))
                    logits[inner] = scores
            if slopes is not None:
                slopes[part] = logits @ weight
        if slopes is not None:
            ctx.save_for_backward(slopes[:rows])
        return logprobs[:rows]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        of_states = (slopes.to(gradient.dtype) * gradient[:, None]).to(slopes.dtype)
        return of_states, None, None, None, None


def chosen_logprobs(logits: torch.Tensor, chosen: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return log softmax(logits / temperature) at one token a row, in float32 or wider."""
    logprobs: torch.Tensor = _ChosenLogProbs.apply(logits, chosen, temperature)  # type: ignore[no-untyped-call]
    return logprobs


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
