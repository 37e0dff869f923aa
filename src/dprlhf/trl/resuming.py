"""``train(resume_from_checkpoint=…)``: the run that a private trainer continues."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar, cast

from dprlhf.errors import DprlhfError, one_line
from dprlhf.recipe import AnyRecipe, Recipe, load_any_recipe
from dprlhf.runs.folder import RunFolder
from dprlhf.runs.opening import recipe_digest
from dprlhf.runs.trackers import flat

R = TypeVar("R", bound=AnyRecipe)

_TRLS = re.compile(r"checkpoint-\d+")
"""The name of a checkpoint of TRL's trainers."""

_SHOWN = 4
"""Most settings of another run that an error names."""

_LONGEST = 80
"""Characters of such a setting's value that it quotes."""


def continued(recipe: R, folder: RunFolder, again: bool | str | Path) -> R:
    """Return the recipe of the run to continue, if it is a trainer's own."""
    place = folder.path if again is True else Path(str(again))
    if _TRLS.fullmatch(place.name):
        raise DprlhfError(
            f"resume_from_checkpoint={str(again)!r}: a private run has no folders {place.name}, as"
            " TRL's have: it goes on after its last finished round and never from an earlier one,"
            f" whose users would be drawn again. Pass True, with output_dir ({folder.path}) the"
            " folder of that run"
        )
    if place.name == folder.checkpoint.name and not (place / "recipe.yaml").exists():
        place = place.parent
    if not place.exists() or not folder.path.exists():
        missing = folder.path if place.exists() else place
        raise DprlhfError(
            f"resume_from_checkpoint: there is no {missing}. True continues the run in"
            f" output_dir ({folder.path}) after its last finished round; without such a"
            " run, call train() alone"
        )
    if place.resolve() != folder.path.resolve():
        raise DprlhfError(
            f"resume_from_checkpoint: a run continues in its own folder: give True and"
            f" output_dir={str(place)!r}"
        )
    folder.require()
    held: AnyRecipe = load_any_recipe(folder.recipe)
    own: AnyRecipe = recipe
    if isinstance(held, Recipe) and isinstance(recipe, Recipe):
        size = {"batch_size": held.rollout.batch_size}  # what "auto" became
        rollout = recipe.rollout.model_copy(update=size)
        own = recipe.model_copy(update={"rollout": rollout})
    if own.policy.dtype == "auto":
        settled = own.policy.model_copy(update={"dtype": held.policy.dtype})
        own = own.model_copy(update={"policy": settled})
    if recipe_digest(own) != recipe_digest(held):
        raise DprlhfError(
            f"{folder.path}: its settings are not this trainer's ({_other(own, held)});"
            " continue it with the same ones"
        )
    return cast(R, held)


def _other(own: AnyRecipe, held: AnyRecipe) -> str:
    """Return the settings in which two recipes differ, with both values."""
    mine, theirs = flat(own.model_dump(mode="json")), flat(held.model_dump(mode="json"))
    differ = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    shown = [
        f"{key} {one_line(mine.get(key), _LONGEST)}, there {one_line(theirs.get(key), _LONGEST)}"
        for key in differ[:_SHOWN]
    ]
    return "; ".join([*shown, *(["…"] if len(differ) > _SHOWN else [])])
