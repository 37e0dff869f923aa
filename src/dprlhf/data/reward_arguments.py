"""Rewards as a program passes them: by name, as an object, or with a weight."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from dprlhf.data.given_rewards import GivenReward, is_model
from dprlhf.errors import DprlhfError
from dprlhf.recipe import IN_MEMORY, Reward

_FORMS = (
    "give a function with TRL's signature, the hub id or folder of a classifier, 'module:function',"
    " a sequence classifier, a recipe.Reward, or a pair (reward, weight)"
)


def given_rewards(reward: Any, weights: Any = None, tokenizers: Any = None) -> list[GivenReward]:
    """Return the rewards of TRL's arguments ``reward_funcs`` and ``reward_processing_classes``."""
    several = isinstance(reward, list | tuple) and not _is_pair(reward)
    rewards = list(reward) if several else [reward]
    if weights is not None and any(_is_pair(one) for one in rewards):
        raise DprlhfError("reward_weights: a reward has a weight already, in its pair")
    pairs: list[tuple[Any, Any]] = [one if _is_pair(one) else (one, None) for one in rewards]
    if weights is not None:
        if isinstance(weights, str) or not hasattr(weights, "__len__"):
            raise DprlhfError(f"reward_weights: give a list of numbers, not {weights!r}")
        _check_count("reward_weights", weights, rewards)
        pairs = [(one, weight) for (one, _), weight in zip(pairs, weights, strict=True)]
    each = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers]
    if tokenizers is None:
        each = [None] * len(rewards)
    _check_count("reward_processing_classes", each, rewards)
    for tokenizer in each:
        if not (tokenizer is None or callable(tokenizer)):
            raise DprlhfError(
                f"reward_processing_classes: a {type(tokenizer).__name__} is no tokenizer"
            )
    return [_given(*pair, tokenizer) for pair, tokenizer in zip(pairs, each, strict=True)]


def named_reward(name: str) -> Reward:
    """Return the settings of a reward that is given by its name.

    >>> named_reward("my_rewards.py:concise").function
    'my_rewards.py:concise'
    >>> named_reward("org/toxicity").classifier
    'org/toxicity'
    """
    if ":" in name and not name.startswith("asset:"):
        return Reward(function=name)
    return Reward(classifier=name)


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and isinstance(value[1], Real)
        and not isinstance(value[1], bool)
    )


def _given(one: Any, weight: Any, tokenizer: Any) -> GivenReward:
    changes: dict[str, Any] = {}
    if weight is not None:
        number = math.nan
        with contextlib.suppress(TypeError, ValueError):
            number = number if isinstance(weight, str) else float(weight)
        if not math.isfinite(number):
            raise DprlhfError(f"reward_weights: a weight must be a finite number, not {weight!r}")
        changes["weight"] = number
    if isinstance(one, str):
        one = named_reward(one)
    if isinstance(one, Reward):
        named = Reward.model_validate(one.model_dump() | changes)
        return GivenReward(named, tokenizer=tokenizer)
    if is_model(one):
        return GivenReward(Reward(function=IN_MEMORY, **changes), one, tokenizer)
    if isinstance(one, type):
        raise DprlhfError(f"reward: {one.__name__} is a class: give an instance of it")
    if hasattr(one, "times_column"):  # a LoadedReward, whose room is above this one
        kept = {"weight": one.weight, "times_column": one.times_column}
        return GivenReward(Reward(function=IN_MEMORY, **{**kept, **changes}), one)
    if not callable(one):
        raise DprlhfError(f"reward: a {type(one).__name__} is no reward: {_FORMS}")
    return GivenReward(Reward(function=IN_MEMORY, **changes), one)


def _check_count(name: str, values: Sequence[Any], rewards: Sequence[Any]) -> None:
    if len(values) != len(rewards):
        raise DprlhfError(f"{name}: {len(values)} for {len(rewards)} rewards")
