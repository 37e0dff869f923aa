"""DP-PG: the private policy gradient (He & Zhou 2025, arXiv 2510.21060, Algorithm 2).

A user contributes g_u, the mean over its responses of Â(x, y) ∇ log π_t(y|x), clipped to S. One
release a round; the released mean goes to a server-side optimizer, which is post-processing.

Departures from the paper:

- The noise is that of the analytic Gaussian mechanism (or of random allocation) at the clip norm.
  Theorem 1's σ² = 16 ln(1.25/δ) R²G²/(m²ε²) is too small: with |Â| ≤ 2R the sensitivity is 4RG/m.
- Gradients are clipped instead of assuming a bound G on ‖∇ log π‖.
- Algorithm 2 takes the gradient at y ~ μ and calls it unbiased, which holds for μ = π_t only: here
  all responses come from π_t (on-policy).
- Both arms are used: y′ has a score too, and its baseline r(x, y) is independent of y′.
- No advantage is normalised over a batch (appendix H does): that would couple the users.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.boundary import Private
from dprlhf.gradients.micro_batches import language_model_rows
from dprlhf.policies.protocol import Rows
from dprlhf.rewards import Scores
from dprlhf.updates.baselines import BASELINES
from dprlhf.updates.round import P, PrivateRound, R, counted_rows


def policy_gradient(round_: PrivateRound[P, R], spec: recipe.PG) -> None:
    """Release the mean of the users' clipped policy gradients, and take a step along it."""
    weights = round_advantage_weights(round_, spec.baseline)
    round_.step(round_.release(round_.clipped_sum(weights, batch_size=spec.batch_size)))


def round_advantage_weights(
    round_: PrivateRound[P, R], baseline: str
) -> Private[NDArray[np.float64]]:
    """Return :func:`advantage_weights` of a round, ``[rows]``, or ``[rows, response]`` by turn."""
    weights = partial(advantage_weights, baseline=baseline)
    return round_.responses.map(weights, round_.scores, round_.valid)


def advantage_weights(
    responses: Rows,
    scores: Scores,  # [rows]
    valid: NDArray[np.bool_],  # [users]
    *,
    baseline: str,
) -> NDArray[np.float64]:
    """Return each row's weight: its advantage over the user's number of responses."""
    rewards = scores.values if scores.returns is None else scores.returns
    if not len(responses.user):
        return np.empty_like(rewards)
    k = len(responses.user) // len(responses.prompts)
    columns = rewards.reshape(len(responses.user), -1).T
    advantages = np.stack([BASELINES[baseline](c.reshape(-1, k)).ravel() for c in columns], 1)
    of_user = np.bincount(responses.user, minlength=responses.users)
    weights = advantages * (1 / of_user[responses.user])[:, None]
    counted = counted_rows(responses, valid)[:, None]
    weights = np.where(counted, weights, 0.0)
    if scores.returns is None:
        return weights.reshape(rewards.shape)
    return np.take_along_axis(weights, language_model_rows(responses).turn, 1)
