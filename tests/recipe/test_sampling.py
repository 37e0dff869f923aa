"""The settings of sampling: what is off, and what does not go together."""

from __future__ import annotations

from typing import Any

import pytest

from dprlhf import DprlhfError, recipe
from dprlhf.policies.warpers import Sampling
from dprlhf.recipe import make_recipe
from dprlhf.recipe.generation import KEYS, rollout_settings
from dprlhf.recipe.trl_names import overrides_of

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
        ({"min_new_tokens": 33}, "min_new_tokens 33 is more than max_new_tokens 32"),
        ({"top_k": 3, "base_policy": "reference"}, "top_k works with base_policy on-policy"),
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
        ({"name": "rebel"}, "write update.steps: 1 or give update.oracle"),
    ],
)
def test_updates_that_move_within_a_round_refuse_truncation(
    update: dict[str, Any], instead: str
) -> None:
    with pytest.raises(DprlhfError, match=instead):
        made({"top_p": 0.9}, update)
    made({"repetition_penalty": 1.2, "min_new_tokens": 2}, update)


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


def test_generation_kwargs_become_keys_of_the_section() -> None:
    given = {"top_k": 20, "stop_strings": ["END"], "do_sample": True, "min_p": None}
    assert rollout_settings(given) == {"top_k": 20, "stop": ["END"]}
    assert set(KEYS.values()) <= recipe.Rollout.model_fields.keys()
    for name, value in {"typical_p": 0.3, "do_sample": False, "no_repeat_ngram_size": 2}.items():
        with pytest.raises(DprlhfError, match=f"generation_kwargs: {name}={value} would change"):
            rollout_settings({name: value})
    with pytest.raises(DprlhfError, match="did you mean top_k"):
        rollout_settings({"topk": 3})


def test_flags_named_as_in_trl_become_keys_of_the_section() -> None:
    given = ["--generation_kwargs", '{"top_k": 20, "stop": ["a b"]}', "--top_p=0.9"]
    given += ["--mask-truncated-completions", "true", "--chat_template_kwargs={thinking: true}"]
    assert overrides_of(given) == [
        "rollout.top_k=20", 'rollout.stop=["a b"]', "rollout.top_p=0.9",
        "rollout.mask_truncated=true", "policy.chat_template_kwargs={thinking: true}",
    ]  # fmt: skip
    for wrong in ("3", "{"):
        with pytest.raises(DprlhfError, match="write a mapping"):
            overrides_of(["--generation_kwargs", wrong])
