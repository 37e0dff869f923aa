"""Load the rewards that a recipe names or a program passes, each with its weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dprlhf import recipe
from dprlhf.data.given_rewards import (
    BY_TURN,
    PER_USER,
    GivenReward,
    declares,
    is_model,
    rewards_of,
)
from dprlhf.errors import DprlhfError
from dprlhf.rewards.reward import (
    LoadedReward,
    RewardFunction,
    name_of,
)

if TYPE_CHECKING:
    import torch


def load_rewards(
    specs: Sequence[recipe.Reward],
    given: Sequence[GivenReward] | None,
    *,
    device: str | torch.device = "cpu",
) -> list[LoadedReward]:
    """Load the rewards of a recipe, of which the program may pass some or all as objects."""
    return [_load(one, device) for one in rewards_of(specs, given)]


def load_reward(
    spec: Any, *, tokenizer: Any = None, device: str | torch.device = "cpu"
) -> LoadedReward:
    """Load a reward by its name or settings, or wrap one that is already in memory.

    >>> def shouting(completions):
    ...     return [float(text.isupper()) for text in completions]
    >>> load_reward(shouting).name
    'shouting'
    >>> load_reward((shouting, 0.5)).weight
    0.5
    """
    from dprlhf.data.reward_arguments import given_rewards  # which says what it may be

    rewards = given_rewards(spec, tokenizers=tokenizer)
    if len(rewards) != 1:
        raise DprlhfError(f"load_reward takes one reward, not {len(rewards)}: call it for each")
    return _load(rewards[0], device)


def _load(one: GivenReward, device: str | torch.device) -> LoadedReward:
    spec, function = one.settings, one.given
    if function is None:
        return _load_named(spec, device, one.tokenizer)
    if is_model(function):
        function = _classifier(spec, function, device, one.tokenizer)
    if isinstance(function, LoadedReward):
        changes = {"weight": spec.weight, "times_column": spec.times_column}
        return LoadedReward(**{**vars(function), **changes})
    return _loaded(function, name_of(function), spec)


def _loaded(function: RewardFunction, name: str, spec: recipe.Reward) -> LoadedReward:
    return LoadedReward(
        function,
        name,
        spec.weight,
        per_user=declares(function, PER_USER),
        by_turn=declares(function, BY_TURN),
        times_column=spec.times_column,
    )


def _load_named(
    spec: recipe.Reward, device: str | torch.device, tokenizer: Any = None
) -> LoadedReward:
    function: object
    if spec.function is not None:
        from dprlhf.rewards.functions import load_function

        source, function = spec.function, load_function(spec.function)
    else:
        assert spec.classifier is not None
        source, function = spec.classifier, _classifier(spec, spec.classifier, device, tokenizer)
    if isinstance(function, type):
        raise DprlhfError(
            f"reward {source!r} is the class {function.__name__}, not an instance: "
            f"add `name = {function.__name__}(...)` beside it and name that"
        )
    if is_model(function):
        function = _classifier(spec, function, device, tokenizer)
    if not callable(function):
        raise DprlhfError(
            f"reward {source!r} is a {type(function).__name__}, not a callable: name a function "
            "reward(prompts, completions, **columns)"
        )
    return _loaded(function, source, spec)


def _classifier(
    spec: recipe.Reward, source: Any, device: str | torch.device, tokenizer: Any = None
) -> RewardFunction:
    # Here, because torch and transformers take seconds to import.
    from dprlhf.rewards.classifier import ClassifierReward

    return ClassifierReward(
        source,
        tokenizer=tokenizer,
        label=spec.label,
        text=spec.text,
        device=device,
    )
