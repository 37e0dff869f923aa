"""Train and resume the supervised stages: SFT, reward model, DPO and logged feedback."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dprlhf.api import resume_any, start_any
from dprlhf.data.in_memory import InMemoryInputs, check_overrides, from_memory
from dprlhf.errors import DprlhfError
from dprlhf.recipe import load_any_recipe
from dprlhf.recipe.supervised import StageRecipe
from dprlhf.runs.folder import RunFolder
from dprlhf.training.build import Callback
from dprlhf.training.supervised import StageResult


def train_stage(
    recipe: StageRecipe | str | Path,
    *,
    data: Sequence[Any] | Any | None = None,
    evaluation_data: Sequence[Any] | Any | None = None,
    overrides: Sequence[str] = (),
    output_dir: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
) -> StageResult:
    """Fit a policy to private documents, pairs or feedback, or a reward model to preferences.

    Args:
        recipe: The settings of the stage, or their YAML file.
        data: Private rows in memory, a list of dicts or a ``datasets.Dataset``. Replaces the
            recipe's data.
        evaluation_data: Public rows in memory, for the loss before and after.
        overrides: Changes ``section.key=value`` to a YAML file.
        output_dir: The run folder; must not exist.
        callbacks: Called after every round with its public and released metrics.
        quiet: Show no progress bars.

    Returns:
        The plan with its guarantee, the run folder and the public losses.

    Raises:
        DprlhfError: A setting or the data are wrong; the message names it.
    """
    if evaluation_data is not None and evaluation_data is data:
        raise DprlhfError("evaluation_data are the private rows: evaluation needs public ones")
    check_overrides(recipe, overrides)
    if isinstance(recipe, str | Path):
        recipe = load_stage_recipe(recipe, overrides)
    recipe = from_memory(recipe, data=data is not None, evaluation=evaluation_data is not None)
    sources = InMemoryInputs(data, None, evaluation_data)
    suffix = f"-{recipe.stage}"
    result: StageResult = start_any(recipe, sources, output_dir, suffix, callbacks, quiet)
    return result


def resume_stage(
    folder: str | Path,
    *,
    data: Sequence[Any] | Any | None = None,
    evaluation_data: Sequence[Any] | Any | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
) -> StageResult:
    """Continue an interrupted supervised stage, with the same recipe and the same users.

    Args:
        folder: The run folder.
        data: The same private rows, if they were in memory.
        evaluation_data: The same public rows, if they were in memory.
        callbacks: Called after every round with its public and released metrics.
        quiet: Show no progress bars.

    Returns:
        The result of the whole run, as from :func:`train_stage`.

    Raises:
        DprlhfError: The folder is not that of a supervised stage, was altered, or its data changed.
    """
    run_folder = RunFolder(Path(folder))
    recipe = load_stage_recipe(run_folder.recipe)
    sources = InMemoryInputs(data, None, evaluation_data)
    result: StageResult = resume_any(recipe, run_folder, sources, callbacks, quiet)
    return result


def load_stage_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, stage: str | None = None
) -> StageRecipe:
    """Read the YAML recipe of a supervised stage.

    Args:
        path: The YAML file.
        overrides: Changes ``section.key=value``.
        stage: The stage of a recipe that names none.

    Raises:
        DprlhfError: The file cannot be read, is of another kind, or a key or value is wrong.
    """
    recipe = load_any_recipe(path, overrides, stage=stage)
    if not isinstance(recipe, StageRecipe):
        raise DprlhfError(
            f"{path}: not a recipe of a supervised stage: it needs stage: sft, reward, dpo or"
            " feedback"
        )
    return recipe
