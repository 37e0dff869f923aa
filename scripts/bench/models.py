"""Models in the shapes of real ones, with random weights: what is timed does not depend on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.recipe import Adapter
from dprlhf.rollout import Responses
from helpers.batches import rows_of
from helpers.tiny import tokenizer as byte_tokenizer

Kind = Literal["gpt2", "llama", "billion"]
TARGETS = {
    "gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"], "billion": ["q_proj", "v_proj"],
}  # fmt: skip
BILLION = LlamaConfig(  # 1.5 billion weights, in the shape of Qwen 2.5
    hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
    num_key_value_heads=2, vocab_size=151936, max_position_embeddings=4096, bos_token_id=0,
    eos_token_id=0, tie_word_embeddings=True,
)  # fmt: skip


def causal_lm(kind: Kind, *, small: bool, tied: bool = True) -> Any:
    """Return GPT-2 (124M), a Llama in the shape of SmolLM2-135M or one of 1.5 billion weights.

    Args:
        small: Whether to return a small model of that type instead.
        tied: Whether the head shares the embeddings' weights.
    """
    torch.manual_seed(0)
    if kind == "gpt2":
        size = {"n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 2048} if small else {}
        return GPT2LMHeadModel(
            GPT2Config(
                **size, tie_word_embeddings=tied, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
    if kind == "billion" and not small:
        return in_bfloat16(BILLION)
    shape = (128, 384, 4, 4, 2, 2048) if small else (576, 1536, 30, 9, 3, 49152)
    hidden, inner, layers, heads, groups, vocabulary = shape
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=groups, vocab_size=vocabulary,
            max_position_embeddings=1024, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def in_bfloat16(config: LlamaConfig) -> Any:
    """Return a Llama with random bfloat16 weights."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)


def policy(model: Any, kind: Kind, *, full: bool) -> CausalLMPolicy:
    """Return a policy that trains a LoRA of rank 4 on the attention, or everything."""
    if full:
        return CausalLMPolicy(model, byte_tokenizer())
    adapter = Adapter(type="lora", rank=4, alpha=4.0, target_modules=TARGETS[kind])
    return make_policy(model, byte_tokenizer(), adapter)


def responses(users: int, each: int, prompt: int, response: int) -> Responses:
    """Return random tokens as the responses of ``users``, ``each`` of them with so many."""
    shape = (users * each, prompt + response)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(1, 257, shape))
    tokens[:, :prompt] = tokens[::each, :prompt].repeat_interleave(each, dim=0)
    return rows_of(tokens, torch.ones_like(tokens), each, response, copies=each)


def a_row_a_user(batch: Responses) -> Responses:
    """Return the same rows, each of them a user: what Opacus clips."""
    rows = len(batch.user)
    own = np.arange(rows)
    grid = own.reshape(-1, 1, 1)
    return replace(batch, user=own, users=rows, grid=grid, num_generations=1)
