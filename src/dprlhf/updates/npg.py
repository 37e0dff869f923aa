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
  language models; by itself it is :class:`dprlhf.papers.regression.Exponential`. Its printed
  exponent is too large for |Â| ≤ 2R (see there).
- One user is one unit of privacy and one term of the sum, however many examples it has.
"""

from __future__ import annotations

import numpy as np

from dprlhf import recipe
from dprlhf.boundary import Private, open_private
from dprlhf.updates.pg import advantage_weights, importance_ratio
from dprlhf.updates.privls.in_round import Examples, solve
from dprlhf.updates.round import PrivateRound

LARGEST_SCORE = 3.0
"""R for the baseline ``group``, whose |Â| is at most (k − 1)/√k: 2.5 at k = 8 responses."""


def npg(round_: PrivateRound, spec: recipe.NPG) -> None:
    """Find w through the oracle, and step along it."""
    responses, scores = open_private(round_.responses), open_private(round_.scores)
    valid = open_private(round_.valid)
    reward_range = round_.telemetry.reward_range
    ratio = importance_ratio(round_.policy, responses, spec.batch_size, spec.max_importance_ratio)
    of_user = np.bincount(responses.user, minlength=responses.users)[responses.user]
    root = np.where(valid[responses.user], np.sqrt(ratio), 0.0)
    targets = advantage_weights(responses, scores, valid, spec.baseline, root) * of_user
    w = solve(
        round_,
        Private(Examples(responses, root, targets, rows=1)),
        spec.oracle,
        target_bound=LARGEST_SCORE if spec.baseline == "group" else 2 * reward_range,
        batch_size=spec.batch_size,
    )
    round_.step(w)
