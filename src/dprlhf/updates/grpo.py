"""DP-GRPO: group relative policy optimisation (arXiv 2402.03300) under user-level privacy.

A user's objective is the mean over its responses y_i to a prompt of

    (1/|y_i|) Σ_t min(ρ_t Â_i, clip(ρ_t, 1 − c, 1 + c) Â_i),    ρ_t = π_θ(y_t|…) / π_old(y_t|…),

with Â_i relative to the user's own responses to that prompt (GRPO's group). Its gradient at π_t
weighs ∇ log π of each token by ρ_t Â_i / |y_i| where the minimum is not the clipped one, else by 0.
It is clipped to S; there is one release a round.

Departures from the paper, and why:

- One step on each batch: a second one would be a second release, at its own privacy cost. (Several
  steps inside a user before one release are DP-PPO.) For a row from π_t, ρ_t = 1 and nothing is
  clipped: the update is DP-PG with the group baseline and length-normalised responses.
- For a row from μ ≠ π_t, π_old is μ. A token's ratio leaves out how likely the tokens before it
  are, as in PPO: that is biased, with less variance than DP-PG's ratio of whole responses. Where Â
  is negative nothing bounds ρ_t, so the weight's ratio is truncated at ``LARGEST_RATIO``.
- Lengths divide within a user only. A count of the batch's tokens, as other GRPO losses have it
  (arXiv 2503.14476), would couple the users; so would advantages scaled over the batch.
- The KL penalty is part of the reward (see :mod:`dprlhf.updates.round`), not of the loss.

``scale_rewards: false`` leaves the group's standard deviation out (arXiv 2503.20783): dividing by
it gives prompts whose responses score almost alike as much weight as the others.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.rollout import Responses
from dprlhf.rollout.logprobs import Array
from dprlhf.updates.pg import LARGEST_RATIO, round_advantage_weights, sampler_ratios
from dprlhf.updates.round import PrivateRound


def grpo(round_: PrivateRound, spec: recipe.GRPO) -> None:
    """Release the mean of the users' clipped surrogate gradients, and take a step along it."""
    weights = round_.responses.map(
        partial(token_weights, spec=spec),
        round_advantage_weights(
            round_,
            "group" if spec.scale_rewards else "centred",
            sampler_ratios(round_, spec.batch_size),
        ),
        round_.log_ratio(spec.batch_size),
    )
    round_.step(round_.release(round_.clipped_sum(weights, batch_size=spec.batch_size)))


def token_weights(
    responses: Responses, advantages: Array, log_ratio: Array, spec: recipe.GRPO
) -> Array:
    """Return the weight of each token's ∇ log π, ``[rows, response]``."""
    real = responses.policy_mask.numpy()
    with np.errstate(over="ignore"):  # an infinite ratio is clipped or truncated
        ratio = np.where(responses.from_base[:, None], np.exp(log_ratio), 1.0)
    share = real / np.maximum(real.sum(1, keepdims=True), 1)
    of_tokens = advantages if advantages.ndim == 2 else advantages[:, None]
    weights: Array = surrogate_derivative(of_tokens, ratio, spec) * share
    return weights


def surrogate_derivative(advantages: Array, ratio: Array, spec: recipe.GRPO) -> NDArray[np.float64]:
    """Return the derivative of min(ρÂ, clip(ρ, 1 − c, 1 + c) Â) with respect to log π_θ."""
    flat = np.where(advantages > 0, ratio > 1 + spec.clip_range, ratio < 1 - spec.clip_range)
    return np.where(flat, 0.0, advantages * np.minimum(ratio, LARGEST_RATIO))
