"""The plan of a recipe: what is asked for once, a continued run keeps."""

from dprlhf.privacy import max_guess
from dprlhf.recipe import make_recipe
from dprlhf.training.recipe_plan import plan_of
from helpers.recipes import recipe_settings


def test_a_continued_run_keeps_the_noise_that_a_guess_was_given(monkeypatch):
    """The search for it may end elsewhere on another processor, by up to its tolerance."""
    recipe = make_recipe(recipe_settings(privacy={"max_guess": 0.6, "partition": "fixed"}))
    plan = plan_of(recipe, 100)
    found = max_guess.noise_multiplier
    monkeypatch.setattr(max_guess, "noise_multiplier", lambda *given: 1.001 * found(*given))
    assert plan_of(recipe, 100, plan.terms()) == plan
    assert plan_of(recipe, 100) != plan
