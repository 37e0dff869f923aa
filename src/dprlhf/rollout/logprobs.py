"""Log-probabilities of a round's own responses, without gradients."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf.hardware import to_device
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.protocol import Sampling
from dprlhf.rollout import Responses
from dprlhf.rollout.batch import in_batches
from dprlhf.rollout.sampling import prompts_at_once

Array = NDArray[np.float64]


def base_logprobs(policy: CausalLMPolicy, responses: Responses, batch_size: int) -> Array:
    """Return log μ of each response token under the base model at temperature 1, nothing cut."""
    # exp of minus its mean over tokens is the base model's perplexity of the responses.
    with policy.base(), policy.sampled_with(Sampling(), temperature=1.0):
        return token_logprobs(policy, responses, batch_size)


@torch.no_grad()
def token_logprobs(
    policy: CausalLMPolicy,
    responses: Responses,
    batch_size: int,
) -> Array:
    """Return log π_θ(token | before), ``[rows, response]``; 0 on padding and tools' tokens."""
    # π_θ is the distribution that responses are sampled from, top-k and so on included.
    values = np.zeros((len(responses.user), responses.max_new_tokens))
    shared_rows = responses.shared_rows(policy)
    for rows in in_batches(
        responses.grid.ravel(), rows_at_once(policy, responses, batch_size, shared_rows)
    ):
        tokens, mask = (to_device(t, policy.device) for t in responses.micro_batch(rows))
        logprobs = policy.response_logprobs(
            tokens,
            mask,
            responses.max_new_tokens,
            shared_rows,
            responses.replay(rows, shared_rows),
        )
        own = to_device(responses.policy_micro_batch(rows), policy.device)
        real = torch.where(own.bool(), logprobs, 0.0).double().cpu().numpy()
        values[rows[rows >= 0]] = real[rows >= 0]
    return values


def rows_at_once(
    policy: CausalLMPolicy, responses: Responses, batch_size: int, shared_rows: int = 1
) -> int:
    """Return how many rows a pass has, so that no user's rows depend on another's."""
    if policy.mixes_rows:
        return prompts_at_once(policy, batch_size, max(1, responses.grid.shape[2]))[1]
    return max(1, batch_size // shared_rows) * shared_rows


def log_ratio_to_base(
    policy: CausalLMPolicy,
    responses: Responses,
    batch_size: int,
) -> Array:
    """Return log π_θ(token) − log π_ref(token) as :func:`token_logprobs` does, nothing cut."""
    # The two policies keep different tokens: the ratio would be infinite where one drops it.
    with policy.sampled_with(Sampling()):
        current = token_logprobs(policy, responses, batch_size)
        with policy.base():
            return current - token_logprobs(policy, responses, batch_size)
