"""The recipe: nothing unknown or impossible gets through, and the message says what to write."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from dprlhf import DprlhfError, recipe
from dprlhf.policies.protocol import Sampling
from dprlhf.recipe import (
    PublicData,
    load_any_recipe,
    load_recipe,
    make_recipe,
    without_effect,
)
from helpers.recipes import SMALL, least, refusal
from helpers.recipes import recipe_settings as settings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("polcy", "policy"),
        ("policy.adapter.rnak", "policy.adapter.rank"),
        ("rewards.1.wieght", "rewards.1.weight"),
        ("update.clipnorm", "update.clip_norm"),
        ("evaluation.data.pth", "evaluation.data.path"),
        # Under the wrong section, with the right one named.
        ("learning_rate", "optimizer.learning_rate"),
        ("update.temperature", "rollout.temperature"),
        ("policy.rank", "policy.adapter.rank"),
    ],
)
def test_an_unknown_key_names_the_nearest(wrong: str, right: str) -> None:
    message = refusal(settings(**{wrong.replace(".", "__"): 1}))
    assert message == f"unknown key '{wrong}'; did you mean '{right}'?"


def test_a_removed_key_or_value_names_what_takes_its_place() -> None:
    average, corrected = settings(optimizer__average=1), settings(optimizer__name="adam-corrected")
    assert refusal(average) == "'optimizer.average' is gone: the run leaves its last parameters"
    assert refusal(corrected).startswith("optimizer.name: adam-corrected is gone: take adam")


def test_an_offending_value_is_short_and_one_of_a_program_is_not_quoted() -> None:
    import pandas as pd

    message = refusal(settings(rounds="many " * 1000))
    assert message.startswith("rounds: Input should be a valid integer")
    assert "'many many" in message
    assert len(message) < 200
    assert "a DataFrame" in refusal(settings(data__path=pd.DataFrame({"prompt": ["CANARY"]})))
    assert "CANARY" not in refusal(settings(data__path=pd.DataFrame({"prompt": ["CANARY"]})))
    assert refusal(settings(rollout__batch_size="x")).startswith("rollout.batch_size: Input")
    message = refusal(settings(rollout__temperature=1e-300))
    assert message == "rollout.temperature: Input should be between 1e-30 and 1e30, not 1e-300"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"privacy": {}}, "privacy: give exactly one of epsilon, noise_multiplier and max_guess"),
        (
            {"privacy__noise_multiplier": 1.0},
            "privacy: give exactly one of epsilon, noise_multiplier and max_guess",
        ),
        ({"privacy__epsilon": 0}, "privacy: epsilon must be above 0, not 0.0"),
        ({"privacy__epsilon": math.nan}, "privacy: epsilon must be above 0, not nan"),
        (
            {"privacy": {"noise_multiplier": -0.1}},
            "privacy: noise_multiplier must be at least 0, not -0.1",
        ),
        (
            {"privacy": {"noise_multiplier": math.nan}},
            "privacy: noise_multiplier must be at least 0, not nan",
        ),
        ({"privacy__delta": 1}, "privacy: delta must lie between 0 and 1, not 1.0"),
        ({"privacy__delta": math.nan}, "privacy: delta must lie between 0 and 1, not nan"),
    ],
    ids=str,
)
def test_a_guarantee_that_is_none_is_refused(changes: dict[str, Any], message: str) -> None:
    assert refusal(settings(**changes)) == message


PRIVATE: list[dict[str, Any]] = [{"epsilon": 8.0}, {"epsilon": 1e9}, {"noise_multiplier": 0.01}]
BASELINES: list[dict[str, Any]] = [{"epsilon": math.inf}, {"noise_multiplier": 0}]


def test_an_infinite_clip_norm_belongs_to_a_baseline() -> None:
    for privacy in PRIVATE:
        message = refusal(settings(update__clip_norm=math.inf, privacy=privacy))
        assert "update.clip_norm must be finite unless privacy.epsilon is .inf" in message
    for privacy in BASELINES:
        made = make_recipe(settings(update__clip_norm=math.inf, privacy=privacy))
        assert made.update.clip_norm == math.inf


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_no_generator_takes(seed: int) -> None:
    assert "seed" in refusal(settings(seed=seed))


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("rounds=7", lambda r: r.rounds == 7),
        ("optimizer.learning_rate=1e-3", lambda r: r.optimizer.learning_rate == 0.001),
        ("privacy.epsilon=inf", lambda r: r.privacy.epsilon == math.inf),
        ("rewards.0.function=a:b=c", lambda r: r.rewards[0].function == "a:b=c"),
        ("rewards=[{function: p}]", lambda r: [x.function for x in r.rewards] == ["p"]),
        ("rewards.1={function: p}", lambda r: r.rewards[1].function == "p"),
        ("policy.adapter.target_modules.1=k", lambda r: r.policy.adapter.target_modules[1] == "k"),
        ("policy.adapter.target_modules=all-linear",
         lambda r: r.policy.adapter.target_modules == "all-linear"),
        ("data.name=", lambda r: r.data.name is None),
        ("policy.revision='123e45'", lambda r: r.policy.revision == "123e45"),
        ("evaluation.data.path=public.csv", lambda r: r.evaluation.data.path == "public.csv"),
    ],
)  # fmt: skip
def test_overrides(file: Path, override: str, read: Any) -> None:
    assert not (lambda r: r.evaluation is not None and read(r))(load_recipe(file))
    assert read(load_recipe(file, [override]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "not valid YAML"),
        (b"- 1", "a recipe is a mapping of keys to values"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    with pytest.raises(DprlhfError) as caught:
        load_recipe(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


PEOPLE = {"path": "people", "name": "all", "split": "train"}


@pytest.mark.parametrize(
    "public",
    [
        {},
        {"split": "train[:10%]"},
        {"split": "test+train"},
        {"path": "./people.csv", "split": "test"},
        {"path": "folder/../people.csv", "name": "other"},
        {"path": "link.csv"},
        {"path": "saved", "split": "test"},
    ],
)
def test_evaluation_on_the_private_rows_is_refused(public, tmp_path, monkeypatch):
    """Whatever else the two sections say, and however they spell it."""
    monkeypatch.chdir(tmp_path)
    Path("people.csv").write_text("prompt\na\n")
    Path("link.csv").symlink_to("people.csv")
    Path("folder").mkdir()
    Path("saved").mkdir()
    Path("saved/dataset_info.json").write_text("{}")
    local = {"path": "saved" if public.get("path") == "saved" else "people.csv"}
    private = PEOPLE | (local if "path" in public else {})
    place = {key: value for key, value in private.items() if key in PublicData.model_fields}
    message = refusal(settings(data=private, evaluation={"data": {**place, **public}}))
    assert "evaluation.data names the private users" in message


def test_public_rows_have_no_columns_of_their_own() -> None:
    public = {"path": "other", "prompt_column": "text"}
    message = refusal(settings(evaluation={"data": public}))
    assert "public rows are read as the users' are, by data.prompt_column" in message


@pytest.mark.parametrize("key", ["path", "name", "split"])
def test_evaluation_on_other_rows_is_not(key: str) -> None:
    make_recipe(settings(data=PEOPLE, evaluation={"data": {**PEOPLE, key: "other"}}))
    sliced = {**PEOPLE, "split": "train[:90%]"}
    make_recipe(settings(data=sliced, evaluation={"data": {**PEOPLE, "split": "train[90%:]"}}))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"optimizer__momentum": 0.6}, ["optimizer.momentum has no effect"]),
        ({"optimizer__momentum": 0.6, "optimizer__name": "sgd"}, []),
        ({"data__max_prompts_per_user": 2}, ["data.max_prompts_per_user has no effect"]),
        ({"data__max_prompts_per_user": 2, "data__user_column": "u"}, []),
        ({"rewards__0__label": "good"}, ["rewards.0.label has no effect"]),
        ({"rewards__1__label": "good"}, []),
        ({}, []),
    ],
)
def test_a_changed_setting_that_changes_nothing_is_told(changes, expected):
    found = without_effect(make_recipe(settings(**changes)))
    assert len(found) == len(expected)
    for sentence, start in zip(found, expected, strict=True):
        assert sentence.startswith(start)


UNREADABLE = ["2024-99-99", "!!int x", "!!int ''", "!!bool maybe", "!!timestamp x", "0x_", "[a"]
UNREADABLE += ["[" * 500, "&a [*a]", "!!python/object/apply:os.getcwd []"]
"""Values that YAML's own types refuse, each with an error of its own."""


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_yaml_cannot_read(text: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    for content, overrides in ((f"rounds: {text}", []), ("rounds: 3", [f"data.name={text}"])):
        file.write_text(content)
        with pytest.raises(DprlhfError, match="not valid YAML") as caught:
            load_any_recipe(file, overrides)
        assert "\n" not in str(caught.value)


def test_an_alias_is_a_copy_whose_merged_keys_are_not_given_twice(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump(SMALL)
        + "evaluation: {data: &d {<<: {path: b, split: test}, path: a}}\n"
        + "update: {subspace: {data: *d}}\ntracking: {<<: {report_to: none}}\n"
    )
    made: Any = load_recipe(tmp_path / "recipe.yaml", ["update.subspace.data.path=c"])
    assert (made.evaluation.data.path, made.update.subspace.data.path) == ("a", "c")


@pytest.mark.parametrize("text", ["[a]", "{a: b}", "2024-01-01"])
def test_a_stage_of_a_recipe_that_is_no_word(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("rounds: 3")
    with pytest.raises(DprlhfError, match="stage: it is one of") as caught:
        load_any_recipe(tmp_path / "recipe.yaml", [f"stage={text}"])
    assert "\n" not in str(caught.value)


def made(rollout: dict[str, Any], update: dict[str, Any] | None = None) -> Any:
    return least(rollout=rollout, update=update or {"name": "pg"})


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
