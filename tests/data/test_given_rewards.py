"""Rewards that a program passes, in every form that TRL's ``reward_funcs`` has."""

from types import SimpleNamespace
from typing import Any

import pytest

from dprlhf.data.given_rewards import rewards_of
from dprlhf.data.reward_arguments import given_rewards
from dprlhf.errors import DprlhfError
from dprlhf.recipe import IN_MEMORY, Reward


def length(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def vowels(completions: list[str]) -> list[float]:
    return [float(sum(c in "aeiou" for c in text)) for text in completions]


MODEL = SimpleNamespace(config=SimpleNamespace(), forward=print)


@pytest.mark.parametrize(
    ("reward", "weights", "expected"),
    [
        (length, None, [(IN_MEMORY, 1.0)]),
        ([length, vowels], None, [(IN_MEMORY, 1.0), (IN_MEMORY, 1.0)]),
        ((length, vowels), None, [(IN_MEMORY, 1.0), (IN_MEMORY, 1.0)]),
        ((length, 0.5), None, [(IN_MEMORY, 0.5)]),
        ([(length, 0.5), vowels], None, [(IN_MEMORY, 0.5), (IN_MEMORY, 1.0)]),
        ([length, vowels], [2, -1], [(IN_MEMORY, 2.0), (IN_MEMORY, -1.0)]),
        ("org/model", None, [("org/model", 1.0)]),
        ([("asset:sentiment", 3)], None, [("asset:sentiment", 3.0)]),
        ("pkg.mod:f", [0.25], [("pkg.mod:f", 0.25)]),
        (Reward(classifier="p", weight=0.5), None, [("p", 0.5)]),
        ((Reward(classifier="p", weight=0.5), 4), None, [("p", 4.0)]),
        (MODEL, [0.5], [(IN_MEMORY, 0.5)]),
    ],
)
def test_each_form_has_its_settings(reward: Any, weights: Any, expected: Any) -> None:
    found = given_rewards(reward, weights)
    assert [(one.settings.name, one.settings.weight) for one in found] == expected


def test_a_model_keeps_its_tokenizer() -> None:
    plain, model = given_rewards([length, MODEL], tokenizers=[None, str.split])
    assert (plain.given, plain.tokenizer) == (length, None)
    assert (model.given, model.tokenizer) == (MODEL, str.split)
    assert plain.settings == Reward(function=IN_MEMORY)  # as earlier runs have it


def test_a_resumed_run_weighs_its_rewards_as_before() -> None:
    specs = [Reward(function=IN_MEMORY, weight=0.5), Reward(classifier="org/model")]
    first, second = rewards_of(specs, given_rewards([length, "org/model"]))
    assert (first.settings.weight, first.given) == (0.5, length)
    assert (second.settings, second.given) == (specs[1], None)
    assert [one.settings for one in rewards_of(specs[1:], None)] == specs[1:]
    for reward, text in (
        (None, "give it again to resume"),
        (length, "has 2 rewards, not 1"),
        ([length, "org/other"], r"rewards.1 of this run is 'org/model', not 'org/other'"),
        ([(length, 2), "org/model"], r"rewards.0 of this run has weight 0.5, not 2"),
    ):
        with pytest.raises(DprlhfError, match=text):
            rewards_of(specs, None if reward is None else given_rewards(reward))


def test_a_resumed_run_gets_no_further_reward() -> None:
    """Its card says what the first one was fitted on, and nothing of the second."""
    leaky = Reward(function="rewards.py:length", weight=2.0)
    for more in ((vowels, 2), "org/model", leaky):
        with pytest.raises(DprlhfError, match="has 1 rewards, not 2"):
            rewards_of([Reward(function=IN_MEMORY)], given_rewards([length, more]))


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ("times_column", "gender"), ("label", "positive"), ("text", "completion"),
        ("weight", 2.0),
    ],
)  # fmt: skip
def test_a_resumed_run_keeps_what_its_card_and_rounds_go_by(changed: str, value: Any) -> None:
    named: dict[str, Any] = {"function": "rewards.py:length"}
    if changed in ("label", "text"):
        named = {"classifier": "org/model"}
    was, now = Reward(**named), Reward(**named, **{changed: value})
    with pytest.raises(DprlhfError, match=f"rewards.0 of this run has {changed} .*, not "):
        rewards_of([was], given_rewards(now))
    assert rewards_of([now], given_rewards(now))[0].settings == now
    assert rewards_of([now], given_rewards(was))[0].settings == now  # left at its default
