"""Rewards that a program passes: what each is, and the recipe's section that stands for it."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dprlhf.errors import DprlhfError
from dprlhf.recipe import IN_MEMORY, Reward

BY_TURN = "dprlhf_by_turn"
"""The attribute by which a callable declares that it answers a list of scores for each trajectory
of an agent, one for each turn. A turn's tokens get the sum of the scores from that turn on."""

PER_USER = "dprlhf_per_user"
"""The attribute by which a callable declares that it compares a user's rows: it is called for one
user at a time."""


@dataclass(frozen=True, repr=False)
class GivenReward:
    """A reward that a program passes."""

    settings: Reward  # What the run's recipe says of it; its function is in-memory for an object
    given: Any = None  # The object; None where the settings name the reward
    tokenizer: Any = None  # A classifier's; None takes the one beside the model's weights


def declares(function: object, attribute: str) -> bool:
    """Return whether a callable, also inside ``functools.partial``, has an attribute that is true.

    >>> def by_step(completions):
    ...     return [[1.0] for _ in completions]
    >>> by_step.dprlhf_by_turn = True
    >>> declares(functools.partial(by_step), BY_TURN)
    True
    """
    while isinstance(function, functools.partial) and not hasattr(function, attribute):
        function = function.func
    return bool(getattr(function, attribute, False))


def is_model(value: Any) -> bool:
    """Return whether a value is a model with a config, also one that ``torch.compile`` wrapped."""
    return hasattr(value, "forward") and hasattr(value, "config")


def rewards_of(specs: Sequence[Reward], given: Sequence[GivenReward] | None) -> list[GivenReward]:
    """Pair each reward of a run's recipe with the object that the program passes for it.

    The recipe's settings hold, so that a resumed run weighs its rewards as before, and so that its
    privacy card stays true: a further reward, or one that is declared otherwise, may have been
    fitted on the users. A setting that is left at its default is not compared.
    """
    if given is None:
        if any(spec.function == IN_MEMORY for spec in specs):
            raise DprlhfError("this run's reward was given in Python: give it again to resume()")
        return [GivenReward(spec) for spec in specs]
    if len(specs) != len(given):
        raise DprlhfError(f"this run has {len(specs)} rewards, not {len(given)}: give the same")
    for i, (spec, one) in enumerate(zip(specs, given, strict=True)):
        if spec.name != one.settings.name:
            raise DprlhfError(
                f"rewards.{i} of this run is {spec.name!r}, not {one.settings.name!r}"
            )
        for name, field in Reward.model_fields.items():
            was, now = getattr(spec, name), getattr(one.settings, name)
            if now not in (was, field.default):
                raise DprlhfError(
                    f"rewards.{i} of this run has {name} {json.dumps(was)}, not {json.dumps(now)}:"
                    " give the same"
                )
    return [
        GivenReward(spec, one.given, one.tokenizer) for spec, one in zip(specs, given, strict=True)
    ]
