"""The answers to the questions of ``dprlhf init``, each checked when it is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from dprlhf.data.columns import listed_names
from dprlhf.data.file_formats import FORMATS
from dprlhf.errors import DprlhfError

DATA_FILES = tuple(FORMATS.keys() - {".txt"})
"""The suffixes of files with columns; that of a text file is called what the recipe calls it."""

PROMPT_COLUMNS = {
    "rl": ("prompt", "messages"),
    "sft": ("prompt", "messages", "text"),
    "reward": ("prompt",),
    "dpo": ("prompt", "chosen"),
    "feedback": ("prompt",),
}
"""The columns that are taken for the prompts' without being named, the first that is there."""


def checked(
    check: Callable[[str, Mapping[str, Any]], None],
) -> Callable[[typer.Context, str], str]:
    """Return a callback of an option's prompt, which asks again after a wrong answer."""

    def callback(context: typer.Context, answer: str) -> str:
        try:
            check(answer, context.params)
        except DprlhfError as error:
            raise typer.BadParameter(str(error)) from None
        return answer

    return callback


def take_stage(context: typer.Context, stage: str) -> str:
    """Check the stage of a recipe; where it has no rewards, no question is asked about them."""
    if stage not in PROMPT_COLUMNS:
        raise typer.BadParameter(f"{stage!r} is none of {', '.join(PROMPT_COLUMNS)}")
    if stage != "rl":
        context.default_map = {**(context.default_map or {}), "reward": ""}
    return stage


def check_model(model: str, _: Mapping[str, Any]) -> None:
    """Check that the model is named, and that a folder that is named exists."""
    _check_place("model", model)


def check_prompts(prompts: str, earlier: Mapping[str, Any]) -> None:
    """Check that the file or folder of the private prompts exists, and has a column of prompts."""
    _check_place("prompts", prompts)
    columns_in(prompts, earlier.get("prompt_column"), earlier["stage"])


def check_public_prompts(public_prompts: str, earlier: Mapping[str, Any]) -> None:
    """Check that the file of the public prompts exists, if one is named, and has such a column."""
    if public_prompts:
        _check_place("public prompts", public_prompts)
        named = earlier.get("prompt_column")
        column_in(public_prompts, named, "public prompts", earlier["stage"])


def check_user_column(column: str, earlier: Mapping[str, Any]) -> None:
    """Check that the file of the private prompts, which was named before, has the column."""
    if "prompts" in earlier:
        prompts = earlier["prompts"]
        named = column_in(prompts, earlier.get("prompt_column"), stage=earlier["stage"])
        users_in(prompts, column, named)


def check_reward(reward: str, _: Mapping[str, Any]) -> None:
    """Check that the reward names a function which can be loaded, unless it is a classifier."""
    from dprlhf.data.reward_arguments import named_reward
    from dprlhf.rewards.loading import load_reward

    place = reward.rpartition(":")[0]
    if reward.endswith(".py"):
        raise DprlhfError(f"reward {reward!r}: name the function as well: {reward}:FUNCTION")
    if place.endswith(".py") and not Path(place).is_file():
        raise DprlhfError(f"reward {reward!r}: there is no file {place!r}")
    if place and (named := named_reward(reward)).function is not None:
        load_reward(named)


def check_epsilon(epsilon: str, _: Mapping[str, Any]) -> None:
    """Check that ε is a finite number above 0."""
    try:
        possible = 0 < float(epsilon) < math.inf
    except ValueError:
        possible = False
    if not possible:
        raise DprlhfError(f"epsilon must be a finite number above 0, not {epsilon!r}")


def _check_place(what: str, path: str) -> None:
    if not path:
        raise DprlhfError(f"{what}: name a file, a folder or a hub id")
    is_place = path.endswith(DATA_FILES) or path.startswith(("/", ".", "~"))
    if is_place and not Path(path).exists():
        raise DprlhfError(f"{what} {path!r}: there is no such file or folder")


def columns_in(prompts: str, named: str | None, stage: str) -> dict[str, str | None]:
    """Return the columns of a file of private rows, by the key of a recipe of a stage."""
    columns: dict[str, str | None] = {"prompt_column": column_in(prompts, named, stage=stage)}
    names = names_in(prompts)
    if stage == "sft" and names and "completion" not in names:
        columns["completion_column"] = None  # the loss is taken on whole texts
    pair = ("chosen", "rejected")
    needed = {"reward": pair, "dpo": pair, "feedback": ("completion", "label")}.get(stage, ())
    lacking = {*needed} - {*names}
    if names and lacking:
        raise DprlhfError(
            f"prompts {prompts!r}: there is no column {min(lacking)!r}; the columns are"
            f" {listed_names(names)}"
        )
    return columns


def column_in(prompts: str, named: str | None, what: str = "prompts", stage: str = "rl") -> str:
    """Return the column of the prompts in a file; of a folder or a hub id, the usual one."""
    wanted = (named,) if named else PROMPT_COLUMNS[stage]
    columns = names_in(prompts)
    match = next((name for name in wanted if name in columns), None)
    if columns and match is None:
        raise DprlhfError(
            f"{what} {prompts!r}: there is no column {' or '.join(map(repr, wanted))}; the columns"
            f" are {listed_names(columns)}: name that of the prompts with --prompt-column"
        )
    return match or wanted[0]


def names_in(prompts: str) -> list[str]:
    """Return the names of a file's columns; none of a folder or a hub id."""
    names: list[str] = _rows_in(prompts).column_names if prompts.endswith(DATA_FILES) else []
    return names


def users_in(prompts: str, user_column: str, prompt_column: str) -> int | None:
    """Return the number of users in a file of prompts; None for a folder or a hub id."""
    from dprlhf.data.users import Users
    from dprlhf.recipe import Data

    if not prompts.endswith(DATA_FILES):
        return None
    rows = _rows_in(prompts, user_column)
    if not rows.column_names:
        return None
    data = Data(path=prompts, prompt_column=prompt_column, user_column=columns_of(user_column))
    return Users(rows, data).count


def _rows_in(prompts: str, user_column: str = "") -> Any:
    import datasets

    from dprlhf.data.loading import load_rows
    from dprlhf.recipe import Data

    datasets.disable_progress_bars()
    return load_rows(Data(path=prompts, user_column=columns_of(user_column)))


def columns_of(answer: str) -> str | list[str] | None:
    """Return ``data.user_column``: one column, several with commas between them, or none.

    >>> columns_of("user"), columns_of("buyer, seller"), columns_of("")
    ('user', ['buyer', 'seller'], None)
    """
    from dprlhf.recipe.data import unit_of

    names = [name.strip() for name in answer.split(",") if name.strip()]
    unit_of(names)  # refuses a column that is named twice
    return names if len(names) > 1 else next(iter(names), None)
