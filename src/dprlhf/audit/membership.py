"""Attacks on a tuned language model: were these prompts private, and does it tell their secrets?"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from dprlhf import recipe
from dprlhf.audit.guesses import (
    check_confidence,
    epsilon_lower_bound,
    planned_guesses,
    surest_guesses,
)
from dprlhf.data.public import in_memory_prompts
from dprlhf.data.users import Prompts
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.protocol import Sampling
from dprlhf.rewards import Scorer
from dprlhf.rollout import Responses
from dprlhf.rollout.logprobs import token_logprobs
from dprlhf.training.evaluate import evaluate
from dprlhf.training.tasks import pack, split_row

Array = NDArray[np.float64]

_ROWS = 64


@dataclass(frozen=True)
class Roc:
    """The ROC curve of a membership score, from the strictest threshold to the loosest."""

    fpr: Array  # Share of non-members at or above the threshold, [1 + thresholds], from 0
    tpr: Array  # Share of members at or above the threshold, [1 + thresholds], from 0
    auc: float  # Area under the curve: the probability that a member scores above a non-member
    standard_error: float

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Return a confidence interval of the area, within [0, 1], by the normal approximation."""
        check_confidence(confidence)
        half = float(ndtri((1 + confidence) / 2)) * self.standard_error
        return max(0.0, self.auc - half), min(1.0, self.auc + half)


def roc(members: Array, others: Array) -> Roc:
    """Return the ROC of the scores ``[members]`` against ``[others]``; a tie counts half."""
    thresholds = np.unique(np.concatenate([members, others]))[::-1]
    rates = [
        np.concatenate([[0.0], (scores[:, None] >= thresholds).mean(0)])
        for scores in (others, members)
    ]
    wins = (np.sign(members[:, None] - others) + 1) / 2
    spread = [
        np.var(share, ddof=1) / len(share) if len(share) > 1 else np.nan
        for share in (wins.mean(1), wins.mean(0))
    ]
    error = float(np.sqrt(sum(spread)))
    return Roc(rates[0], rates[1], float(np.trapezoid(rates[1], rates[0])), error)


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
    """Return membership scores per prompt, never to be published; a higher one speaks for a member.

    Reward and drift are the axes of DIBA (arXiv 2511.14045): mean rewards, and the mean of log
    π(y|x) − log μ(y|x) over y ~ π in nats. ``entropy`` is that of μ's responses.
    """
    scores = {name: np.zeros(len(prompts)) for name in ("reward", "drift", "entropy")}
    for draw in range(responses):
        rewards, likely = [], []
        for base in (True, False):
            with policy.base() if base else contextlib.nullcontext():
                done = evaluate(
                    policy,
                    scorer,
                    prompts,
                    rollout,
                    seed=seed * responses + draw,
                    max_prompt_tokens=max_prompt_tokens,
                )
                rewards.append(done.rewards)
                likely.append(_logprobs(policy, done.responses))
        with policy.base():
            under_base = _logprobs(policy, done.responses)
        scores["reward"] += (rewards[1] - rewards[0]) / responses
        scores["drift"] += (likely[1] - under_base) / responses
        scores["entropy"] += (likely[1] - likely[0]) / responses
    return scores


def _logprobs(policy: CausalLMPolicy, responses: Responses) -> Array:
    # Without top-k and the like: each policy keeps other tokens, and log 0 is no score.
    with policy.sampled_with(Sampling()):
        logprobs: Array = token_logprobs(policy, responses, _ROWS).sum(1)
    return logprobs


def likelihood_scores(
    policy: CausalLMPolicy,
    prompts: Sequence[str],
    answers: Sequence[str],
    *,
    max_prompt_tokens: int = 64,
) -> dict[str, Array]:
    """Return log π − log μ of the right answers and of the prompts, in nats, ``[prompts]``."""
    asked = {"answer": (prompts, answers), "prompt": ([""] * len(prompts), prompts)}
    scores = {}
    for name, (before, texts) in asked.items():
        tuned = text_logprobs(policy, before, texts, max_prompt_tokens=max_prompt_tokens)
        with policy.base():
            base = text_logprobs(policy, before, texts, max_prompt_tokens=max_prompt_tokens)
        scores[name] = tuned - base
    return scores


def combined_scores(
    features: Array, shadow_features: Array, shadow_included: NDArray[np.bool_]
) -> Array:
    """Return one membership score from several, by Fisher's linear discriminant, ``[prompts]``."""
    # Weights come from shadow runs with users of the attacker's own (arXiv 1610.05820).
    inside, outside = shadow_features[shadow_included], shadow_features[~shadow_included]
    within = np.atleast_2d(np.cov(inside.T) + np.cov(outside.T))
    within = within + 1e-6 * np.trace(within) * np.eye(len(within))  # features may be collinear
    weights = np.linalg.lstsq(within, inside.mean(0) - outside.mean(0))[0]
    scores: Array = features @ weights
    return scores


def membership_bound(
    scores: Array,  # Score of each candidate, [candidates]
    included: NDArray[np.bool_],  # by an independent fair coin each, [candidates]
    epsilon: float,
    delta: float,
    confidence: float = 0.95,
) -> float:
    """Return a lower bound on ε from a membership attack on a single run (arXiv 2305.08846)."""
    # No independence of scores is needed; the number of guesses depends on public numbers alone.
    guesses = planned_guesses(len(scores), epsilon, delta, confidence)
    right = surest_guesses(scores, included, guesses)
    return epsilon_lower_bound(len(scores), guesses, right, delta, confidence)


def text_logprobs(
    policy: CausalLMPolicy,
    prompts: Sequence[Any],
    texts: Sequence[str],
    *,
    max_prompt_tokens: int = 64,
    batch_size: int = 64,
) -> Array:
    """Return log π(text | prompt) of one text after each prompt, in nats, ``[prompts]``."""
    asked = in_memory_prompts(prompts)
    rows = [split_row(policy, p, [text]) for p, text in zip(prompts, texts, strict=True)]
    before, tokens = [p[-max_prompt_tokens:] for p, _ in rows], [text for _, (text,) in rows]
    length = max(map(len, tokens), default=1)
    packed = pack(policy, asked, before, tokens, length, max_prompt_tokens)
    with policy.sampled_with(Sampling()):  # nothing of the texts was sampled
        logprobs: Array = token_logprobs(policy, packed, batch_size).sum(1)
    return logprobs


def exposure(scores: Array, right: NDArray[np.int64]) -> Array:
    """Return the exposure of users' secrets in bits, ``[users]`` (arXiv 1802.08232, section 4)."""
    # log2(candidates) − log2(rank of the secret), of a tie the middle rank: all bits where it
    # scores highest, log2(e) ≈ 1.44 on average where the scores know nothing.
    own = np.take_along_axis(scores, right[:, None], 1)
    rank = 1 + (scores > own).sum(1) + ((scores == own).sum(1) - 1) / 2
    bits: Array = np.log2(scores.shape[1]) - np.log2(rank)
    return bits
