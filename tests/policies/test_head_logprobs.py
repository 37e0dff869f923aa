"""Log-probabilities from hidden states, without logits for all tokens at once."""

from typing import Any

import pytest
import torch
from torch import nn

from dprlhf.policies import head_logprobs as module
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.recipe import Adapter
from helpers import tiny

HIDDEN, WORDS = 5, 23
PROMPT, RESPONSE = 5, 4


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens_at_once", [1, 3, 4, 100])  # 7 rows
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_value_and_gradient_are_those_of_the_logits(bias, tokens_at_once, temperature, monkeypatch):
    monkeypatch.setattr(module, "MOST_LOGITS", tokens_at_once * WORDS)
    random = torch.Generator().manual_seed(0)
    head = nn.Linear(HIDDEN, WORDS, bias=bias).double().requires_grad_(False)
    states = 3 * torch.randn(7, HIDDEN, generator=random, dtype=torch.float64)
    chosen = torch.randint(WORDS, (7,), generator=random)
    weights = torch.randn(7, generator=random, dtype=torch.float64)
    ours, theirs = (states.clone().requires_grad_() for _ in range(2))
    found = module.head_logprobs(head, ours, chosen, temperature)
    expected = torch.log_softmax(head(theirs) / temperature, 1)[torch.arange(7), chosen]
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    [first] = torch.autograd.grad(found, ours, weights, retain_graph=True)
    [second] = torch.autograd.grad(found, ours, weights)  # nothing was used up
    [correct] = torch.autograd.grad(expected, theirs, weights)
    torch.testing.assert_close(first, correct, rtol=1e-12, atol=1e-14)
    assert torch.equal(first, second)
    assert torch.equal(ours, states)


@pytest.mark.parametrize("rows", [1, 6, 7, 8, 9, 23])
def test_parts_have_one_size_and_waste_little(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product's shape decides how it rounds: what a token gets must not depend on its place."""
    shapes = set()
    linear = module.F.linear
    monkeypatch.setattr(module, "MOST_LOGITS", 4 * WORDS)
    monkeypatch.setattr(
        module.F, "linear", lambda x, *rest: shapes.add(tuple(x.shape)) or linear(x, *rest)
    )
    head = nn.Linear(HIDDEN, WORDS)
    found = module.head_logprobs(
        head, torch.randn(rows, HIDDEN), torch.zeros(rows, dtype=torch.long), 1.0
    )
    assert found.shape == (rows,)
    [(size, _)] = shapes
    assert size <= 4
    assert -rows % size < -(-rows // 4)


def policy_of(model_type: str, adapter: Adapter | None = None, **settings: Any) -> CausalLMPolicy:
    model = tiny.of_type(model_type, **settings)
    adapter = adapter or Adapter(
        type="lora", rank=1, target_modules=r".*(q_proj|qkv|query_key_value|c_attn|qkv_proj)"
    )
    policy = make_policy(model, tiny.tokenizer(), adapter, temperature=0.7)
    for name, weight in policy.parameters.items():
        if "lora" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return policy


def value_and_gradient(policy, shared_rows):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 257, (4, PROMPT + RESPONSE), generator=generator)
    tokens[:, :PROMPT] = tokens[::2, :PROMPT].repeat_interleave(2, 0)
    mask = torch.ones_like(tokens)
    mask[2:, :2] = 0
    logprobs = policy.response_logprobs(tokens, mask, RESPONSE, shared_rows)
    weights = torch.linspace(-1, 1, logprobs.numel(), dtype=torch.float64).view_as(logprobs)
    gradients = torch.autograd.grad((logprobs * weights).sum(), list(policy.parameters.values()))
    return logprobs.detach(), torch.cat([g.flatten() for g in gradients])


@pytest.mark.parametrize(
    ("model_type", "shared_rows"),
    [*((name, 2) for name in sorted(module._PLAIN_HEADS)), ("gpt2", 1), ("llama", 1)],
)
def test_every_listed_model_computes_the_same(model_type: str, shared_rows: int) -> None:
    policy = policy_of(model_type)
    assert policy._plain_head
    value, gradient = value_and_gradient(policy, shared_rows)
    policy._plain_head = False
    expected, of_logits = value_and_gradient(policy, shared_rows)
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(gradient, of_logits, rtol=1e-9, atol=1e-11)
    assert float(gradient.norm()) > 0


def test_a_model_that_scales_its_logits_would_be_wrong() -> None:
    policy = policy_of("granite", logits_scaling=3.0)
    assert not policy._plain_head
    value, _ = value_and_gradient(policy, 1)
    policy._plain_head = True
    assert not torch.allclose(value_and_gradient(policy, 1)[0], value, rtol=1e-2)


def test_a_head_that_a_program_changed_keeps_its_logits() -> None:
    policy = policy_of("llama")
    head = policy.network.lm_head
    plain = head.forward
    head.forward = lambda x: 3 * plain(x)
    changed = CausalLMPolicy(policy.model, policy.tokenizer, policy.temperature)
    assert not changed._plain_head
    expected, _ = value_and_gradient(changed, 1)
    changed._plain_head = True
    assert not torch.allclose(value_and_gradient(changed, 1)[0], expected, rtol=1e-2)


@pytest.mark.parametrize(
    "adapter",
    [Adapter(type="full"), Adapter(type="lora", rank=1, target_modules=["q_proj", "lm_head"])],
    ids=["full", "lora on the head"],
)
def test_a_head_that_is_trained_keeps_its_logits(adapter: Adapter) -> None:
    """Its own gradient needs them."""
    policy = policy_of("llama", adapter)
    assert not policy._plain_head
    assert value_and_gradient(policy, 1)[1].shape == (policy.dimension,)


def parts_of(size: int) -> Any:
    return lambda logits: (slice(s, s + size) for s in range(0, len(logits), size))


@pytest.mark.parametrize("size", [1, 3, 7, 100])  # 7 rows: parts that do and do not divide them
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_value_and_gradient_are_those_of_log_softmax(size, temperature, monkeypatch):
    monkeypatch.setattr(module, "row_parts", parts_of(size))
    random = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(7, 11, generator=random, dtype=torch.float64)
    tokens = torch.randint(11, (7,), generator=random)
    weights = torch.randn(7, generator=random, dtype=torch.float64)
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    found = module.chosen_logprobs(ours, tokens, temperature)
    expected = torch.log_softmax(theirs / temperature, 1)[torch.arange(7), tokens]
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    found.backward(weights)
    expected.backward(weights)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_logits_are_left_as_they_are(dtype: torch.dtype) -> None:
    """The backward pass works in place on copies, and a second one finds what the first found."""
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1)).to(dtype)
    held = logits.clone().requires_grad_()
    found = module.chosen_logprobs(held, torch.tensor([0, 3, 8, 8]), 1.0)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    [first] = torch.autograd.grad(found.sum(), held, retain_graph=True)
    [second] = torch.autograd.grad(found.sum(), held)
    assert torch.equal(held, logits)
    assert torch.equal(first, second)
    assert first.dtype == dtype


@pytest.mark.parametrize("rows", [0, 1, 40, 41])
def test_the_parts_are_all_of_the_rows_once(rows: int) -> None:
    logits = torch.empty(rows, 50_000)
    covered = [row for part in module.row_parts(logits) for row in range(rows)[part]]
    assert covered == list(range(rows))
