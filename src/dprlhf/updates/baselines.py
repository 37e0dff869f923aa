"""Advantages from one user's own responses: no baseline here looks at another user.

Each function takes rewards ``[prompts, responses]`` and returns advantages of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Baseline = Callable[[Array], Array]

_GROUP_EPSILON = 1e-4
"""Added to a group's standard deviation, as in TRL's GRPO."""


def paired(rewards: Array) -> Array:
    """Subtract the mean of the other half: r(x, y) − r(x, y′) (He & Zhou, Algorithm 1)."""
    # Columns that lie apart would have a sum that rounds by the number of prompts.
    halves = [np.ascontiguousarray(half) for half in np.split(rewards, [rewards.shape[1] // 2], 1)]
    first, second = (half.mean(1, keepdims=True) for half in halves)
    return np.concatenate([halves[0] - second, halves[1] - first], 1)


def loo(rewards: Array) -> Array:
    """Leave one out (RLOO): subtract the mean reward of the prompt's other responses."""
    others = rewards.shape[1] - 1
    advantages: Array = (rewards - rewards.mean(1, keepdims=True)) * (others + 1) / others
    return advantages


def centred(rewards: Array) -> Array:
    """Center on the mean of all of the prompt's responses: GRPO without ``scale_rewards``."""
    advantages: Array = rewards - rewards.mean(1, keepdims=True)
    return advantages


def group(rewards: Array) -> Array:
    """Group-relative advantage of GRPO (arXiv 2402.03300): standardised within the prompt."""
    spread = rewards.std(1, ddof=1, keepdims=True) + _GROUP_EPSILON
    advantages: Array = centred(rewards) / spread
    return advantages


def none(rewards: Array) -> Array:
    """Return the rewards as they are; for rewards that are advantages already (control tasks)."""
    return rewards


BASELINES: dict[str, Baseline] = {
    "none": none,
    "paired": paired,
    "loo": loo,
    "centred": centred,
    "group": group,
}
