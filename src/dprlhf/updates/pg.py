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

import math

import numpy as np
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.boundary import Private, open_private
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses
from dprlhf.rollout.logprobs import log_ratio_to_base
from dprlhf.updates.baselines import BASELINES
from dprlhf.updates.round import PrivateRound


def policy_gradient(round_: PrivateRound, spec: recipe.PG) -> None:
    """Release the mean clipped policy gradient, and step along it."""
    weights = Private(_weights(round_, spec))
    round_.step(round_.release(round_.clipped_sum(weights, batch_size=spec.batch_size)))


def _weights(round_: PrivateRound, spec: recipe.PG) -> NDArray[np.float64]:
    responses = open_private(round_.responses)
    ratio = importance_ratio(round_.policy, responses, spec.batch_size, spec.max_importance_ratio)
    return round_advantage_weights(round_, spec.baseline, ratio)


def round_advantage_weights(
    round_: PrivateRound, baseline: str, ratio: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return :func:`weigh` of a round, with a part of r − V(x) in Â where there is a critic."""
    responses, scores = open_private(round_.responses), open_private(round_.scores)
    values = None if round_.values is None else open_private(round_.values)
    weight = round_.critic.weight if round_.critic is not None else 0.0
    return advantage_weights(
        responses, scores, open_private(round_.valid), baseline, ratio, values=values, weight=weight
    )


def advantage_weights(
    responses: Responses,
    scores: Scores,
    valid: NDArray[np.bool_],
    baseline: str,
    ratio: NDArray[np.float64],
    *,
    values: NDArray[np.float64] | None = None,
    weight: float = 0.0,
) -> NDArray[np.float64]:
    """Return each row's weight: advantage × importance ratio / the user's number of responses.

    Scores of each token, ``[rows, response]``, give weights of each token: at a token the baseline
    is that of the other responses' rewards-to-go. A user that is not ``valid`` contributes zero.

    With V(x) of each row, ``values``, ``[rows]``, an advantage is so much (``weight``) of r − V(x)
    and the rest of the baseline's.
    """
    if not len(responses.user):
        return np.empty_like(scores.values)
    k = len(responses.user) // len(responses.prompts)
    columns = scores.values.reshape(len(responses.user), -1).T
    advantages = np.stack(
        [BASELINES[baseline](c.reshape(-1, k), responses.from_base[:k]).ravel() for c in columns], 1
    )
    if values is not None:
        advantages = (1 - weight) * advantages + weight * (columns.T - values[:, None])
    of_user = np.bincount(responses.user, minlength=responses.users)
    weights = advantages * (ratio / of_user[responses.user])[:, None]
    return np.where(valid[responses.user, None], weights, 0.0).reshape(scores.values.shape)


def importance_ratio(
    policy: CausalLMPolicy, responses: Responses, batch_size: int, largest: float
) -> NDArray[np.float64]:
    """Return min(π_t(y|x)/μ(y|x), largest) for rows from μ, and 1 for rows from π_t, ``[rows]``."""
    ratio = np.ones(len(responses.user))
    rows = np.flatnonzero(responses.from_base)
    log_ratio = log_ratio_to_base(policy, responses, batch_size, rows).sum(1)
    ratio[rows] = np.exp(np.minimum(log_ratio, math.log(largest)))
    return ratio
