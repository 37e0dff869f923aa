"""A tiny language model with random weights, made in memory."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch

from dprlhf import recipe
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy


def tiny_policy(adapter: recipe.Adapter | None = None) -> CausalLMPolicy:
    """Return a random two-layer GPT-2 over bytes with an adapter, in float64, made in memory.

    Its weights are the same at each call; every trained parameter is away from zero.

    Args:
        adapter: LoRA of rank 2 on the attention by default.
    """
    adapter = adapter or recipe.Adapter(type="lora", rank=2, target_modules=["c_attn"])
    return copy.deepcopy(_policy_with(adapter.model_dump_json()))


def save_tiny_model(folder: Path) -> str:
    """Save the model and the tokenizer of :func:`tiny_policy`, and return the folder's path."""
    _tiny_model().save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return str(folder)


@functools.cache
def _policy_with(adapter: str) -> CausalLMPolicy:
    spec = recipe.Adapter.model_validate_json(adapter)
    policy = make_policy(_tiny_model(), _byte_tokenizer(), spec, temperature=0.7)
    policy.model.to(torch.float64)
    policy.parameters = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return policy


def _tiny_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=257, n_positions=128, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return GPT2LMHeadModel(config)


def _byte_tokenizer() -> Any:
    """Return a tokenizer with 256 byte tokens after an end-of-sequence token."""
    from transformers import GPT2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = ["<eos>", *sorted(bytes_to_unicode().values())]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<eos>")
    return GPT2Tokenizer(vocab=vocabulary, merges=[], padding_side="left", **special)
