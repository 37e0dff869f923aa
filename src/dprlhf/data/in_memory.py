"""Prompts, rewards and rows that a program passes in place of those that a recipe names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from dprlhf import recipe as settings
from dprlhf.data.file_formats import with_conversations
from dprlhf.data.given_rewards import GivenReward, is_model
from dprlhf.data.loading import load_rows
from dprlhf.errors import DprlhfError
from dprlhf.privacy.plan import Plan
from dprlhf.recipe import IN_MEMORY, AnyRecipe, Recipe, load_recipe, make_recipe
from dprlhf.recipe.base import values_of

R = TypeVar("R", bound=AnyRecipe)
Reward = Any
"""A reward, or a list of them, as :mod:`dprlhf.data.reward_arguments` takes them."""

_PLACE = {
    "path": IN_MEMORY, "name": None, "split": "train", "skip": 0, "limit": None,
}  # fmt: skip


class InMemoryInputs:
    """Objects in memory in the place of the recipe's data, rewards and policy; None for none."""

    def __init__(
        self,
        prompts: Any,
        reward: Any,
        evaluation_prompts: Any,
        policy: Any = None,
        # Where the "users" are public prompts: returns the plan of the run, which states no ε.
        stand_in_plan: Callable[[AnyRecipe], Plan] | None = None,
        *,
        reward_weights: Sequence[float] | None = None,
        reward_processing_classes: Any = None,
        models: Mapping[str, Any] | None = None,  # their private runs must count
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
        compute_metrics: Callable[..., Any] | None = None,
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
        self.compute_metrics = compute_metrics
        self.models = dict(models or {})
        if callable(tools) or isinstance(tools, str):
            raise DprlhfError("tools: give a list of functions, [function] for a single one")
        self.agent: dict[str, Any] = {
            "tools": list(tools) if tools else None,
            "environment_factory": environment_factory,
        }
        self.rewards: list[GivenReward] | None = None
        if reward is not None:
            from dprlhf.data.reward_arguments import given_rewards

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

    @property
    def agent_settings(self) -> dict[str, Any]:
        """The keys of ``rollout.agent`` that objects replace; empty without any."""
        keys = {"environment_factory": "environment"}
        given = [name for name, value in self.agent.items() if value is not None]
        placeholders = {keys.get(n, n): [IN_MEMORY] if n == "tools" else IN_MEMORY for n in given}
        if isinstance(several := self.agent["environment_factory"], Mapping):
            return {**placeholders, "environment": dict.fromkeys(several, IN_MEMORY)}
        return placeholders


def recipe_of(
    recipe: Recipe | str | Path | None,  # A recipe or its file; None for one from flat
    overrides: Sequence[str],
    flat: dict[str, Any],
    sources: InMemoryInputs,
    complete: Callable[[dict[str, Any], Recipe], dict[str, Any]] | None = None,
) -> Recipe:
    """Build the recipe from the arguments of :func:`dprlhf.train`."""
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
            agent=sources.agent_settings,
        )
    from dprlhf.data.keyword_settings import settings_from

    values = settings_from(flat)
    if sources.prompts is not None:
        _take_place(_section(values, "data"), "data")
    if sources.rewards is not None:
        values.setdefault("rewards", [one.settings.model_dump() for one in sources.rewards])
    if sources.evaluation_prompts is not None:
        _take_place(_section(_section(values, "evaluation"), "data"), "evaluation.data")
    if sources.agent_settings:
        _section(_section(values, "rollout"), "agent").update(sources.agent_settings)
    if complete is not None:
        values = complete(values, make_recipe({"rounds": 1, **values}, source="train"))
    return make_recipe(values, source="train")


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a section's values, which may be missing or None, to add keys to."""
    section: Any = values.get(name)
    section = values[name] = {} if section is None else section
    if not isinstance(section, dict):
        raise DprlhfError(
            f"train: {name}: give a mapping of its keys, or its keys as {name}__…, not a"
            f" {type(section).__name__}"
        )
    return section


def _take_place(data: dict[str, Any], name: str) -> None:
    """Write that a section's rows are in memory."""
    for key, own in _PLACE.items():
        if data.get(key, own) != own:
            raise DprlhfError(
                f"train: {name}.{key} has no effect with rows in memory: leave it out"
            )
    data["path"] = IN_MEMORY


def check_overrides(recipe: Any, overrides: Sequence[str]) -> None:
    """Refuse overrides of a recipe that is not a file."""
    if overrides and not isinstance(recipe, str | Path):
        raise DprlhfError(
            f"overrides: {overrides[0]!r} has no effect without a recipe's file: "
            + ("give settings by name" if recipe is None else "set it in the recipe")
        )


def from_memory(
    recipe: R,
    *,
    data: bool,
    rewards: Sequence[GivenReward] | None = None,  # The rewards that the program passes
    evaluation: bool,
    agent: dict[str, Any] | None = None,
) -> R:
    """Replace the paths in a recipe by ``in-memory`` where the program passes objects instead.

    The run's recipe and cards then name nothing that was not used, and a resumed run asks for the
    same objects again.
    """
    values = values_of(recipe)
    if evaluation:
        values["evaluation"] = {**(values["evaluation"] or {}), "data": {"path": IN_MEMORY}}
    if data:
        values["data"] |= _PLACE
    if rewards is not None:
        values["rewards"] = [one.settings.model_dump() for one in rewards]
    if agent:
        values["rollout"]["agent"] = {**(values["rollout"]["agent"] or {}), **agent}
    return cast(R, type(recipe).model_validate(values))


def rows_of(data: settings.Data, given: Any) -> Any:
    """Return the rows in memory if there are any, else load those that the recipe names."""
    if given is not None:
        from dprlhf.data.given_rows import rows_from

        return with_conversations(rows_from(given, data.prompt_column), data.prompt_column)
    if data.path == IN_MEMORY:
        raise DprlhfError("this run's prompts were given in Python: give them again to resume()")
    return load_rows(data)
