"""The rewards that an environment gives itself, for a trajectory or for each turn."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from dprlhf.agents.agent import EnvironmentFactories, factories_by_name
from dprlhf.recipe import Reward
from dprlhf.rewards.reward import wait_for

ENVIRONMENT_REWARD = "dprlhf.agents.rewards:environment_reward"
"""The name of :func:`environment_reward` in a recipe."""

_BY_TURN = "dprlhf.agents.rewards:environment_turn_rewards"


def environment_reward(environments: Sequence[Any], **columns: Any) -> list[float | None]:
    """Return each trajectory's ``get_reward()``; None where it has no such method."""
    # One user at a time: a call in which another user's environment fails would be repeated, and an
    # environment may answer something else when it is asked again.
    scores = []
    for one in environments:
        score = one.get_reward() if callable(getattr(one, "get_reward", None)) else None
        scores.append(wait_for(score) if inspect.isawaitable(score) else score)
    return scores


environment_reward.dprlhf_per_user = True  # type: ignore[attr-defined]


def environment_turn_rewards(turn_rewards: Sequence[Any], **columns: Any) -> list[Any]:
    """Return each trajectory's ``get_turn_reward()``, called after each turn and its tools."""
    return list(turn_rewards)


environment_turn_rewards.dprlhf_by_turn = True  # type: ignore[attr-defined]


def environment_rewards(factory: EnvironmentFactories | None) -> list[Reward]:
    """Return the rewards that the environments of a factory, or of one of several, give."""
    of_all = [Reward(function=ENVIRONMENT_REWARD)] if rewarding(factory) else []
    by_turn = Reward(function=_BY_TURN)
    return [*of_all, by_turn] if rewarding(factory, "get_turn_reward") else of_all


def rewarding(factory: EnvironmentFactories | None, method: str = "get_reward") -> list[str]:
    """Return the names of the classes of environments that have a method of this name."""
    factories = factories_by_name(factory).values()
    classes = [make if isinstance(make, type) else type(make()) for make in factories]
    names = (one.__name__ for one in classes if callable(getattr(one, method, None)))
    return list(dict.fromkeys(names))
