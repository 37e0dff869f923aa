"""Families of models: windows, states, positions of their own, image towers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dprlhf.gradients.micro_batches import user_gradients
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rollout.decoding import try_last_step
from helpers import families
from helpers.autograd import gradient_of_user, relative_error
from helpers.batches import Shape, batch_of
from helpers.families import PROMPTS, padded_logprobs, plain_logprobs, sampled_logprobs

KINDS = [
    "gemma2", "mistral-window", "modernbert-decoder", "llama4_text", "zamba2", "bamba", "lfm2",
    "qwen3_next", "biogpt", "roberta",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_and_gradients_take_the_models_own_distribution(kind: str) -> None:
    """Neither padding, the cache nor other rows change the probability of a token."""
    policy = families.policy(kind)
    sampled = sampled_logprobs(policy)
    padded = padded_logprobs(policy, [response for response, _ in sampled])
    for prompt, (response, drawn), of_pass in zip(PROMPTS, sampled, padded, strict=True):
        expected = plain_logprobs(policy, prompt, response)
        torch.testing.assert_close(drawn, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(of_pass, expected, rtol=0, atol=1e-5)
    others = sampled_logprobs(policy, [[1, 2, 3], PROMPTS[1], [50] * 9])
    assert others[1][0] == sampled[1][0]
    assert torch.equal(others[1][1], sampled[1][1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_step_is_tried_at_its_full_length(kind: str) -> None:
    policy, masks = families.policy(kind), []
    policy.model.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["attention_mask"].shape),
        with_kwargs=True,
    )
    try_last_step(policy, size=3, width=16, num_generations=2, max_new_tokens=12)
    assert masks[-1] == (6, 1 + 16 + 11)


def gradients(policy: CausalLMPolicy) -> tuple[torch.Tensor, torch.Tensor]:
    """Each user's gradient as a run computes it, and by autograd on one row after the other."""
    responses = batch_of(Shape([[5, 9], [1]], k=2, length=6), seed=3, copies=1)
    weights = np.cos(np.arange(len(responses.user)))
    found = torch.zeros(2, policy.dimension, dtype=torch.float64)
    for users, of_users, _ in user_gradients(policy, responses, weights, batch_size=4, rows=None):
        found[users] = of_users[:, 0].double()
    truth = [gradient_of_user(policy, responses, weights, user) for user in range(2)]
    return found, torch.stack(truth)


@pytest.mark.parametrize("kind", ["gemma3_text", "xglm", "biogpt", "zamba2", "falcon_h1", "lfm2"])
def test_checkpoints_change_no_gradient(kind: str) -> None:
    """A layer is computed again in the mode in which it was computed: dropout stays off."""
    targets = {"falcon_h1": ["in_proj", "q_proj"]}.get(kind, "all-linear")
    policy = families.policy(kind, target_modules=targets)
    policy.checkpoint_layers()
    found, truth = gradients(policy)
    assert relative_error(found, truth) < 1e-5
