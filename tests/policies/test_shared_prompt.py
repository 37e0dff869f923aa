"""Responses behind one copy of their prompt: the same numbers, for less work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from dprlhf.policies import shared_prompt
from dprlhf.policies.causal_lm import CausalLMPolicy, make_policy
from dprlhf.policies.shared_prompt import best_shared_rows, supported
from dprlhf.recipe import Adapter
from helpers import tiny

SMALL = {
    "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "n_embd": 32, "n_layer": 2,
    "n_head": 4, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 0, "sliding_window": None,
}  # fmt: skip
"""Settings that make any of the models tiny; each configuration takes those that it knows."""

PROMPT, RESPONSE, COPIES = 5, 4, 3


def policy_of(model_type: str, **settings: Any) -> CausalLMPolicy:
    known = transformers.AutoConfig.for_model(model_type)
    chosen = {name: value for name, value in SMALL.items() if hasattr(known, name)}
    config = transformers.AutoConfig.for_model(model_type, **{**chosen, **settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # far from uniform: a wrong neighbour is seen
        torch.nn.init.normal_(parameter, std=0.3)
    adapter = Adapter(type="lora", rank=1, target_modules="all-linear", init="random")
    policy = make_policy(model.double(), tiny.tokenizer(), adapter, temperature=0.7)
    for weight in policy.parameters.values():
        torch.nn.init.normal_(weight, std=0.3)
    return policy


def rows_of(users: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of several lengths, three responses each, of which some end early."""
    generator = torch.Generator().manual_seed(1)
    rows = users * COPIES
    tokens = torch.randint(1, 257, (rows, PROMPT + RESPONSE), generator=generator)
    tokens[:, :PROMPT] = tokens[::COPIES, :PROMPT].repeat_interleave(COPIES, 0)
    mask = torch.ones_like(tokens)
    for user in range(users):
        mask[user * COPIES : (user + 1) * COPIES, : 2 * user] = 0
    mask[1, -2:] = mask[3, -3:] = 0
    return tokens, mask


def value_and_gradient(
    policy: CausalLMPolicy, shared_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, mask = rows_of()
    logprobs = policy.response_logprobs(tokens, mask, RESPONSE, shared_rows)
    real = torch.where(mask[:, -RESPONSE:].bool(), logprobs, 0.0)
    weights = torch.linspace(-1, 1, real.numel(), dtype=torch.float64).view_as(real)
    gradients = torch.autograd.grad((real * weights).sum(), list(policy.parameters.values()))
    return real.detach(), torch.cat([g.flatten() for g in gradients])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", sorted(shared_prompt._MODELS))
def test_every_supported_model_computes_the_same(model_type: str, attention: str) -> None:
    policy = policy_of(model_type)
    assert supported(policy.model.config)
    value, gradient = value_and_gradient(policy, 1)
    policy.model.set_attn_implementation(attention)
    shared_value, shared_gradient = value_and_gradient(policy, COPIES)
    # Norms of some models compute in float32.
    assert value.std() > 0.1
    torch.testing.assert_close(shared_value, value, rtol=1e-4, atol=1e-5)
    assert (shared_gradient - gradient).norm() < 1e-4 * gradient.norm()


def test_responses_of_one_token_share_their_prompt_too() -> None:
    policy = policy_of("gpt2")
    tokens, mask = rows_of()
    tokens, mask = tokens[:, : PROMPT + 1], mask[:, : PROMPT + 1]
    shared = policy.response_logprobs(tokens, mask, 1, COPIES)
    torch.testing.assert_close(shared, policy.response_logprobs(tokens, mask, 1))


def test_a_response_moves_no_other_not_even_by_rounding() -> None:
    policy = policy_of("llama")
    tokens, mask = rows_of()
    before = policy.response_logprobs(tokens, mask, RESPONSE, COPIES)
    tokens[1, PROMPT:] = 7
    after = policy.response_logprobs(tokens, mask, RESPONSE, COPIES)
    others = [row for row in range(len(tokens)) if row != 1]
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[1], after[1])


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("mistral", {"sliding_window": 4}),
        ("bloom", {}),
        ("opt", {}),
        ("gemma2", {}),
        ("llama", {"auto_map": {"AutoModelForCausalLM": "own.Model"}}),
    ],
)
def test_other_models_keep_their_rows_apart(model_type: str, settings: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(model_type, **settings)
    assert not supported(config)


def test_a_policy_shares_where_its_model_can() -> None:
    policy = policy_of("llama")
    assert policy.shared_rows(4, 16, 16) == 4
    assert policy.shared_rows(1, 16, 16) == 1
    policy.model.config.sliding_window = 8
    assert policy.shared_rows(4, 16, 16) == 1


@pytest.mark.parametrize(
    ("copies", "prompt", "response", "hidden", "best"),
    [
        (2, 16, 16, 576, 2),
        (4, 512, 64, 576, 4),
        (8, 1024, 64, 4096, 8),
        (16, 16, 512, 576, 1),  # long responses would attend over one another's places for nothing
        (16, 64, 256, 576, 2),
        (1, 64, 64, 576, 1),
        (7, 64, 16, 576, 7),
    ],
)
def test_sharing_goes_as_far_as_it_saves_work(
    copies: int, prompt: int, response: int, hidden: int, best: int
) -> None:
    assert best_shared_rows(copies, prompt, response, hidden) == best
