"""DP-REBEL (He & Zhou 2025, arXiv 2510.21060, Algorithm 5): regress relative log-ratios on rewards.

A user's loss is the mean over its pairs (y, y′) of

    (Δ(y) − Δ(y′) − Â)²,    Δ(y) = log π_θ(y|x)/π_t(y|x),    Â = r(x, y) − r(x, y′).

The i-th response of the first half is paired with the i-th of the second: y ~ μ with y′ ~ π_t when
``base_policy`` is ``reference``, two responses of π_t on-policy. The loss needs no importance
ratio: it is zero at Δ(y) − Δ(y′) = Â whatever the pairs were drawn from, which only decides how
they are weighted.

Without an oracle it takes J steps on the true loss. Each is a noised mean of clipped per-user
gradients at the current θ, and one of the J releases that the round is charged for; the server-side
optimizer steps after each.

``oracle`` (Gauss-Newton) puts (θ − θ_t) · φ in the place of Δ(y) − Δ(y′), with the feature
φ = ∇ log π_t(y|x) − ∇ log π_t(y′|x). In w = θ − θ_t that is least squares with the targets Â. A
regression oracle solves it (:mod:`dprlhf.updates.regression`), and θ ← θ_t + w: exactly so
with ``optimizer: {name: sgd, learning_rate: 1}``.

Departures from the paper, and why:

- The paper's η is 1: it multiplies Â, as the weight of the reward does.
- Step 3 minimises over θ, step 4 returns θ_t + η w_t as if the minimiser were a direction: two
  parameterisations mixed. Here θ starts at θ_t, moves towards the minimiser, and is returned; or
  w_t is the minimiser of the linearised loss, for which step 4 is right.
- Each user's gradient is clipped to S in place of a bound on ∇ log π, so what is minimised is the
  loss only up to clipping, as in DP-SGD. With an oracle, S bounds ‖φ‖.

The code that accompanies REBEL (arXiv 2404.16767) takes four epochs on each batch, ``steps: 4``
here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.boundary import Private
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses
from dprlhf.rollout.logprobs import Array, token_logprobs
from dprlhf.updates.regression import Examples, solve
from dprlhf.updates.round import PrivateRound


def rebel(round_: PrivateRound, spec: recipe.REBEL) -> None:
    """Move towards the minimiser of the loss, by J noised steps or by its linearisation."""
    if spec.oracle is not None:
        w = solve(
            round_,
            round_.responses.map(response_pairs, round_.scores, round_.valid),
            spec.oracle,
            target_bound=2 * round_.telemetry.reward_range,
            batch_size=spec.batch_size,
        )
        round_.step(w)
        return
    moved = round_.responses.map(lambda responses: np.zeros(len(responses.user)))  # Δ at θ_t
    start = _logprobs(round_, spec) if spec.steps > 1 else moved
    for step in range(spec.steps):
        if step:
            moved = _logprobs(round_, spec).map(lambda now, before: now - before, start)
        weights = round_.responses.map(loss_weights, round_.scores, round_.valid, moved)
        round_.step(round_.release(round_.clipped_sum(weights, batch_size=spec.batch_size)))


def response_pairs(responses: Responses, scores: Scores, valid: NDArray[np.bool_]) -> Examples:
    """Return the pairs: rows y, y′, y, y′, …, and targets r(x, y) − r(x, y′)."""
    rows = np.arange(len(responses.user))
    if len(rows):
        k = len(rows) // len(responses.prompts)
        rows = rows.reshape(-1, 2, k // 2).transpose(0, 2, 1).ravel()
    paired = responses.take(rows)
    counts = valid[paired.user]
    signs = np.where(np.arange(len(rows)) % 2, -1.0, 1.0)
    rewards = np.where(counts, signs * scores.values[rows], 0.0)
    return Examples(paired, np.where(counts, signs, 0.0), rewards.reshape(-1, 2).sum(1), rows=2)


def _logprobs(round_: PrivateRound, spec: recipe.REBEL) -> Private[Array]:
    """Return log π_θ(y|x) at the current parameters, ``[rows]``."""
    return round_.responses.map(
        lambda responses: token_logprobs(round_.policy, responses, spec.batch_size).sum(1)
    )


def loss_weights(
    responses: Responses, scores: Scores, valid: NDArray[np.bool_], moved: Array
) -> Array:
    """Return the weights of ∇ log π whose sum over a user's rows is −∇ of its loss, ``[rows]``."""
    if not len(responses.user):
        return np.empty(0)
    k = len(responses.user) // len(responses.prompts)
    rewards, delta = (of_row.reshape(-1, 2, k // 2) for of_row in (scores.values, moved))
    residual = delta[:, 0] - delta[:, 1] - (rewards[:, 0] - rewards[:, 1])
    slope = np.stack([residual, -residual], axis=1).ravel() * 2
    pairs = np.bincount(responses.user, minlength=responses.users) / 2
    return np.where(valid[responses.user], -slope / pairs[responses.user], 0.0)
