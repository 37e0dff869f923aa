"""Extraction: how surely does a tuned policy give away the secret of one of its users?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dprlhf.data.public import in_memory_prompts
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.protocol import Sampling
from dprlhf.rollout.logprobs import token_logprobs
from dprlhf.training.example_tokens import pack, split_row

Array = NDArray[np.float64]


def text_logprobs(
    policy: CausalLMPolicy,
    prompts: Sequence[Any],
    texts: Sequence[str],
    *,
    max_prompt_tokens: int = 64,
    batch_size: int = 64,
) -> Array:
    """Return log π(text | prompt) of one text after each prompt, in nats, ``[prompts]``."""
    asked = in_memory_prompts(prompts)
    rows = [split_row(policy, p, [text]) for p, text in zip(prompts, texts, strict=True)]
    before, tokens = [p[-max_prompt_tokens:] for p, _ in rows], [text for _, (text,) in rows]
    length = max(map(len, tokens), default=1)
    packed = pack(policy, asked, before, tokens, length, max_prompt_tokens)
    with policy.sampled_with(Sampling()):  # nothing of the texts was sampled
        found: Array = token_logprobs(policy, packed, batch_size).sum(1)
    return found


def exposure(scores: Array, right: NDArray[np.int64]) -> Array:
    """Return the exposure of users' secrets in bits, ``[users]`` (arXiv 1802.08232, section 4)."""
    # log2(candidates) − log2(rank of the secret), of a tie the middle rank: all bits where it
    # scores highest, log2(e) ≈ 1.44 on average where the scores know nothing.
    own = np.take_along_axis(scores, right[:, None], 1)
    rank = 1 + (scores > own).sum(1) + ((scores == own).sum(1) - 1) / 2
    bits: Array = np.log2(scores.shape[1]) - np.log2(rank)
    return bits
