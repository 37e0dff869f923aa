"""Prompts, rewards and rows that a program passes in place of those that a recipe names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from dprlhf import recipe as settings
from dprlhf.data.given_rewards import GivenReward, given_rewards, is_model
from dprlhf.data.loading import load_rows, rows_from
from dprlhf.errors import DprlhfError
from dprlhf.privacy.plan import Plan
from dprlhf.recipe import IN_MEMORY, AnyRecipe, Recipe, load_recipe, make_recipe

R = TypeVar("R", bound=AnyRecipe)
Reward = Any
"""A reward, or a list of them, as :func:`~dprlhf.data.given_rewards.given_rewards` takes them."""

_SHORT = {
    "model": "policy__model_name_or_path",
    "epsilon": "privacy__epsilon",
    "delta": "privacy__delta",
    "learning_rate": "optimizer__learning_rate",
}
_PLACE = {
    "path": IN_MEMORY, "name": None, "revision": None, "split": "train", "skip": 0, "limit": None,
}  # fmt: skip


class Sources:
    """Objects in memory that replace the recipe's data, rewards and policy; None replaces nothing.

    Args:
        prompts: The users' prompts, as :func:`rows_from` takes them.
        reward: A reward, or several, as :func:`~dprlhf.data.given_rewards.given_rewards` takes
            them: callables with TRL's signature, names, models, or pairs with a weight.
        evaluation_prompts: Public prompts.
        policy: The policy, of any type that the training loop takes.
        models: Models in memory that the run starts from, by the argument's name; the private runs
            that tuned them must count.
        stand_in_plan: Where the "users" are public prompts that stand in for them: returns the plan
            of the run, which states no ε. None plans for private users.
        reward_weights: A weight for each reward.
        reward_processing_classes: The tokenizers of rewards that are models.

    Attributes:
        rewards: The rewards with their settings; None for those of the recipe.

    Raises:
        DprlhfError: The public prompts are the private ones, or something is no reward.
    """

    def __init__(
        self,
        prompts: Any,
        reward: Any,
        evaluation_prompts: Any,
        policy: Any = None,
        stand_in_plan: Callable[[AnyRecipe], Plan] | None = None,
        *,
        reward_weights: Sequence[float] | None = None,
        reward_processing_classes: Any = None,
        models: Mapping[str, Any] | None = None,
    ) -> None:
        if prompts is not None and evaluation_prompts is prompts:
            raise DprlhfError(
                "evaluation_prompts are the private prompts: evaluation writes prompts and rewards"
                " in the open, so it needs public ones"
            )
        self.prompts = prompts
        self.evaluation_prompts = evaluation_prompts
        self.policy = policy
        self.stand_in_plan = stand_in_plan
        self.models = dict(models or {})
        self.rewards: list[GivenReward] | None = None
        if reward is not None:
            self.take_rewards(given_rewards(reward, reward_weights, reward_processing_classes))
        elif reward_weights is not None or reward_processing_classes is not None:
            raise DprlhfError(
                "reward_weights and reward_processing_classes are for the rewards that `reward`"
                " gives; those of a recipe have their weight there"
            )

    def take_rewards(self, rewards: Sequence[GivenReward]) -> None:
        """Take rewards with their settings, and keep the models among them in mind."""
        self.rewards = list(rewards)
        given = enumerate(rewards)
        self.models |= {f"rewards.{i}": one.given for i, one in given if is_model(one.given)}


def recipe_of(
    recipe: Recipe | str | Path | None,
    overrides: Sequence[str],
    flat: dict[str, Any],
    sources: Sources,
) -> Recipe:
    """Build the recipe from the arguments of :func:`dprlhf.train`.

    Raises:
        DprlhfError: An argument would have no effect, or a setting is wrong.
    """
    if recipe is not None and flat:
        raise DprlhfError(
            f"argument '{next(iter(flat))}' has no effect with a recipe: "
            + (
                "set it in the Recipe"
                if isinstance(recipe, Recipe)
                else 'use overrides=["section.key=value"]'
            )
        )
    check_overrides(recipe, overrides)
    if isinstance(recipe, str | Path):
        recipe = load_recipe(recipe, overrides)
    if isinstance(recipe, Recipe):
        return from_memory(
            recipe,
            data=sources.prompts is not None,
            rewards=sources.rewards,
            evaluation=sources.evaluation_prompts is not None,
        )
    values: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = _SHORT.get(name, name).split("__")
        node = values
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    if sources.prompts is not None:
        values.setdefault("data", {}).setdefault("path", IN_MEMORY)
    if sources.rewards is not None:
        values.setdefault("rewards", [one.settings.model_dump() for one in sources.rewards])
    if sources.evaluation_prompts is not None:
        public = values.setdefault("evaluation", {}).setdefault("data", {})
        public.setdefault("path", IN_MEMORY)
    return make_recipe(values, source="train")


def check_overrides(recipe: Any, overrides: Sequence[str]) -> None:
    """Refuse overrides of a recipe that is not a file.

    Raises:
        DprlhfError: There are overrides, which would have no effect.
    """
    if overrides and not isinstance(recipe, str | Path):
        raise DprlhfError(
            f"overrides: {overrides[0]!r} has no effect without a recipe's file: "
            + ("give settings by name" if recipe is None else "set it in the recipe")
        )


def from_memory(
    recipe: R, *, data: bool, rewards: Sequence[GivenReward] | None = None, evaluation: bool
) -> R:
    """Replace the paths in a recipe by ``in-memory`` where the program passes objects instead.

    The run's recipe and cards then name nothing that was not used, and a resumed run asks for the
    same objects again. Public rows for a recipe without ``evaluation`` are read like the private
    ones.

    Args:
        recipe: The recipe of a run of any stage.
        data: Whether the users' rows are in memory.
        rewards: The rewards that the program passes; None for those of the recipe.
        evaluation: Whether the public rows are.
    """
    values = recipe.model_dump()
    if evaluation:
        public = values["evaluation"] or {"data": {**values["data"], "user_column": None}}
        values["evaluation"] = {**public, "data": {**public["data"], **_PLACE}}
    if data:
        values["data"] |= _PLACE
    if rewards is not None:
        values["rewards"] = [one.settings.model_dump() for one in rewards]
    return cast(R, type(recipe).model_validate(values))


def rows_of(data: settings.Data, given: Any) -> Any:
    """Return the rows in memory if there are any, else load those that the recipe names.

    Raises:
        DprlhfError: The rows cannot be read; or a resumed run needs rows from memory again.
    """
    if given is not None:
        return rows_from(given, data.prompt_column)
    if data.path == IN_MEMORY:
        raise DprlhfError("this run's prompts were given in Python: give them again to resume()")
    return load_rows(data)
