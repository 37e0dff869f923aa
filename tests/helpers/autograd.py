"""Ground truth for gradients: plain autograd, one response after the other."""

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rollout import Responses


def gradient_of_user(
    policy: CausalLMPolicy, responses: Responses, weights: NDArray[np.float64], user: int
) -> torch.Tensor:
    """Σ weight · ∇ log π(y|x) by autograd on one unpadded sequence after the other, ``[d]``."""
    parameters = [p for _, p in policy.model.named_parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for row in np.flatnonzero((responses.user == user) & (weights != 0)):
        ids = responses.tokens[row][responses.mask[row].bool()]
        prompt = int(responses.mask[row, : -responses.max_new_tokens].sum())
        logits = policy.model(input_ids=ids[None]).logits[0]
        score = sum(
            log_distribution(policy, logits[i - 1])[ids[i]] for i in range(prompt, len(ids))
        )
        assert isinstance(score, torch.Tensor)
        gradients = torch.autograd.grad(score, parameters)
        total += float(weights[row]) * torch.cat([g.flatten() for g in gradients]).double()
    return total


def log_distribution(policy: CausalLMPolicy, logits: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of the next token, by transformers' own processors, ``[vocabulary]``.

    Args:
        policy: The policy, with its temperature and its settings of sampling.
        logits: Logits of the next token, ``[vocabulary]``.
    """
    sampling, processors = policy.sampling, LogitsProcessorList()
    processors.append(TemperatureLogitsWarper(policy.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    nothing = torch.empty(1, 0, dtype=torch.long)  # what stands before changes none of these
    return torch.log_softmax(processors(nothing, logits[None])[0], dim=-1)


def relative_error(measured: torch.Tensor, truth: torch.Tensor) -> float:
    return float((measured - truth).norm() / truth.norm())
