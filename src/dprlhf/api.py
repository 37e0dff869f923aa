"""Train and resume: the calls behind the command line and the Python API."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dprlhf.data.given_rewards import is_model
from dprlhf.data.in_memory import InMemoryInputs, Reward, recipe_of
from dprlhf.errors import DprlhfError, MissingPathError
from dprlhf.policies.adapters import adapter_rollback
from dprlhf.policies.loading import without_wrapper
from dprlhf.recipe import IN_MEMORY, AnyRecipe, Recipe, load_any_recipe
from dprlhf.runs.folder import RunFolder, time_stamp
from dprlhf.training.build import Callback, open_run
from dprlhf.training.processes import Processes
from dprlhf.training.setup import load_policy_of
from dprlhf.training.trainer import complete

if TYPE_CHECKING:
    from dprlhf.training.reinforcement import Result


def train(
    recipe: Recipe | str | Path | None = None,
    *,
    prompts: Sequence[Any] | Any | None = None,
    processing_class: Any = None,
    peft_config: Any = None,
    reward: Reward | None = None,
    reward_weights: Sequence[float] | None = None,
    reward_processing_classes: Any = None,
    tools: Sequence[Callable[..., Any]] | None = None,
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
    evaluation_prompts: Sequence[Any] | Any | None = None,
    overrides: Sequence[str] = (),
    output_dir: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    **flat: Any,
) -> Result:
    """Fine-tune a policy on private prompts by reinforcement learning.

    Args:
        recipe: A :class:`~dprlhf.recipe.Recipe`, a YAML file, or None to build one from ``flat``.
        prompts: Private prompts in memory: a list of texts, conversations or rows, a generator, a
            pandas ``DataFrame``, or a ``datasets.Dataset`` or ``IterableDataset``. Replaces the
            recipe's data.
        processing_class: Tokenizer of a model that is passed as an object; None loads that of
            ``model.config.name_or_path``.
        peft_config: PEFT config of the adapter, in place of ``policy__adapter``.
        reward: A reward, or a list of them; replaces the recipe's rewards. Each is a callable with
            TRL's signature, the hub id or folder of a sequence classifier, ``module:function``, a
            sequence classifier as an object, a :class:`~dprlhf.recipe.Reward`, or a pair
            ``(reward, weight)``.
        reward_weights: A weight for each reward, in place of pairs.
        reward_processing_classes: Tokenizer of a reward that is a model object, or a list with a
            tokenizer or None for each reward; None takes the one beside the model's weights.
        tools: Functions that the policy may call in a conversation, as in TRL's ``GRPOTrainer``
            (:mod:`dprlhf.agents`).
        environment_factory: Makes an environment for each trajectory; its methods are tools.
            Without ``reward``, its ``get_reward`` and ``get_turn_reward`` are the rewards. A
            dictionary has a factory for each value of the column ``environment``.
        evaluation_prompts: Public prompts in memory, for the reward before and after.
        overrides: Changes ``section.key=value`` to a YAML file.
        output_dir: The run folder; must not exist.
        callbacks: Called after every round with its public and released metrics: functions, or
            ``transformers.TrainerCallback`` objects or classes (:mod:`dprlhf.runs.trackers`).
        quiet: Show no progress bars.
        **flat: Settings by name in place of a recipe: ``model`` (a hub id, a folder, or a causal
            language model as an object), ``epsilon``, ``rounds``, any key with ``__`` for the dot
            (``update__clip_norm=0.5``), or TRL's name of one (``num_generations=4``), as
            ``dprlhf train`` takes it.

    Returns:
        The tuned policy, the guarantee and the public rewards.

    Raises:
        DprlhfError: A setting, the data or a reward is wrong; the message names it.
    """
    named = reward is not None or recipe is not None or "rewards" in flat
    if not named and environment_factory is not None:
        from dprlhf.agents.rewards import environment_rewards

        reward = environment_rewards(environment_factory) or None
    sources = InMemoryInputs(
        prompts,
        reward,
        evaluation_prompts,
        reward_weights=reward_weights,
        reward_processing_classes=reward_processing_classes,
        tools=tools,
        environment_factory=environment_factory,
    )
    model = without_wrapper(flat.get("model"))
    if is_model(model):
        flat["model"] = IN_MEMORY
    elif isinstance(model, os.PathLike):
        flat["model"] = os.fspath(model)
    if peft_config is not None and recipe is None:
        from dprlhf.policies.given import adapter_of

        flat["policy__adapter"] = adapter_of(peft_config)
    elif peft_config is not None:
        flat["peft_config"] = peft_config  # to be refused, as any setting beside a recipe

    def complete(values: dict[str, Any], draft: Recipe) -> dict[str, Any]:
        from dprlhf.training.defaults import completed

        named = draft.policy.model_name_or_path
        return completed(values, draft, sources, model if is_model(model) else named)

    recipe = recipe_of(recipe, overrides, flat, sources, complete)
    with contextlib.ExitStack() as refused:
        refused.callback(adapter_rollback(model))
        _take_model(sources, recipe, model, processing_class)
        begin = refused.pop_all
        result: Result = start_any(recipe, sources, output_dir, "", callbacks, quiet, begin)
    return result


def resume(
    folder: str | Path,
    *,
    prompts: Sequence[Any] | Any | None = None,
    model: Any = None,
    processing_class: Any = None,
    reward: Reward | None = None,
    reward_processing_classes: Any = None,
    tools: Sequence[Callable[..., Any]] | None = None,
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
    evaluation_prompts: Sequence[Any] | Any | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
) -> Result:
    """Continue an interrupted run, with the same recipe and the same users.

    Rounds that were charged stay spent: their users are never drawn again. What was passed to
    :func:`train` as an object has to be passed again.

    Args:
        folder: The run folder.
        prompts: The same private prompts, if they were in memory.
        model: The base model with its original weights, if it was an object.
        processing_class: Its tokenizer.
        reward: The same reward or rewards, if they were objects.
        reward_processing_classes: Their tokenizers.
        tools: The same tools.
        environment_factory: The same factory of environments.
        evaluation_prompts: The same public prompts, if they were in memory.
        callbacks: Called after every round, as in :func:`train`.
        quiet: Show no progress bars.

    Returns:
        The result of the whole run, as from :func:`train`.

    Raises:
        DprlhfError: The folder is no run folder, was altered, or its data or recipe changed.
    """
    run_folder = RunFolder(Path(folder))
    sources = InMemoryInputs(
        prompts,
        reward,
        evaluation_prompts,
        reward_processing_classes=reward_processing_classes,
        tools=tools,
        environment_factory=environment_factory,
    )
    recipe = recipe_in(run_folder)
    model = without_wrapper(model)
    with contextlib.ExitStack() as refused:
        refused.callback(adapter_rollback(model))
        _take_model(sources, recipe, model, processing_class)
        begin = refused.pop_all
        result: Result = resume_any(recipe, run_folder, sources, callbacks, quiet, begin)
    return result


def _take_model(sources: InMemoryInputs, recipe: Recipe, model: Any, tokenizer: Any) -> None:
    """Make the policy from a model that was passed as an object."""
    if is_model(model) and recipe.policy.model_name_or_path != IN_MEMORY:
        raise DprlhfError(
            f"model: this run's model is {recipe.policy.model_name_or_path!r}, which is loaded by"
            " its name: pass none"
        )
    if is_model(model):
        sources.policy = load_policy_of(recipe, model=model, tokenizer=tokenizer)
        sources.models["model"] = model
    elif tokenizer is not None:
        raise DprlhfError(
            "processing_class: a model that is named brings its tokenizer, also when the run is"
            " resumed: pass the model as an object too, or save the tokenizer into its folder"
        )


def recipe_in(folder: RunFolder) -> Recipe:
    """Return the recipe of a run by reinforcement learning."""
    folder.require()
    recipe = load_any_recipe(folder.recipe)
    if not isinstance(recipe, Recipe):
        raise DprlhfError(
            f"{folder.path}: a run of stage {recipe.stage}; continue it with dprlhf resume, and"
            f" load what it made from {folder.model}"
        )
    return recipe


def start_any(
    recipe: AnyRecipe,
    sources: InMemoryInputs,
    output_dir: str | Path | None,
    suffix: str,
    callbacks: Sequence[Callback],
    quiet: bool,
    begin: Callable[[], Any] = lambda: None,
) -> Any:
    """Start a run of any stage and return its result."""
    if output_dir is not None:
        recipe = recipe.model_copy(update={"output_dir": str(output_dir)})
    # One name for all processes of a launch, whose clocks may differ by a second.
    name = Processes.connect().from_main(recipe.output_dir or f"runs/{time_stamp()}{suffix}")
    with open_run(
        recipe, RunFolder(Path(name)), sources, create=True, callbacks=callbacks, quiet=quiet
    ) as run:
        begin()
        return complete(run)


def resume_any(
    recipe: AnyRecipe,
    folder: RunFolder,
    sources: InMemoryInputs,
    callbacks: Sequence[Callback],
    quiet: bool,
    begin: Callable[[], Any] = lambda: None,
) -> Any:
    """Continue a run of any stage and return its result; ``begin`` as in :func:`start_any`."""
    try:
        with open_run(
            recipe, folder, sources, create=False, callbacks=callbacks, quiet=quiet
        ) as run:
            begin()
            return complete(run)
    except MissingPathError as missing:
        raise DprlhfError(
            f"{missing}; resume a run from the folder in which it was started"
        ) from None
