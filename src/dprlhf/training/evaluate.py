"""Evaluation on public prompts, which costs no privacy."""

from __future__ import annotations

import contextlib
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.data.users import Prompts
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rewards import Scorer
from dprlhf.rewards.private import score_responses
from dprlhf.rollout import Responses, sample
from dprlhf.rollout.logprobs import log_ratio_to_base

# Evaluation draws need no secrecy, and the same draws before and after make the two comparable.
_PUBLIC_KEY = bytes(32)


@dataclass(frozen=True)
class RewardEstimate:
    """Mean reward over public prompts with its standard error."""

    mean: float
    standard_error: float
    prompts: int

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Evaluated:
    """One policy's continuations of the public prompts, and their rewards, ``[prompts]``."""

    rewards: NDArray[np.float64]
    responses: Responses

    @property
    def estimate(self) -> RewardEstimate:
        """Return the mean reward and its standard error."""
        return estimate(self.rewards)


def drift_metrics(
    policy: CausalLMPolicy, responses: Responses, batch_size: int
) -> dict[str, float]:
    """Return metrics of PUBLIC responses that reveal reward hacking while the reward rises.

    Args:
        policy: The policy that sampled the responses.
        responses: Responses to the prompts of an evaluation.
        batch_size: Number of rows in a forward pass.

    Returns:
        The mean length in tokens; the share of responses that ended before the length limit; and
        the mean of log π_t(y|x) − log μ(y|x) in nats, an estimate of KL(π_t ‖ μ) for a response at
        the sampling temperature.
    """
    lengths = responses.response_mask.sum(1)
    last = responses.tokens[:, -responses.max_new_tokens :].gather(1, lengths[:, None] - 1)
    ended = torch.isin(last, torch.tensor(policy.end_tokens))
    return {
        "public_response_tokens": float(lengths.double().mean()),
        "public_ended_share": float(ended.double().mean()),
        "public_kl": float(log_ratio_to_base(policy, responses, batch_size).sum(1).mean()),
    }


def estimate(values: NDArray[np.float64]) -> RewardEstimate:
    """Return the mean of values, ``[prompts]``, and its standard error."""
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return RewardEstimate(float(values.mean()), error, len(values))


def evaluate(
    policy: CausalLMPolicy,
    scorer: Scorer,
    prompts: Prompts,
    rollout: recipe.Rollout,
    *,
    seed: int,
    max_prompt_tokens: int,
    base: bool = False,
    tick: Any = None,
) -> Evaluated:
    """Sample one continuation of each public prompt and score it.

    Args:
        policy: The policy that samples the continuations.
        scorer: The rewards that score them.
        prompts: Public prompts.
        rollout: The recipe's sampling settings.
        seed: Seed of the draws: with the same seed, two policies can be compared draw by draw.
        max_prompt_tokens: Longer prompts are cut on the left.
        base: Evaluate the base model (the adapter switched off) in place of the policy.
        tick: Called with the number of rows done since the last call.
    """
    one = rollout.model_copy(update={"responses": 1, "base_policy": "on-policy"})
    with policy.base() if base else contextlib.nullcontext():
        responses = sample(
            policy,
            prompts,
            one,
            key=_PUBLIC_KEY,
            context=("evaluation", seed),
            max_prompt_tokens=max_prompt_tokens,
            tick=tick,
        )
    scores = score_responses(scorer, responses)
    return Evaluated(scores.values, responses)
