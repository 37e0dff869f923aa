"""Tiny policies in float64 whose trained parameters are all away from zero."""

import functools
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from dprlhf import recipe
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from helpers import tiny

TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
}


@torch.no_grad()
def off_start(policy: Any, scale: float = 0.3, seed: int = 1) -> Any:
    """Move what a policy trains by noise, so that an adapter changes something; return it."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters.values():
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return policy


@functools.cache
def policy_of(
    kind: tiny.Kind = "gpt2",
    adapter: str = "lora",
    dtype: torch.dtype = torch.float64,
    temperature: float = 0.7,
) -> CausalLMPolicy:
    """A policy whose A and B are both away from zero."""
    spec = recipe.Adapter.model_validate(
        {"type": adapter, "rank": 2, "alpha": 4.0, "target_modules": TARGETS[kind]}
    )
    policy = make_policy(tiny.model(kind), tiny.tokenizer(), spec, temperature=temperature)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    policy.model.to(dtype)
    if dtype == torch.float64:
        exact_norms(policy.model)
    return policy


def exact_norms(model: nn.Module) -> None:
    """Put float64 RMS norms in: those of transformers compute in float32 whatever the input."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, LlamaRMSNorm):
                norm = nn.RMSNorm(child.weight.shape, child.variance_epsilon, dtype=torch.float64)
                norm.weight = child.weight
                setattr(parent, name, norm)
