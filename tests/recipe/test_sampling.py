"""The settings of sampling: what is off, and what does not go together."""

from typing import Any

import pytest

from dprlhf import DprlhfError, recipe
from dprlhf.policies.protocol import Sampling
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
    off = {"top_k": None, "top_p": 1.0, "min_p": None}
    assert Sampling.of(recipe.Rollout.model_validate(off)).plain
    for name, value in {"top_k": 3, "top_p": 0.9, "min_p": 0.1}.items():
        rollout = recipe.Rollout.model_validate({name: value})
        assert rollout.truncates == [f"rollout.{name}"]
        assert not Sampling.of(rollout).plain


@pytest.mark.parametrize(
    ("update", "instead"),
    [
        ({"name": "ppo", "epochs": 2}, "write update.epochs: 1"),
        ({"name": "rebel"}, "write update.steps: 1 or give update.oracle"),
    ],
)
def test_updates_that_move_within_a_round_refuse_truncation(update, instead):
    with pytest.raises(DprlhfError, match=instead):
        made({"top_p": 0.9}, update)
    made({"temperature": 0.9}, update)


def test_the_others_take_it_and_stop_strings_may_be_one() -> None:
    more = ({"name": "rebel", "steps": 1}, {"name": "rebel", "oracle": {}})
    for update in ({"name": "pg"}, {"name": "grpo"}, {"name": "ppo"}, {"name": "npg"}, *more):
        made({"top_p": 0.9}, update)
    assert recipe.Rollout.model_validate({"stop": "END"}).stop == ["END"]
    assert recipe.Rollout.model_validate({"stop": None}).stop == []


def test_truncated_responses_are_left_out_where_responses_have_weights() -> None:
    for name in ("pg", "grpo", "ppo", "npg"):
        made({"mask_truncated": True}, {"name": name})
    with pytest.raises(DprlhfError, match=r"update.name pg, grpo, ppo or npg; rebel takes"):
        made({"mask_truncated": True}, {"name": "rebel"})


def test_the_chat_templates_arguments_are_not_the_tokenizers() -> None:
    spec = recipe.Policy(model_name_or_path="m", chat_template_kwargs={"enable_thinking": False})
    assert spec.chat_template_kwargs == {"enable_thinking": False}
    with pytest.raises(ValueError, match="tokenize is set by the run"):
        recipe.Policy(model_name_or_path="m", chat_template_kwargs={"tokenize": True})
