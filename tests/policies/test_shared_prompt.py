"""Responses behind one copy of their prompt: the same numbers, for less work."""

from typing import Any

import pytest
import torch
import transformers

from dprlhf.policies import shared_prompt
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.policies.shared_prompt import supported
from dprlhf.recipe import Adapter
from dprlhf.rollout.decoding import decode
from helpers import tiny
from helpers.marks import slow

PROMPT, RESPONSE, COPIES = 5, 4, 3


def policy_of(model_type: str) -> CausalLMPolicy:
    adapter = Adapter(type="lora", rank=1, target_modules="all-linear", init="random")
    policy = make_policy(tiny.of_type(model_type), tiny.tokenizer(), adapter, temperature=0.7)
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


def value_and_gradient(policy, shared_rows):
    tokens, mask = rows_of()
    logprobs = policy.response_logprobs(tokens, mask, RESPONSE, shared_rows)
    real = torch.where(mask[:, -RESPONSE:].bool(), logprobs, 0.0)
    weights = torch.linspace(-1, 1, real.numel(), dtype=torch.float64).view_as(real)
    gradients = torch.autograd.grad((real * weights).sum(), list(policy.parameters.values()))
    return real.detach(), torch.cat([g.flatten() for g in gradients])


@pytest.mark.parametrize(
    ("model_type", "attention"),
    [
        *((name, "sdpa") for name in sorted(shared_prompt._MODELS)),
        *((name, "eager") for name in ("gemma", "gpt2", "llama")),
    ],
)
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


def logits_of_steps(policy, prompts, shared, monkeypatch, *, size=3, draws=None):
    """Four responses of five tokens to each prompt, and the logits, ``[responses, steps, …]``."""
    seen: list[torch.Tensor] = []

    def note(module: Any, inputs: Any, output: Any) -> None:
        logits = output.logits.flatten(0, 1)
        seen.append(logits.repeat_interleave(size * 4 // len(logits), 0).detach())

    if draws is None:
        generator = torch.Generator().manual_seed(2)
        draws = torch.rand(3, 4, 5, generator=generator, dtype=torch.float64)
    monkeypatch.setattr(policy, "shared_cache", lambda *_: shared)
    monkeypatch.setattr(policy, "end_tokens", [])
    hook = policy.model.register_forward_hook(note)
    try:
        fillers = [None] * (size - len(prompts))
        found = decode(policy, [*prompts, *fillers], draws[:size], width=PROMPT)
    finally:
        hook.remove()
    return found, torch.stack(seen, 1)[: 4 * len(prompts)]


@pytest.mark.parametrize(
    ("model_type", "attention"),
    [
        *((name, "sdpa") for name in sorted(shared_prompt._MODELS)),
        *(slow(name, "eager") for name in ("gemma", "gpt2", "llama")),
    ],
)
def test_every_supported_model_decodes_the_same(model_type, attention, monkeypatch):
    policy = policy_of(model_type)
    policy.model.set_attn_implementation(attention)
    policy.model.float()  # eager attention makes its softmax in float32: a float64 mask overflows
    prompts = [[5, 6, 7], [9], [1, 2, 3, 4, 5]]
    apart, truth = logits_of_steps(policy, prompts, 1, monkeypatch)
    assert len({tuple(response) for response in apart}) > 6
    for shared in (2, 4):
        together, logits = logits_of_steps(policy, prompts, shared, monkeypatch)
        assert together == apart
        torch.testing.assert_close(logits, truth, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_other_users_and_responses_move_no_bit_of_what_is_decoded(model_type, monkeypatch):
    policy = policy_of(model_type)
    generator = torch.Generator().manual_seed(2)
    draws = torch.rand(3, 4, 5, generator=generator, dtype=torch.float64)
    _, before = logits_of_steps(policy, [[5, 6], [9]], 4, monkeypatch, draws=draws)
    # Another user beside the first one, at another length; a full batch; nobody else.
    for others in ([[1, 2, 3, 4]], [[8, 3], [4, 4]], []):
        _, beside = logits_of_steps(policy, [[5, 6], *others], 4, monkeypatch, draws=draws)
        assert torch.equal(before[:4], beside[:4])
    changed = draws.clone()
    changed[0, 2] = 1 - changed[0, 2]
    _, other = logits_of_steps(policy, [[5, 6], [9]], 4, monkeypatch, draws=changed)
    same = [row for row in range(8) if row != 2]
    assert torch.equal(before[same], other[same])
    assert not torch.equal(before[2], other[2])
