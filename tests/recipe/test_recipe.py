"""The recipe: nothing unknown or impossible gets through, and the message says what to write."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from dprlhf.errors import DprlhfError
from dprlhf.recipe import PublicData, Recipe, dump_recipe, load_recipe, make_recipe
from dprlhf.recipe.adapters import REMOVED_TYPES
from helpers.recipes import SMALL, refusal
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


@pytest.mark.parametrize("key", ["policy", "data", "rewards", "privacy", "rounds"])
def test_a_missing_key_is_named(key: str) -> None:
    values = settings()
    del values[key]
    assert refusal(values) == f"'{key}' is missing"
    assert refusal(settings(data={"split": "x"})) == "'data.path' is missing"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("optimizer.name", "adma", ["'normalized-sgd', 'adam'", "not 'adma'", "mean 'adam'?"]),
        ("update.name", "grop", ["'pg'", "not 'grop'", "did you mean 'grpo'?"]),
        ("update", 3, ["update: "]),
        ("policy.adapter.type", "ffa_lora", ["'peft' or 'full'", "did you mean 'ffa-lora'?"]),
        ("rounds", 0, ["greater than or equal to 1", "not 0"]),
        ("rounds", 2.5, ["valid integer", "not 2.5"]),
        ("rounds", True, ["valid integer", "not 'true'"]),
        ("data.user_column", False, ["valid string", "not False"]),
        ("update.clip_norm", math.nan, ["greater than 0", "not nan"]),
        ("rollout.responses", 1, ["at least 2 responses to a prompt, since each", "not 1"]),
        ("rewards.1.weight", math.nan, ["finite", "not nan"]),
        ("privacy.epsilon", "big", ["valid number", "not 'big'"]),
        ("evaluation.prompts", 1, ["greater than or equal to 2", "not 1"]),
        ("rewards", "f", ["valid list", "not 'f'"]),
    ],
)
def test_a_bad_value_names_key_choices_and_value(key: str, value: Any, words: list[str]) -> None:
    changes: dict[str, Any] = {"evaluation": {"data": {"path": "p"}}}
    if key == "rewards.1.weight":
        changes["rewards"] = [{"function": "f"}, {"function": "g", "weight": value}]
    else:
        changes[key.replace(".", "__")] = value
    message = refusal(settings(**changes))
    assert message.startswith(f"{key}: ")
    for word in words:
        assert word in message


def test_an_offending_value_is_short_and_one_of_a_program_is_not_quoted() -> None:
    import pandas as pd

    message = refusal(settings(rounds="many " * 1000))
    assert message.startswith("rounds: Input should be a valid integer")
    assert "'many many" in message
    assert len(message) < 200
    assert "a DataFrame" in refusal(settings(data__path=pd.DataFrame({"prompt": ["CANARY"]})))
    assert "CANARY" not in refusal(settings(data__path=pd.DataFrame({"prompt": ["CANARY"]})))


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
        ("evaluation.data.path=public.csv", lambda r: r.evaluation.data.path == "public.csv"),
    ],
)  # fmt: skip
def test_overrides(file: Path, override: str, read: Any) -> None:
    assert not (lambda r: r.evaluation is not None and read(r))(load_recipe(file))
    assert read(load_recipe(file, [override]))


def test_overrides_apply_in_order(file: Path) -> None:
    assert load_recipe(file, ["rounds=3", "rounds=4"]).rounds == 4
    changed = load_recipe(file, ["privacy.epsilon=null", "privacy.noise_multiplier=1.5"])
    assert (changed.privacy.epsilon, changed.privacy.noise_multiplier) == (None, 1.5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"rounds: [1", "not valid YAML"),
        (b"rounds: !!python/object/apply:os.getcwd []", "not valid YAML"),
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


FULL = settings(
    evaluation={"data": {"path": "public", "split": "test"}, "every": 2},
    rollout={"base_policy": "reference", "responses": 4, "temperature": 0.7},
    optimizer={"name": "sgd", "momentum": 0.9, "learning_rate": 1e-7},
    data={"path": "p", "user_column": "u", "max_prompts_per_user": 3, "limit": 10},
)


@pytest.mark.parametrize(
    "values",
    [
        SMALL,
        FULL,
        settings(privacy={"epsilon": math.inf}, update__clip_norm=math.inf),
        settings(privacy={"noise_multiplier": 0.1 + 0.2, "delta": 1e-12}),
        settings(data__path="yes", data__name="1e3", data__split="null"),
    ],
    ids=["small", "full", "baseline", "digits", "words"],
)
def test_what_is_written_is_read_back(tmp_path: Path, values: dict[str, Any]) -> None:
    recipe = make_recipe(values)
    path = tmp_path / "r.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe
    assert dump_recipe(load_recipe(path)) == dump_recipe(recipe)
    # Every default is written out: a later version with other defaults reads the same recipe.
    written = yaml.safe_load(path.read_text())
    assert set(written) == set(Recipe.model_fields)
    assert set(written["privacy"]) == set(type(recipe.privacy).model_fields)


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


@pytest.mark.parametrize("name", REMOVED_TYPES)
def test_a_type_that_is_gone_says_what_takes_its_place(name: str) -> None:
    with pytest.raises(DprlhfError, match=rf"{name} is no type of its own any more: take type"):
        make_recipe(settings(policy__adapter__type=name))
