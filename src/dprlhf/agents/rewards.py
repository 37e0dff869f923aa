"""The rewards that an environment gives itself, for a trajectory or for each turn."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from dprlhf.agents.agent import EnvironmentFactories, factories_by_name
from dprlhf.recipe import Reward

ENVIRONMENT_REWARD = "dprlhf.agents.rewards:environment_reward"
"""The name of :func:`environment_reward` in a recipe."""

_BY_TURN = "dprlhf.agents.rewards:environment_turn_rewards"


async def environment_reward(environments: Sequence[Any], **columns: Any) -> list[float | None]:
    """Return what each trajectory's environment says of it, by its method ``get_reward``.

    It is called for one user at a time: a call in which another user's environment fails would be
    repeated, and an environment may answer something else when it is asked again.

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


environment_reward.dprlhf_per_user = True  # type: ignore[attr-defined]


def environment_turn_rewards(turn_rewards: Sequence[Any], **columns: Any) -> list[Any]:
    """Return what each trajectory's environment said of its turns, by ``get_turn_reward``.

    It is called after each turn of the policy and the tools that the turn called.

    Args:
        turn_rewards: A list for each trajectory, with a score or None for each of its turns; None
            for one whose environment has no ``get_turn_reward``.
        **columns: The other values that rewards get.
    """
    return list(turn_rewards)


def environment_rewards(factory: EnvironmentFactories | None) -> list[Reward]:
    """Return the rewards that the environments of a factory, or of one of several, give."""
    factories = factories_by_name(factory).values()
    made = [make if isinstance(make, type) else make() for make in factories]

    def given(name: str) -> bool:
        return any(callable(getattr(one, name, None)) for one in made)

    of_all = [Reward(function=ENVIRONMENT_REWARD)] if given("get_reward") else []
    by_turn = Reward(function=_BY_TURN, by_turn=True)
    return [*of_all, by_turn] if given("get_turn_reward") else of_all
