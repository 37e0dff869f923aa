"""Log-probabilities of chosen tokens, read off the logits a part at a time."""

from typing import Any

import pytest
import torch

from dprlhf.policies import chosen_logprobs


def parts_of(size: int) -> Any:
    return lambda logits: (slice(s, s + size) for s in range(0, len(logits), size))


@pytest.mark.parametrize("size", [1, 3, 7, 100])  # 7 rows: parts that do and do not divide them
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_value_and_gradient_are_those_of_log_softmax(size, temperature, monkeypatch):
    monkeypatch.setattr(chosen_logprobs, "row_parts", parts_of(size))
    random = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(7, 11, generator=random, dtype=torch.float64)
    tokens = torch.randint(11, (7,), generator=random)
    weights = torch.randn(7, generator=random, dtype=torch.float64)
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    found = chosen_logprobs.chosen_logprobs(ours, tokens, temperature)
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
    found = chosen_logprobs.chosen_logprobs(held, torch.tensor([0, 3, 8, 8]), 1.0)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    [first] = torch.autograd.grad(found.sum(), held, retain_graph=True)
    [second] = torch.autograd.grad(found.sum(), held)
    assert torch.equal(held, logits)
    assert torch.equal(first, second)
    assert first.dtype == dtype


@pytest.mark.parametrize("rows", [0, 1, 40, 41])
def test_the_parts_are_all_of_the_rows_once(rows: int) -> None:
    logits = torch.empty(rows, 50_000)
    covered = [row for part in chosen_logprobs.row_parts(logits) for row in range(rows)[part]]
    assert covered == list(range(rows))
