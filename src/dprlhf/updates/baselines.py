"""Advantages from one user's own responses: no baseline here looks at another user.

Each function takes rewards ``[prompts, responses]`` and ``from_base``, a mask of the responses that
were sampled from μ, and returns advantages of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

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
