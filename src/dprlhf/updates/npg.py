"""DP-NPG: the private natural policy gradient (He & Zhou 2025, arXiv 2510.21060, Algorithm 3).

Regresses advantages on features φ = ∇ log π_t(y|x): w_t is a private, approximate minimiser of
E (Â − w · φ)² with ‖w‖ ≤ W, and θ ← θ_t + η w_t: exactly so with ``optimizer: {name: sgd,
learning_rate: η}`` (Adam would rescale each coordinate of w). Without noise and bounds w_t is
F†∇J, with F = E φφᵀ the Fisher matrix. The round releases what its oracle asks for, J noised
gradients or one vector of sufficient statistics, and is charged for it in advance.

Departures from the paper:

- Algorithm 3 regresses under y ~ μ, where the minimiser is F†∇J only if μ = π_t. Here an example
  from μ ≠ π_t counts with its truncated importance ratio ρ, its φ and Â both times √ρ.
- Both arms are used, as in DP-PG, and baselines are those of one user's own responses.
- Features are scaled down to norm S = ``clip_norm`` in place of the assumption ‖∇ log π‖ ≤ G.
- Algorithm 4, the exponential mechanism, needs a finite candidate set and is not offered for
  language models; by itself it is in ``papers/regression``. Its printed exponent is too large for
  |Â| ≤ 2R, as the file explains.
- One user is one unit of privacy and one term of the sum, however many examples it has.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.policies.protocol import Rows
from dprlhf.rewards import Scores
from dprlhf.updates.pg import advantage_weights, importance_ratios
from dprlhf.updates.regression import Examples, solve
from dprlhf.updates.round import P, PrivateRound, R, counted_rows

LARGEST_SCORE = 3.0
"""Bound R for the baseline ``group``, whose |Â| is at most (k − 1)/√k: 2.5 at k = 8 responses. From
k = 11 on an advantage can be larger, and is clipped."""


def npg(round_: PrivateRound[P, R], spec: recipe.NPG) -> None:
    """Let the regression oracle find w (its answers are the round's releases), and step along w."""
    reward_range = round_.telemetry.reward_range
    examples = round_.responses.map(
        partial(response_examples, baseline=spec.baseline),
        round_.scores,
        round_.valid,
        importance_ratios(round_, spec.batch_size),
    )
    w = solve(
        round_,
        examples,
        spec.oracle,
        target_bound=LARGEST_SCORE if spec.baseline == "group" else 2 * reward_range,
        batch_size=spec.batch_size,
    )
    round_.step(w)


def response_examples(
    responses: Rows,
    scores: Scores,
    valid: NDArray[np.bool_],  # [users]
    ratio: NDArray[np.float64],  # Truncated importance ratio ρ of each row, [rows]
    baseline: str,
) -> Examples:
    """Return one example for each response: feature √ρ ∇ log π(y|x) and target √ρ Â."""
    of_user = np.bincount(responses.user, minlength=responses.users)[responses.user]
    root = np.where(counted_rows(responses, valid), np.sqrt(ratio), 0.0)
    targets = advantage_weights(responses, scores, valid, root, baseline=baseline) * of_user
    return Examples(responses, root, targets, rows=1)
