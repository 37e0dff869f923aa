"""Pilot runs: the constants of the predicted reward, fitted on public prompts at no privacy cost.

A pilot trains a variant of the recipe on public prompts that stand in for its users, with more or
less noise, more or fewer rounds, and fewer responses, so that the fitted formula
(:mod:`dprlhf.training.prediction`) has seen both sides of the plans that it will compare.
"""

from __future__ import annotations

from dprlhf.recipe import Recipe
from dprlhf.training.planner import learning_rate_at


def pilots_of(recipe: Recipe) -> dict[str, Recipe]:
    """Return the variants of a recipe that are run as pilots, by name.

    The learning rate goes down as rounds go up, as in every plan.

    Args:
        recipe: The recipe, with a finite ε.
    """
    epsilon = recipe.privacy.epsilon or 1.0
    responses = recipe.rollout.responses
    other = responses // 2 if responses >= 4 else 2 * responses
    return {
        "as it stands": recipe,
        "more noise": _changed(recipe, privacy={"epsilon": epsilon / 2.5}),
        "less noise": _changed(recipe, privacy={"epsilon": epsilon * 4}),
        "more rounds": _rounds(recipe, max(recipe.rounds + 1, round(1.5 * recipe.rounds))),
        "fewer rounds": _rounds(recipe, max(1, round(0.75 * recipe.rounds))),
        f"{other} responses": _changed(recipe, rollout={"responses": other}),
    }


def _rounds(recipe: Recipe, rounds: int) -> Recipe:
    rate = learning_rate_at(recipe, rounds)
    passes = recipe.privacy.participations
    rounds = -(-rounds // passes) * passes
    return _changed(recipe.model_copy(update={"rounds": rounds}), optimizer={"learning_rate": rate})


def _changed(recipe: Recipe, **sections: dict[str, object]) -> Recipe:
    values = recipe.model_dump()
    for name, changes in sections.items():
        values[name] |= changes
    return Recipe.model_validate(values)
