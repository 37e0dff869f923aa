"""The reward that an environment gives itself."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from dprlhf.agents.agent import EnvironmentFactories, factories_by_name

ENVIRONMENT_REWARD = "dprlhf.agents.rewards:environment_reward"
"""The name of :func:`environment_reward` in a recipe."""


async def environment_reward(environments: Sequence[Any], **columns: Any) -> list[float | None]:
    """Return what each trajectory's environment says of it, by its method ``get_reward``.

    Args:
        environments: The environments of the trajectories.
        **columns: The other values that rewards get.

    Returns:
        A score for each trajectory; None for one whose environment has no ``get_reward``.
    """
    scores = []
    for one in environments:
        score = one.get_reward() if callable(getattr(one, "get_reward", None)) else None
        scores.append(await score if inspect.isawaitable(score) else score)
    return scores


def gives_reward(factory: EnvironmentFactories | None) -> bool:
    """Return whether the environments of a factory, or of one of several, give a reward."""
    return any(
        callable(getattr(make if isinstance(make, type) else make(), "get_reward", None))
        for make in factories_by_name(factory).values()
    )
