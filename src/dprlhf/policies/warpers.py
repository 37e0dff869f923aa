"""Top-k, top-p and min-p: the distribution that a token is really drawn from.

The settings mean what they mean in transformers' ``generate``, and are applied in its order: the
logits are divided by the temperature and cut by top-k, top-p and min-p, one after the other. What
is left is renormalised.

The log-probability of a token is that of this distribution π̃, and so is its gradient: with K the
kept tokens,

    ∇ log π̃(y) = ∇ s_y − Σ_{v ∈ K} π̃(v) ∇ s_v        (s: scores, logits over the temperature)

K does not move with θ, except where two scores are equal or a cumulative probability is exactly
top_p. There the expected reward jumps, and no gradient shows that.

**The sampled token always counts as kept.** K is found again in the update, from logits of the same
policy that are rounded in another way (no cache of keys and values, another shape). A token at the
very edge of K could fall out of it there, and log 0 would poison its user's contribution.

A row's set depends on that row's logits alone, so it couples no users.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dprlhf.errors import DprlhfError, one_line
from dprlhf.policies.head_logprobs import row_parts
from dprlhf.policies.protocol import Sampling


def warped(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the scores before truncation, ``[rows, vocabulary]``, float32 or wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


def cutoff(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the lowest score that is kept: the kept tokens have this score or a higher."""
    # All ties of the lowest are kept, also with top-p: what is kept must not depend on the order in
    # which a sort leaves equal scores.
    lowest = scores.new_full((len(scores), 1), -torch.inf)
    if sampling.top_k:
        best = scores.topk(min(sampling.top_k, scores.shape[1]), 1).values
        lowest = best[:, -1:]
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    if sampling.top_p < 1:
        # After top-k, only its tokens need be in order; those tied with its last one come with it.
        ordered = best if sampling.top_k else scores.sort(dim=1, descending=True).values
        mass = (ordered - scores.logsumexp(1, keepdim=True)).exp().double()
        before = mass.cumsum(1) - mass
        last = (before < sampling.top_p).sum(1, keepdim=True) - 1
        lowest = ordered.gather(1, last.clamp(min=0))
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    if sampling.min_p > 0:
        probability = scores.softmax(1)
        unlikely = probability < sampling.min_p * probability.amax(1, keepdim=True)
        lowest = scores.masked_fill(unlikely, torch.inf).amin(1, keepdim=True)
    return lowest


def truncated(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the scores with −∞ for each token that top-k, top-p or min-p cuts."""
    return scores.masked_fill(scores < cutoff(scores, sampling), -torch.inf)


def warped_logprobs(
    logits: torch.Tensor,  # [tokens, vocabulary]; the backward pass keeps it as it is
    chosen: torch.Tensor,  # [tokens]
    sampling: Sampling,
    temperature: float,
) -> torch.Tensor:
    """Return log π̃ of the chosen tokens, ``[tokens]``, float32 or wider."""
    logprobs: torch.Tensor = _WarpedLogProbs.apply(logits, chosen, sampling, temperature)  # type: ignore[no-untyped-call]
    return logprobs


class _WarpedLogProbs(torch.autograd.Function):
    """The function behind :func:`warped_logprobs`; a row keeps logits, normaliser and cutoff."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        chosen: torch.Tensor,
        sampling: Sampling,
        temperature: float,
    ) -> torch.Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        lowest, normalizers, values = logits.new_empty((3, len(logits), 1), dtype=wide)
        chosen = chosen[:, None]
        for part in row_parts(logits, _ON_GPU):
            scores = warped(logits[part], temperature)
            lowest[part] = cutoff(scores, sampling)
            cut = (scores < lowest[part]).scatter_(1, chosen[part], False)
            normalizers[part] = scores.masked_fill(cut, -torch.inf).logsumexp(1, keepdim=True)
            values[part] = scores.gather(1, chosen[part])
        ctx.save_for_backward(logits, chosen, lowest, normalizers)
        ctx.temperature = temperature
        logprobs: torch.Tensor = (values - normalizers)[:, 0]
        return logprobs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, chosen, lowest, normalizers = ctx.saved_tensors
        of_logits, gradient = torch.empty_like(logits), gradient[:, None]
        for part in row_parts(logits, _ON_GPU):
            scores = warped(logits[part], ctx.temperature)
            cut = (scores < lowest[part]).scatter_(1, chosen[part], False)
            share = (scores - normalizers[part]).exp_().masked_fill_(cut, 0.0)
            of_scores = share.mul_(-gradient[part]).scatter_add_(1, chosen[part], gradient[part])
            of_logits[part] = of_scores / ctx.temperature
        return of_logits, None, None, None


_ON_GPU = 2**24
"""Logits of a part of the rows: sorting it takes several copies."""


class StopStrings:
    """Says which responses have just completed a stop string.

    The matching is transformers' ``StopStringCriteria``, on the tokens of the responses alone: a
    string that starts in the prompt stops nothing.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        from transformers import StopStringCriteria

        self.strings = tuple(strings)
        try:
            self._criteria: Any = StopStringCriteria(tokenizer, list(strings))
        except (ValueError, AttributeError, TypeError) as error:
            raise DprlhfError(f"rollout.stop {list(strings)}: {one_line(error)}") from error
        self.reach = int(self._criteria.maximum_token_len)

    def completed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return whether the last token completes a stop string, ``[rows]``."""
        stopped: torch.Tensor = self._criteria(tokens, None)
        return stopped
