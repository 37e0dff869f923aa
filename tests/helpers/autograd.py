"""Ground truth for gradients: plain autograd, one response after the other."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

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
        logits = policy.model(input_ids=ids[None]).logits[0] / policy.temperature
        log_probabilities = torch.log_softmax(logits, dim=-1)
        score = sum(log_probabilities[i - 1, ids[i]] for i in range(prompt, len(ids)))
        assert isinstance(score, torch.Tensor)
        gradients = torch.autograd.grad(score, parameters)
        total += float(weights[row]) * torch.cat([g.flatten() for g in gradients]).double()
    return total


def relative_error(measured: torch.Tensor, truth: torch.Tensor) -> float:
    return float((measured - truth).norm() / truth.norm())
