"""Top-k, top-p and min-p, against transformers."""

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dprlhf.data.users import Prompts
from dprlhf.gradients.micro_batches import user_gradients
from dprlhf.policies import warpers
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.protocol import Sampling
from dprlhf.policies.warpers import cutoff, truncated, warped, warped_logprobs
from dprlhf.rollout.decoding import decode
from dprlhf.rollout.logprobs import log_ratio_to_base, token_logprobs
from helpers.autograd import gradient_of_user, log_distribution, relative_error
from helpers.marks import slow
from helpers.policies import policy_of
from helpers.sampled import TEXTS, draw, prompts_of

EOS = 0

EACH = [
    Sampling(top_k=5),
    Sampling(top_p=0.83),
    Sampling(min_p=0.2),
    Sampling(top_k=40, top_p=0.9, min_p=0.02),
]


def flat(sampling: Sampling) -> str:
    changed = dataclasses.asdict(sampling).items() - dataclasses.asdict(Sampling()).items()
    return ",".join(f"{name}={value}" for name, value in sorted(changed))


def with_sampling(sampling: Sampling, kind: Any = "gpt2", **changes: Any) -> CausalLMPolicy:
    """A policy in float64 whose next token is far from uniform."""
    policy = copy.deepcopy(policy_of(kind, **changes))
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.mul_(12)
    policy.parameters = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    policy.sampling = sampling
    return policy


def five(count: int = 5) -> Prompts:
    numbers = np.arange(count)
    return prompts_of(TEXTS[:count], (numbers // 2).tolist(), (numbers % 2).tolist())


def by_transformers(policy: Any, logits: torch.Tensor) -> torch.Tensor:
    return torch.stack([log_distribution(policy, row) for row in logits])


@settings(max_examples=100, deadline=None)
@given(
    top_k=st.sampled_from([0, 1, 3, 20, 1000]),
    top_p=st.sampled_from([1.0, 0.951, 0.503, 0.0307]),
    min_p=st.sampled_from([0.0, 0.103, 0.907, 1.0]),
    temperature=st.sampled_from([1.0, 0.7, 2.0]),
    vocabulary=st.sampled_from([2, 13, 257]),
    spread=st.sampled_from([0.3, 2.0, 9.0]),
    ties=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_kept_tokens_are_those_of_transformers(
    top_k: int, top_p: float, min_p: float, temperature: float,
    vocabulary: int, spread: float, ties: bool, seed: int,
) -> None:  # fmt: skip
    """Where scores are equal, all that equal the lowest kept one are kept, and no others."""
    random = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(4, vocabulary, generator=random)
    logits = (2 * logits).round() / 2 if ties else logits
    sampling = Sampling(top_k, top_p, min_p)
    policy = policy_of()
    with policy.sampled_with(sampling, temperature):
        theirs = by_transformers(policy, logits).isfinite()
    scores = warped(logits, temperature)
    ours = truncated(scores, sampling).isfinite()
    assert bool(ours.any(1).all())
    if not ties:
        assert torch.equal(ours, theirs)
        return
    lowest = scores.masked_fill(~theirs, math.inf).amin(1, keepdim=True)
    assert bool((ours | ~theirs).all())
    assert torch.equal(ours & ~theirs, (scores == lowest) & ~theirs & ours)


@pytest.mark.parametrize("sampling", EACH, ids=flat)
def test_a_rows_kept_tokens_do_not_depend_on_the_other_rows(sampling: Sampling) -> None:
    scores = 3 * torch.randn(6, 300, generator=torch.Generator().manual_seed(2))
    together = cutoff(scores, sampling)
    for row in range(6):
        assert torch.equal(cutoff(scores[row : row + 1], sampling)[0], together[row])
    assert torch.equal(cutoff(scores.flip(0), sampling).flip(0), together)


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("sampling", EACH, ids=flat)
def test_value_and_gradient_are_those_of_autograd(sampling, size, monkeypatch):
    def parts(logits: torch.Tensor, on_gpu: int) -> Any:
        return (slice(s, min(s + size, len(logits))) for s in range(0, len(logits), size))

    monkeypatch.setattr(warpers, "row_parts", parts)
    rows, vocabulary = 12, 23
    random = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(rows, vocabulary, generator=random, dtype=torch.float64)
    weights = torch.randn(rows, generator=random, dtype=torch.float64)
    chosen = torch.zeros(rows, dtype=torch.long)
    policy = policy_of()
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    with policy.sampled_with(sampling, 0.7):
        truth = []
        for row in range(rows):
            distribution = log_distribution(policy, theirs[row])
            # a token that can be drawn: one of the likeliest three
            order = distribution.argsort(descending=True)[: int(distribution.isfinite().sum())]
            chosen[row] = order[min(row % 3, len(order) - 1)]
            truth.append(distribution[chosen[row]])
        expected = torch.stack(truth)
    found = warped_logprobs(ours, chosen, sampling, 0.7)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found.backward(weights)
    expected.backward(weights)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-13)


def test_a_sampled_token_that_rounding_puts_below_the_edge_counts_as_kept() -> None:
    """Its log-probability is finite and its gradient that of a set with it."""
    logits = torch.tensor([[3.0, 2.0, 2.0 - 1e-6, -1.0]] * 2, dtype=torch.float64)
    logits.requires_grad_()
    found = warped_logprobs(logits, torch.tensor([2, 3]), Sampling(top_k=2), 1.0)
    sets = [logits[0, :3], logits[1, [0, 1, 3]]]
    expected = torch.stack([s.log_softmax(0)[2] for s in sets])
    torch.testing.assert_close(found, expected)
    [ours] = torch.autograd.grad(found.sum(), logits)
    [theirs] = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["gpt2", slow("llama")])
@pytest.mark.parametrize("sampling", EACH, ids=flat)
def test_each_users_gradient_is_that_of_autograd(sampling: Sampling, kind: Any) -> None:
    """Through sampling, the padded forward pass, shared prompts and the per-user engine."""
    policy = with_sampling(sampling, kind)
    responses = draw(policy, five())
    weights = np.random.default_rng(0).normal(size=len(responses.user))
    found = {}
    for users, _, gradients, _ in user_gradients(
        policy, responses, weights, batch_size=4, rows=None
    ):
        found.update(zip(users.tolist(), gradients[:, 0], strict=True))
    for user in range(responses.users):
        truth = gradient_of_user(policy, responses, weights, user)
        assert relative_error(found[user].double(), truth) < 1e-9


@pytest.mark.parametrize("sampling", EACH[-1:], ids=flat)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_users_gradient_has_the_same_bits_without_the_others(sampling, kind):
    policy = with_sampling(sampling, kind, dtype=torch.float32)
    assert policy.shared_rows(2, 16, 6) > 1  # behind one copy of their prompt, as in a run
    found: list[dict[int, torch.Tensor]] = []
    for count in (5, 2):
        responses = draw(policy, five(count))
        weights = np.arange(1.0, len(responses.user) + 1)
        given_ = user_gradients(policy, responses, weights, batch_size=8, rows=None)
        found.append({})
        for users, _, gradients, _ in given_:
            found[-1].update(zip(users.tolist(), gradients[:, 0].clone(), strict=True))
    assert torch.equal(found[0][0], found[1][0])
    assert float(found[0][0].norm()) > 0


@pytest.mark.parametrize("sampling", EACH, ids=flat)
def test_tokens_are_drawn_from_the_stated_distribution(sampling: Sampling) -> None:
    """The first token, and the second after the likeliest first one."""
    policy = with_sampling(sampling)
    uniforms = torch.from_numpy(np.random.default_rng(5).random((1, 3000, 2)))
    [ids] = policy.encode(["abc"], 16)
    drawn = decode(policy, [ids], uniforms, width=16)
    first = np.array([response[0] for response in drawn])
    likeliest = int(np.bincount(first).argmax())
    second = [response[1] for response in drawn if response[0] == likeliest and len(response) > 1]
    for tokens, before in ((first, ids), (np.array(second), [*ids, likeliest])):
        if likeliest == EOS and before is not ids:
            continue
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([before])).logits[0, -1]
            truth = log_distribution(policy, logits).exp().numpy()
        counts = np.bincount(tokens, minlength=len(truth))
        assert not counts[truth == 0].any()
        assert chi_square(counts, truth) > 1e-4
        plain = torch.softmax(logits / policy.temperature, 0).numpy()
        if before is ids and np.abs(plain - truth).sum() > 0.2:  # the negative control
            assert chi_square(counts, plain) < 1e-6


def chi_square(counts: NDArray[np.int64], truth: NDArray[np.float64]) -> float:
    """The p-value, with the tokens of expected count below 5 as one cell."""
    expected = truth * counts.sum()
    rare = expected < 5
    seen = [*counts[~rare], counts[rare].sum()]
    wanted = [*expected[~rare], max(expected[rare].sum(), 1e-9)]
    wanted = np.array(wanted) * sum(seen) / sum(wanted)
    return float(scipy.stats.chisquare(seen, wanted).pvalue) if len(seen) > 1 else 1.0


def test_the_log_ratio_to_the_base_policy_leaves_truncation_out() -> None:
    sampling = Sampling(top_k=2)
    policy = with_sampling(sampling)
    responses = draw(policy, five(), responses=4)
    found = log_ratio_to_base(policy, responses, 8)
    with policy.base():  # some sampled token is none of the base policy's two
        logits = token_logprobs(policy, responses, 8)
    assert policy.sampling == sampling
    policy.sampling = Sampling()
    current = token_logprobs(policy, responses, 8)
    with policy.base():
        expected = current - token_logprobs(policy, responses, 8)
    np.testing.assert_array_equal(found, expected)
    assert not np.allclose(logits, current)
