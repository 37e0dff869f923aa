"""DP-PG: the private policy gradient (He & Zhou 2025, arXiv 2510.21060, Algorithm 2).

A user contributes g_u, the mean over its responses of Â(x, y) ∇ log π_t(y|x), clipped to S. One
release a round; the released mean goes to a server-side optimizer, which is post-processing.

Departures from the paper:

- The noise is that of the analytic Gaussian mechanism (or of random allocation) at the clip norm.
  Theorem 1's σ² = 16 ln(1.25/δ) R²G²/(m²ε²) is too small: with |Â| ≤ 2R the sensitivity is 4RG/m.
- Gradients are clipped instead of assuming a bound G on ‖∇ log π‖.
- Algorithm 2 takes the gradient at y ~ μ and calls it unbiased, which holds for μ = π_t only. Here
  rows from μ ≠ π_t carry the importance ratio π_t(y|x)/μ(y|x), truncated.
- Where vLLM sampled, π_t and μ are what its kernels make of them: each row carries the ratio of
  transformers' probability to vLLM's, truncated, too (Yao et al. 2025, as in TRL).
- Both arms are used: y′ ~ π_t has a score too, and its baseline r(x, y) is independent of y′.
- No advantage is normalised over a batch (appendix H does): that would couple the users.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.boundary import Private
from dprlhf.gradients.micro_batches import language_model_rows
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.protocol import ExplicitPolicy, Rows
from dprlhf.rewards import Scores
from dprlhf.rollout.logprobs import token_logprobs
from dprlhf.updates.round import P, PrivateRound, R, counted_rows

Array = NDArray[np.float64]
Baseline = Callable[[Array, NDArray[np.bool_]], Array]

_GROUP_EPSILON = 1e-4
"""Added to a group's standard deviation, as in TRL's GRPO."""


def paired(rewards: Array, from_base: NDArray[np.bool_]) -> Array:
    """Subtract the mean of the other arm: r(x, y) − r(x, y′) (He & Zhou, Algorithm 1)."""
    # The arms are μ and π_t; on-policy, the first and the second half of the responses.
    first = from_base if from_base.any() else np.arange(rewards.shape[1]) < rewards.shape[1] // 2
    # A mask of columns gives columns that lie apart, whose sum rounds by the number of prompts.
    arms = [np.ascontiguousarray(rewards[:, chosen]) for chosen in (first, ~first)]
    means = [arm.mean(1) for arm in arms]
    others: Array = np.where(first, means[1][:, None], means[0][:, None])
    return rewards - others


def loo(rewards: Array, from_base: NDArray[np.bool_]) -> Array:
    """Leave one out (RLOO): subtract the mean reward of the prompt's other responses."""
    others = rewards.shape[1] - 1
    advantages: Array = (rewards - rewards.mean(1, keepdims=True)) * (others + 1) / others
    return advantages


def centred(rewards: Array, from_base: NDArray[np.bool_]) -> Array:
    """Center on the mean of all of the prompt's responses: GRPO without ``scale_rewards``."""
    advantages: Array = rewards - rewards.mean(1, keepdims=True)
    return advantages


def group(rewards: Array, from_base: NDArray[np.bool_]) -> Array:
    """Group-relative advantage of GRPO (arXiv 2402.03300): standardised within the prompt."""
    spread = rewards.std(1, ddof=1, keepdims=True) + _GROUP_EPSILON
    advantages: Array = centred(rewards, from_base) / spread
    return advantages


def none(rewards: Array, from_base: NDArray[np.bool_]) -> Array:
    """Return the rewards as they are; for rewards that are advantages already (control tasks)."""
    return rewards


BASELINES: dict[str, Baseline] = {
    "none": none,
    "paired": paired,
    "loo": loo,
    "centred": centred,
    "group": group,
}


LARGEST_RATIO = 2.0
"""Upper bound at which each importance ratio, π_t/μ and transformers over vLLM, is truncated."""


def policy_gradient(round_: PrivateRound[P, R], spec: recipe.PG) -> None:
    """Release the mean of the users' clipped policy gradients, and take a step along it."""
    ratio = importance_ratios(round_, spec.batch_size)
    weights = round_advantage_weights(round_, spec.baseline, ratio)
    round_.step(round_.release(round_.clipped_sum(weights, batch_size=spec.batch_size)))


def importance_ratios(round_: PrivateRound[P, R], batch_size: int) -> Private[NDArray[np.float64]]:
    """Return :func:`importance_ratio` × :func:`sampler_ratio` of each row, ``[rows]``."""
    return round_.responses.map(
        lambda rows, log_ratio, ratio: ratio * importance_ratio(rows, log_ratio, LARGEST_RATIO),
        round_.log_ratio(batch_size),
        sampler_ratios(round_, batch_size),
    )


def sampler_ratios(round_: PrivateRound[P, R], batch_size: int) -> Private[NDArray[np.float64]]:
    """Return :func:`sampler_ratio` of each row of a round, ``[rows]``."""
    return round_.responses.map(partial(sampler_ratio, round_.policy, batch_size=batch_size))


def round_advantage_weights(
    round_: PrivateRound[P, R], baseline: str, ratio: Private[NDArray[np.float64]]
) -> Private[NDArray[np.float64]]:
    """Return :func:`advantage_weights` of a round, ``[rows]``, or ``[rows, response]`` by turn."""
    weights = partial(advantage_weights, baseline=baseline)
    return round_.responses.map(weights, round_.scores, round_.valid, ratio)


def advantage_weights(
    responses: Rows,
    scores: Scores,  # [rows]
    valid: NDArray[np.bool_],  # [users]
    ratio: NDArray[np.float64],  # The importance ratio of each row, [rows]
    *,
    baseline: str,
) -> NDArray[np.float64]:
    """Return each row's weight: advantage × importance ratio / the user's number of responses."""
    rewards = scores.values if scores.returns is None else scores.returns
    if not len(responses.user):
        return np.empty_like(rewards)
    k = len(responses.user) // len(responses.prompts)
    columns = rewards.reshape(len(responses.user), -1).T
    advantages = np.stack(
        [BASELINES[baseline](c.reshape(-1, k), responses.from_base[:k]).ravel() for c in columns], 1
    )
    of_user = np.bincount(responses.user, minlength=responses.users)
    weights = advantages * (ratio / of_user[responses.user])[:, None]
    counted = counted_rows(responses, valid)[:, None]
    weights = np.where(counted, weights, 0.0)
    if scores.returns is None:
        return weights.reshape(rewards.shape)
    return np.take_along_axis(weights, language_model_rows(responses).turn, 1)


def importance_ratio(
    responses: Rows, log_ratio: NDArray[np.float64], largest: float
) -> NDArray[np.float64]:
    """Return min(π_t(y|x)/μ(y|x), largest) for rows from μ, and 1 for rows from π_t, ``[rows]``."""
    ratio = np.exp(np.minimum(log_ratio.sum(1), math.log(largest)))
    return np.where(responses.from_base, ratio, 1.0)


def sampler_ratio(
    policy: CausalLMPolicy | ExplicitPolicy, rows: Rows, *, batch_size: int
) -> NDArray[np.float64]:
    """Return min(p(y|x)/q(y|x), 2), ``[rows]``: p as transformers computes it, q as vLLM sampled.

    Both are of the row's own policy, π_t or μ. It is 1 for rows that vLLM did not sample.
    """
    ratio = np.ones(len(rows.user))
    if (sampled := getattr(rows, "sampled", None)) is None or isinstance(policy, ExplicitPolicy):
        return ratio
    for base in np.unique(rows.from_base):
        chosen = np.flatnonzero(rows.from_base == base)
        with policy.base() if base else contextlib.nullcontext():
            own = token_logprobs(policy, language_model_rows(rows).take(chosen), batch_size)
        gap = (own - sampled[chosen]).sum(1)
        ratio[chosen] = np.exp(np.minimum(gap, math.log(LARGEST_RATIO)))
    return ratio
