"""DP-GRPO: group relative policy optimisation (arXiv 2402.03300) under user-level privacy.

A user's objective is the mean over its responses y_i to a prompt of

    (1/|y_i|) Σ_t Â_i log π(y_t|…),

with Â_i relative to the user's own responses to that prompt (GRPO's group). Its gradient at π_t is
clipped to S; there is one release a round.

Departures from the paper, and why:

- One step on each batch: a second one would be a second release, at its own privacy cost. (Several
  steps inside a user before one release are DP-PPO.) So the ratio π_θ/π_old of PPO's surrogate is
  1 and nothing is clipped: this is DP-PG with the group baseline and length-normalised responses.
- Lengths divide within a user only. A count of the batch's tokens, as other GRPO losses have it
  (arXiv 2503.14476), would couple the users; so would advantages scaled over the batch.
- The KL penalty is part of the reward (see :mod:`dprlhf.updates.kl`), not of the loss.

``scale_rewards: false`` leaves the group's standard deviation out (arXiv 2503.20783): dividing by
it gives prompts whose responses score almost alike as much weight as the others.
"""

from __future__ import annotations

import numpy as np

from dprlhf import recipe
from dprlhf.rollout import Responses
from dprlhf.rollout.logprobs import Array
from dprlhf.updates.pg import round_advantage_weights
from dprlhf.updates.round import PrivateRound


def grpo(round_: PrivateRound, spec: recipe.GRPO) -> None:
    """Release the mean of the users' clipped gradients, and take a step along it."""
    weights = round_.responses.map(
        token_weights,
        round_advantage_weights(round_, "group" if spec.scale_rewards else "centred"),
    )
    round_.step(round_.release(round_.clipped_sum(weights, batch_size=spec.batch_size)))


def token_weights(responses: Responses, advantages: Array) -> Array:
    """Return the weight of each token's ∇ log π, ``[rows, response]``."""
    real = responses.policy_mask.numpy()
    share: Array = real / np.maximum(real.sum(1, keepdims=True), 1)
    return (advantages if advantages.ndim == 2 else advantages[:, None]) * share
