"""DP-PG: the private policy gradient (He & Zhou 2025, arXiv 2510.21060, Algorithm 2).

A user contributes g_u, the mean over its responses of Â(x, y) ∇ log π_t(y|x), clipped to S. One
release a round; the released mean goes to a server-side optimizer, which is post-processing.

Departures from the paper:

- The noise is that of the analytic Gaussian mechanism (or of random allocation) at the clip norm.
  Theorem 1's σ² = 16 ln(1.25/δ) R²G²/(m²ε²) is too small: with |Â| ≤ 2R the sensitivity is 4RG/m.
- Gradients are clipped instead of assuming a bound G on ‖∇ log π‖.
- Algorithm 2 takes the gradient at y ~ μ and calls it unbiased, which holds for μ = π_t only. Here
  rows from μ ≠ π_t carry the importance ratio π_t(y|x)/μ(y|x), truncated.
- Both arms are used: y′ ~ π_t has a score too, and its baseline r(x, y) is independent of y′.
- No advantage is normalised over a batch (appendix H does): that would couple the users.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.boundary import Private, open_private
from dprlhf.gradients.clipping import ClippedSum, Weighted, clipped_sum
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses, Tick
from dprlhf.telemetry import TelemetryCoordinates
from dprlhf.updates.baselines import BASELINES


def policy_gradient_sum(
    policy: CausalLMPolicy,
    responses: Private[Responses],
    scores: Private[Scores],
    spec: recipe.Update,
    telemetry: TelemetryCoordinates,
    *,
    clip_norm: float,
    reduce: Callable[[torch.Tensor], torch.Tensor],
    tick: Tick | None = None,
) -> ClippedSum:
    """Return Σ_u of the clipped contributions, the telemetry coordinates last.

    Args:
        clip_norm: S of the plan.
        reduce: sums over processes.
    """
    opened, scored = open_private(responses), open_private(scores)
    ratio = importance_ratio(policy, opened, spec.batch_size, spec.max_importance_ratio)
    valid = users_with_valid_scores(opened, scored)
    weighted = Weighted(
        opened,
        weigh(opened, scored, valid, spec.baseline, ratio),
        telemetry.of_users(opened.user, scored.values, valid),
        telemetry.norm,
    )
    return clipped_sum(
        policy,
        Private(weighted),
        clip_norm=clip_norm,
        batch_size=spec.batch_size,
        reduce=reduce,
        tick=tick,
    )


def users_with_valid_scores(responses: Responses, scores: Scores) -> NDArray[np.bool_]:
    """Return which users have a valid score for every response, ``[users]``."""
    broken = np.bincount(responses.user, ~scores.valid, minlength=responses.users)
    valid: NDArray[np.bool_] = broken == 0
    return valid


def weigh(
    responses: Responses,
    scores: Scores,
    valid: NDArray[np.bool_],
    baseline: str,
    ratio: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return each row's weight: advantage × importance ratio / the user's number of responses.

    A user that is not ``valid`` contributes zero.
    """
    if not len(responses.user):
        return np.empty(0)
    k = len(responses.user) // len(responses.prompts)
    rewards = scores.values.reshape(-1, k)
    advantages = BASELINES[baseline](rewards, responses.from_base[:k]).ravel()
    of_user = np.bincount(responses.user, minlength=responses.users)
    weights: NDArray[np.float64] = advantages * ratio / of_user[responses.user]
    return np.where(valid[responses.user], weights, 0.0)


@torch.no_grad()
def importance_ratio(
    policy: CausalLMPolicy, responses: Responses, batch_size: int, largest: float
) -> NDArray[np.float64]:
    """Return min(π_t(y|x)/μ(y|x), largest) for rows from μ, and 1 for rows from π_t, ``[rows]``."""
    ratio = np.ones(len(responses.user))
    widths = responses.widths
    for width in np.unique(widths[responses.from_base]):
        rows = np.flatnonzero(responses.from_base & (widths == width))
        for start in range(0, len(rows), batch_size):
            chosen = rows[start : start + batch_size]
            tokens, mask = responses.micro_batch(chosen, int(width), batch_size)
            tokens, mask = tokens.to(policy.device), mask.to(policy.device)
            current = policy.response_logprobs(tokens, mask, responses.length)
            with policy.base():
                base = policy.response_logprobs(tokens, mask, responses.length)
            real = mask[:, -responses.length :].bool()
            log_ratio = torch.where(real, current - base, 0.0).sum(1).double()
            ratio[chosen] = log_ratio.exp().clamp(max=largest).cpu().numpy()[: len(chosen)]
    return ratio
