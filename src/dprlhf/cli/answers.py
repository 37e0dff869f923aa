"""The answers to the questions of ``dprlhf init``, each checked when it is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from dprlhf.errors import DprlhfError

DATA_FILES = (".csv", ".json", ".jsonl", ".parquet")
"""The suffixes of files of prompts."""


def checked(
    check: Callable[[str, Mapping[str, Any]], None],
) -> Callable[[typer.Context, str], str]:
    """Return a callback of an option's prompt, which asks again after a wrong answer.

    Args:
        check: Function of the answer and of the earlier answers by name, which raises a
            :class:`DprlhfError`.
    """

    def callback(context: typer.Context, answer: str) -> str:
        try:
            check(answer, context.params)
        except DprlhfError as error:
            raise typer.BadParameter(str(error)) from None
        return answer

    return callback


def check_model(model: str, _: Mapping[str, Any]) -> None:
    """Check that the model is named, and that a folder that is named exists.

    Raises:
        DprlhfError: There is no name, or no such folder.
    """
    _check_place("model", model)


def check_prompts(prompts: str, _: Mapping[str, Any]) -> None:
    """Check that the file or folder of the private prompts exists.

    Raises:
        DprlhfError: It does not.
    """
    _check_place("prompts", prompts)


def check_public_prompts(public_prompts: str, _: Mapping[str, Any]) -> None:
    """Check that the file of the public prompts exists, if one is named.

    Raises:
        DprlhfError: It does not.
    """
    if public_prompts:
        _check_place("public prompts", public_prompts)


def check_user_column(column: str, earlier: Mapping[str, Any]) -> None:
    """Check that the file of the private prompts, which was named before, has the column.

    Raises:
        DprlhfError: It has not, or cannot be read.
    """
    if "prompts" in earlier:
        users_in(earlier["prompts"], column)


def check_reward(reward: str, _: Mapping[str, Any]) -> None:
    """Check that the reward names a function, and that its file exists.

    Raises:
        DprlhfError: The file is missing, or named without a function.
    """
    place = reward.rpartition(":")[0]
    if reward.endswith(".py"):
        raise DprlhfError(f"reward {reward!r}: name the function as well: {reward}:FUNCTION")
    if place.endswith(".py") and not Path(place).is_file():
        raise DprlhfError(f"reward {reward!r}: there is no file {place!r}")


def check_epsilon(epsilon: str, _: Mapping[str, Any]) -> None:
    """Check that ε is a finite number above 0.

    Raises:
        DprlhfError: It is not.
    """
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


def users_in(prompts: str, user_column: str) -> int | None:
    """Return the number of users in a file of prompts; None for a folder or a hub id.

    Raises:
        DprlhfError: The file cannot be read, or lacks the column.
    """
    import datasets

    from dprlhf.data.loading import load_rows
    from dprlhf.data.users import Users
    from dprlhf.recipe import Data

    if not prompts.endswith(DATA_FILES):
        return None
    datasets.disable_progress_bars()
    data = Data(path=prompts, user_column=user_column or None)
    rows = load_rows(data)
    if not rows.column_names:
        return None
    # Whatever the column of the prompts is called: it can still be written into the recipe.
    return Users(rows, data.model_copy(update={"prompt_column": rows.column_names[0]})).count
