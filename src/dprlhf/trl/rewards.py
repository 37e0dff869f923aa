"""Rewards as TRL's trainers take them, with their names in the logs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dprlhf.agents.rewards import ENVIRONMENT_REWARD, environment_reward, rewarding
from dprlhf.data.given_rewards import GivenReward, given_rewards, is_model
from dprlhf.errors import DprlhfError
from dprlhf.recipe import Reward
from dprlhf.rewards.reward import name_of


def trl_rewards(
    reward_funcs: Any,
    weights: Sequence[float] | None,
    processing_classes: Any,
    *,
    alone: bool = True,
) -> list[GivenReward]:
    """Return the rewards of a trainer.

    Args:
        reward_funcs: A name of a sequence classifier, a model, a callable, or a list of these.
        weights: A weight for each; None for weights 1.
        processing_classes: A tokenizer for each model; None for the model's own.
        alone: Whether no environment gives a reward beside them.

    Raises:
        DprlhfError: There is no reward, or the lengths differ.
    """
    if alone and (reward_funcs is None or reward_funcs in ([], ())):
        raise DprlhfError("reward_funcs: give a reward: a callable, a classifier's name or a model")
    return given_rewards(reward_funcs, weights, processing_classes)


def names_of(rewards: Sequence[GivenReward], environments: Any = None) -> list[str]:
    """Return the names of rewards in the logs, as TRL gives them.

    Args:
        environments: TRL's ``environment_factory``, whose classes name the reward that they give.
    """
    return [_name(reward.settings, reward.given, environments) for reward in rewards]


def means_of(rewards: Sequence[GivenReward], names: Sequence[str]) -> dict[str, str]:
    """Return further names of the released mean: that of a sum does not show its terms."""
    if len(rewards) == 1 and rewards[0].settings.weight == 1.0:
        return {"reward": f"rewards/{names[0]}/mean"}
    return {}


def function_of(reward: GivenReward) -> Any:
    """Return what computes a reward: what was given, or the function or classifier of that name."""
    name = reward.settings.name
    return reward.given or (environment_reward if name == ENVIRONMENT_REWARD else name)


def _name(settings: Reward, given: Any, environments: Any) -> str:
    if given is None and settings.name == ENVIRONMENT_REWARD:
        return "+".join(rewarding(environments))
    if given is None:
        return Path(settings.name).name
    if is_model(given):
        return Path(str(getattr(given.config, "name_or_path", "") or type(given).__name__)).name
    return name_of(given)
