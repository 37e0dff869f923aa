"""What a run says about itself in words: never less than its numbers."""

import math
import re
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dprlhf.cli.app import app
from dprlhf.privacy.gaussian import gaussian_epsilon, upwards
from dprlhf.privacy.plan import make_plan
from dprlhf.recipe import AnyRecipe, Oracle, Recipe, SFTRecipe, make_recipe
from dprlhf.runs.card import guarantee_sentence, in_plain_words, model_card, privacy_card
from dprlhf.runs.earlier import Earlier, read_earlier
from dprlhf.training.build import plan_of
from dprlhf.updates import UPDATES
from helpers.recipes import recipe_settings


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.floats(0, allow_infinity=False), st.integers(1, 12))
def test_a_bound_is_shown_rounded_up(value: float, digits: int) -> None:
    shown = float(upwards(value, digits))
    assert shown >= value
    if 1e-290 < value < 1e290:
        assert shown <= value * (1 + 10.0 ** (1 - digits)) * (1 + 1e-15)
        assert len(re.sub(r"e.*|[.]", "", upwards(value, digits)).strip("0")) <= digits
    assert upwards(math.inf, digits) == "inf"


BASE: dict[str, Any] = {
    "policy": {"model_name_or_path": "nowhere"}, "data": {"path": "nowhere"},
    "privacy": {"epsilon": 4.0}, "rounds": 4,
}  # fmt: skip
REWARDS = {"rewards": [{"function": "nowhere"}]}


def recipe_of(tuning_runs: int | None, **changes: Any) -> Recipe:
    privacy = {"noise_multiplier": 3.0, "partition": "fixed", "tuning_runs": tuning_runs}
    return make_recipe(BASE | REWARDS | {"privacy": privacy | changes})


def card_of(tuning_runs: int | None) -> dict[str, Any]:
    recipe = recipe_of(tuning_runs)
    plan = make_plan(users=100, rounds=4, partition="fixed", noise_multiplier=3.0, delta=1e-5)
    return privacy_card(recipe, plan, 10, bytes(32), read_earlier(recipe))


def test_the_plain_words_are_those_of_the_risk() -> None:
    # A Gaussian at z = 3 allows Φ(1/6) = 0.5662; nine, with eight tuning runs, Φ(1/2) = 0.6915.
    card = card_of(None)
    assert "at most 56.7 of 100 cases; without it, in 50." in in_plain_words(card)
    assert "at most 69.2 of 100 cases" in in_plain_words(card_of(8))
    assert card_of(8)["risk"]["gdp_mu"] == pytest.approx(1.0)
    assert "nothing is promised" in in_plain_words({**card, "risk": None})
    assert "nothing is promised" in in_plain_words({**card, "private": False})


@pytest.mark.parametrize(
    ("path", "named", "shown"),
    [
        ("org/questions", None, "org/questions"),
        ("/home/somebody/clinic/2026.csv", None, "2026.csv"),
        ("/home/somebody/clinic/2026.csv", "clinic", "clinic"),
        ("in-memory", None, "given in Python"),
        ("asset:imdb/private.parquet", None, "asset:imdb/private.parquet"),
    ],
)
def test_the_data_set_is_named_without_its_place(path: str, named: str, shown: str) -> None:
    recipe = make_recipe(recipe_settings(data__path=path, privacy__dataset=named))
    card = privacy_card(recipe, plan_of(recipe, 200), 10, bytes(32), Earlier())
    assert card["dataset"] == shown


def test_declared_tuning_runs_are_paid_for() -> None:
    card = card_of(8)
    whole = card["total"]
    # Nine releases of one Gaussian at z = 3 are one at z = 1.
    assert whole["epsilon"] == pytest.approx(gaussian_epsilon(1.0, 1e-5))
    assert card["epsilon"] == pytest.approx(gaussian_epsilon(3.0, 1e-5))
    sentence = guarantee_sentence(card)
    assert sentence.startswith("In total, with 8 tuning runs: (")
    assert upwards(whole["epsilon"], 4) in sentence
    assert card["tuning"].startswith("declared: 8 tuning runs")
    assert not any("tuned" in line for line in card["assumptions"])


def test_a_selection_of_rows_is_told() -> None:
    """Were it taken anew without a row, the next one would move up: two users would change."""
    for data, told in (
        ({}, ""),
        ({"skip": 1}, "which rows data.skip selects: "),
        ({"limit": 100}, "which rows data.limit selects: "),
        ({"skip": 1, "limit": 100}, "which rows data.skip and data.limit select: "),
        ({"split": "train[:90%]"}, "which rows data.split selects: "),
    ):
        recipe = recipe_of(None)
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update=data)})
        plan = plan_of(recipe, cast(Any, SimpleNamespace(count=100)))
        lines = privacy_card(recipe, plan, 1, bytes(32), Earlier())["assumed_public"]
        chosen = [line for line in lines if line.startswith("which rows")]
        assert len(chosen) == bool(told)
        assert all(line.startswith(told) for line in chosen)


def test_a_declaration_that_public_prompts_were_public_is_told() -> None:
    """It skips the comparison with the users' texts, so readers have to know of it."""
    for declared in (False, True):
        evaluation = {"data": {"path": "public"}, "declared_public": declared}
        recipe = make_recipe(BASE | REWARDS | {"evaluation": evaluation})
        lines = card_for(recipe)["assumed_public"]
        assert any("declared to be public" in line for line in lines) == declared


def test_what_an_audit_shows_is_not_rounded_up() -> None:
    audit = {"holds": True, "canaries": 9, "space": "gradient", "bound": 3.99996, "confidence": 0.9}
    text = model_card(recipe_of(None), {**card_of(None), "audits": [audit]})
    assert "shows epsilon >= 3.999 at confidence 90%" in text


@pytest.mark.parametrize("z", [0.8, 1.0, 1.3, 1.7])
def test_the_sentence_and_the_command_do_not_round_epsilon_down(z: float) -> None:
    recipe = recipe_of(None, noise_multiplier=z, delta=1.23456e-5)
    plan = make_plan(users=100, rounds=4, partition="fixed", noise_multiplier=z, delta=1.23456e-5)
    epsilon, delta = plan.guarantee.epsilon, plan.guarantee.delta
    card = privacy_card(recipe, plan, 10, bytes(32), Earlier())
    said = re.match(r"\(([^,]+), ([^)]+)\)", guarantee_sentence(card))
    assert epsilon <= float(said[1]) < 1.002 * epsilon
    assert delta <= float(said[2]) < 1.02 * delta
    words = ["--users", "100", "--rounds", "4", "--partition", "fixed", "--delta", "1.23456e-5"]
    shown = (
        CliRunner().invoke(app, ["privacy", "epsilon", *words, "--noise-multiplier", str(z)]).stdout
    )
    assert epsilon <= float(shown.split()[2]) < 1.00002 * epsilon
    shown = CliRunner().invoke(app, ["privacy", "noise", *words, "--epsilon", f"{epsilon}"]).stdout
    found = float(shown.split()[3])
    kept = make_plan(users=100, rounds=4, partition="fixed", noise_multiplier=found, delta=delta)
    assert kept.guarantee.epsilon <= epsilon


def card_for(recipe: AnyRecipe) -> dict[str, Any]:
    users: Any = SimpleNamespace(count=100)
    return privacy_card(recipe, plan_of(recipe, users), 10, bytes(32), Earlier())


ORACLES = get_args(Oracle.model_fields["name"].annotation)
RELEASES: list[tuple[dict[str, Any], str]] = [
    ({"name": "pg"}, "gradient of each round"),
    ({"name": "grpo"}, "gradient of the surrogate in each round"),
    ({"name": "ppo"}, "move of the users' copies of the policy in each round"),
    ({"name": "rebel", "steps": 3}, "gradient of the loss at each step, 3 in each round"),
]
for _oracle in ORACLES:
    _said = "gradient of a regression at each step, 5 in each round"
    if _oracle == "sufficient-statistics":
        _said = "sufficient statistics of a regression in each round"
    _spec = {"name": _oracle, "steps": 5}
    RELEASES.append(({"name": "npg", "oracle": _spec}, _said))
    RELEASES.append(({"name": "rebel", "oracle": _spec}, _said))


@pytest.mark.parametrize(
    ("update", "said"), RELEASES, ids=lambda x: str(x) if isinstance(x, dict) else ""
)
def test_the_card_says_what_each_update_releases(update: dict[str, Any], said: str) -> None:
    first, reward = card_for(make_recipe(BASE | REWARDS | {"update": update}))["released"]
    assert first == f"the noised mean {said}, and what follows from it: the model"
    together = "the first of these releases" if "step" in said else "the same release"
    assert reward == f"the noised mean reward and count of each round, in {together}"


def test_every_update_and_stage_is_described() -> None:
    assert {u["name"] for u, _ in RELEASES} == set(UPDATES)
    (only,) = card_for(SFTRecipe.model_validate(BASE))["released"]
    assert only == "the noised mean gradient of each round, and what follows from it: the model"


def test_the_card_names_the_public_prompts_of_a_subspace() -> None:
    spec = {"rank": 2, "data": {"path": "reviews.csv"}}
    made = make_recipe(recipe_settings(update__subspace=spec))
    plan = make_plan(users=100, rounds=10, delta=1e-5, epsilon=4.0)
    card = privacy_card(made, plan, 1000, bytes(32), read_earlier(made))
    (named,) = (line for line in card["assumed_public"] if "update.subspace" in line)
    assert ", reviews.csv" in named
    assert "along 2 directions from public gradients" in card["released"][0]
    assert card["noise_to_clip_ratio"] == plan.noise_to_clip_ratio(2)
