"""What is searched: values that the recipe takes, relative to its own."""

import json
from typing import Any

import pytest

from dprlhf import DprlhfError
from dprlhf.recipe import Recipe
from dprlhf.tuning.space import SPACE, Parameter, draw, keys_of, value_at, with_settings
from helpers import tiny
from helpers.recipes import least


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tmp_path_factory.mktemp("model"), "llama"))


def recipe_of(model: str, **changes: Any) -> Recipe:
    changes.setdefault("privacy", {"epsilon": 8})
    data = {"path": "users.csv", "limit": 100}
    return least(policy={"model_name_or_path": model}, data=data, rounds=8, **changes)


def parameters(recipe: Recipe, **chosen: Any) -> dict[str, Parameter]:
    """Return the parameters by key, when some have been chosen otherwise than in the recipe."""
    found = {}

    def choose(parameter: Parameter) -> Any:
        found[parameter.key] = parameter
        return chosen.get(parameter.key.replace(".", "__"), parameter.own)

    draw(recipe, keys_of([]), choose)
    return found


def choices(parameter: Parameter) -> list[Any]:
    return [json.loads(choice) for choice in parameter.choices]


def test_the_recipes_own_values_change_nothing(model: str) -> None:
    recipe = recipe_of(model)
    assert draw(recipe, keys_of([]), lambda parameter: parameter.own) == {}


def test_each_choice_gives_a_recipe_that_is_accepted(model: str) -> None:
    recipe = recipe_of(model, privacy={"epsilon": 8, "partition": "fixed"})
    for key, parameter in parameters(recipe).items():
        ends = [parameter.low, parameter.high] if parameter.choices is None else choices(parameter)
        for value in ends:
            assert value_at(with_settings(recipe, {key: value}), key) == value


def test_the_learning_rate_belongs_to_its_optimizer(model: str) -> None:
    recipe = recipe_of(model, optimizer={"name": "adam", "learning_rate": 0.5})
    own = parameters(recipe)["optimizer.learning_rate"]
    other = parameters(recipe, optimizer__name='"sgd"')["optimizer.learning_rate"]
    assert own.name == "optimizer.learning_rate (adam)"
    assert own.low * own.high == pytest.approx(0.5**2)
    assert other.name == "optimizer.learning_rate (sgd)"
    assert other.low * other.high == pytest.approx(1.0)
    assert "optimizer.momentum" not in parameters(recipe)
    assert "optimizer.momentum" in parameters(recipe, optimizer__name='"sgd"')


def test_what_the_recipe_has_not_is_not_searched(model: str) -> None:
    rebel = parameters(recipe_of(model, update={"name": "rebel"}))
    assert "update.name" not in rebel


def test_another_update_keeps_what_both_have(model: str) -> None:
    recipe = recipe_of(model, update={"name": "pg", "clip_norm": 0.3, "batch_size": 8})
    grpo = with_settings(recipe, {"update.name": "grpo", "update.clip_norm": 0.7}).update
    assert (grpo.name, grpo.clip_norm, grpo.batch_size) == ("grpo", 0.7, 8)


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(DprlhfError, match=r"did you mean 'optimizer\.learning_rate'"):
        keys_of(["optimizer.learning_rates"])
    assert keys_of(["rounds", "update.name"]) == ["update.name", "rounds"]
    assert keys_of([]) == list(SPACE)


def test_with_a_given_noise_multiplier_nothing_is_searched_that_epsilon_depends_on(model):
    free = parameters(recipe_of(model, privacy={"epsilon": 8, "partition": "fixed"}))
    assert {"rounds", "privacy.bands"} <= free.keys()
    given = recipe_of(model, privacy={"noise_multiplier": 1.0, "partition": "fixed"})
    assert not {"rounds", "privacy.bands"} & parameters(given).keys()
