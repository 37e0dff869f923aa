"""Membership inference on a tuned language model: were these prompts among the private ones?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.data.users import Prompts
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rewards import Scorer
from dprlhf.rollout.logprobs import log_ratio_to_base
from dprlhf.training.evaluate import evaluate

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Roc:
    """The ROC curve of a membership score, from the strictest threshold to the loosest.

    Attributes:
        fpr: Share of non-members at or above the threshold, ``[1 + thresholds]``, from 0.
        tpr: Share of members at or above the threshold, ``[1 + thresholds]``, from 0.
        auc: Area under the curve: the probability that a member scores above a non-member.
    """

    fpr: Array
    tpr: Array
    auc: float


def roc(members: Array, others: Array) -> Roc:
    """Return the ROC of the scores ``[members]`` against ``[others]``; a tie counts half."""
    thresholds = np.unique(np.concatenate([members, others]))[::-1]
    rates = [
        np.concatenate([[0.0], (scores[:, None] >= thresholds).mean(0)])
        for scores in (others, members)
    ]
    return Roc(rates[0], rates[1], float(np.trapezoid(rates[1], rates[0])))


def membership_scores(
    policy: CausalLMPolicy,
    scorer: Scorer,
    prompts: Prompts,
    rollout: recipe.Rollout,
    *,
    seed: int = 0,
    responses: int = 8,
    max_prompt_tokens: int = 64,
) -> dict[str, Array]:
    """Return two membership scores per prompt: how far tuning moved the policy there.

    Args:
        policy: Tuned policy π; with its adapter off it is the base model μ.
        scorer: Combined rewards.
        prompts: Prompts of members and non-members.
        rollout: Rollout settings.
        seed: Seed of the responses.
        responses: Number of responses per prompt.
        max_prompt_tokens: Longest prompt in tokens.

    Returns:
        ``loss``: mean of log π(y|x) − log μ(y|x) over responses y ~ π, ``[prompts]``.
        ``reward``: mean reward of π minus that of μ, with the same random draws, ``[prompts]``.
    """
    loss, reward = np.zeros(len(prompts)), np.zeros(len(prompts))
    for draw in range(responses):
        both = [
            evaluate(
                policy,
                scorer,
                prompts,
                rollout,
                seed=seed * responses + draw,
                max_prompt_tokens=max_prompt_tokens,
                base=base,
            )
            for base in (True, False)
        ]
        reward += (both[1].rewards - both[0].rewards) / responses
        ratio = log_ratio_to_base(policy, both[1].responses, 64)
        loss += ratio.sum(1) / responses
    return {"loss": loss, "reward": reward}
