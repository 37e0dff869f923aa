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
    """The trade-off of a score, from the strictest threshold on.

    Attributes:
        fpr: share of non-members above the threshold, ``[thresholds]``.
        tpr: share of members above it.
        auc: the probability that a member scores above a non-member; ½ is chance.
    """

    fpr: Array
    tpr: Array
    auc: float


def roc(members: Array, others: Array) -> Roc:
    """Return the ROC of scores ``[members]`` and ``[others]``; ties count half."""
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
    """Score how far tuning moved the policy at each prompt, ``[prompts]`` each.

    Returns:
        ``loss``: the mean of log π(y|x) − log μ(y|x) over responses y ~ π: how much better the
        tuned policy predicts its own answers than the base does. ``reward``: the rise of the
        reward, with the same draws before and after.
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
