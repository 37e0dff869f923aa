"""The settings of sampling: what is off, and what does not go together."""

from __future__ import annotations

from typing import Any

import pytest

from dprlhf import DprlhfError, recipe
from dprlhf.policies.warpers import Sampling
from dprlhf.recipe import make_recipe

SETTINGS: dict[str, Any] = {
    "policy": {"model_name_or_path": "org/model"},
    "data": {"path": "org/prompts"},
    "rewards": [{"function": "module:reward"}],
    "privacy": {"epsilon": 1.0},
    "rounds": 2,
}


def made(rollout: dict[str, Any], update: dict[str, Any] | None = None) -> Any:
    return make_recipe(SETTINGS | {"rollout": rollout, "update": update or {"name": "pg"}})


def test_without_settings_nothing_is_changed_or_cut() -> None:
    assert Sampling.of(recipe.Rollout()).plain
    off = {"top_k": None, "top_p": 1.0, "min_p": None, "repetition_penalty": 1}
    assert Sampling.of(recipe.Rollout.model_validate(off)).plain
    for name, value in {"top_k": 3, "top_p": 0.9, "min_p": 0.1}.items():
        rollout = recipe.Rollout.model_validate({name: value})
        assert rollout.truncates == [f"rollout.{name}"]
        assert Sampling.of(rollout).truncates
        assert Sampling.of(rollout).untruncated().plain
    penalty = recipe.Rollout(repetition_penalty=1.2)
    assert not penalty.truncates
    assert not Sampling.of(penalty).truncates
    assert not Sampling.of(penalty).plain


@pytest.mark.parametrize(
    ("rollout", "why"),
    [
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_new_tokens": 17}, "min_new_tokens 17 is more than max_new_tokens 16"),
        (
            {"top_k": 3, "base_policy": "reference"},
            "top_k works with base_policy on-policy",
        ),
    ],
)
def test_impossible_values_are_refused(rollout: dict[str, Any], why: str) -> None:
    with pytest.raises(DprlhfError, match=why):
        made(rollout)


@pytest.mark.parametrize(
    ("update", "instead"),
    [
        ({"name": "ppo", "epochs": 2}, "write update.epochs: 1 and minibatches: 1"),
        ({"name": "ppo", "minibatches": 2}, "write update.epochs: 1 and minibatches: 1"),
        ({"name": "rebel"}, "write update.steps: 1 or solver: gauss-newton"),
    ],
)
def test_updates_that_move_within_a_round_refuse_truncation(
    update: dict[str, Any], instead: str
) -> None:
    with pytest.raises(DprlhfError, match=instead):
        made({"top_p": 0.9}, update)
    made({"repetition_penalty": 1.2, "min_new_tokens": 2}, update)


@pytest.mark.parametrize(
    "update",
    [
        {"name": "pg"},
        {"name": "grpo"},
        {"name": "ppo"},
        {"name": "rebel", "steps": 1},
        {"name": "rebel", "solver": "gauss-newton"},
        {"name": "npg"},
    ],
)
def test_the_others_take_it(update: dict[str, Any]) -> None:
    made({"top_p": 0.9}, update)
