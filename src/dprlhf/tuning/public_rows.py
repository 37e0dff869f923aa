"""Which public prompts a stand-in run takes for what; the rows of the final evaluation for nothing.

The reward that a run reports must come from prompts on which nothing was chosen. So the public
rows are cut in three: those of the recipe's evaluation, which no stand-in run sees; those on which
trials are scored; and those that stand in for users.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import concatenate_datasets

from dprlhf.data.in_memory import rows_of
from dprlhf.data.loading import load_rows
from dprlhf.data.public import CONTRASTED, HELD_OUT
from dprlhf.errors import DprlhfError
from dprlhf.recipe import Data, PublicData, Recipe
from dprlhf.recipe.privacy import same_rows

SCORING = 256
"""Number of public prompts on which a trial is scored, unless the caller asks for another one."""

_FEWEST = 16
_SEED = 0


@dataclass(frozen=True)
class PublicRows:
    """Public prompts, divided by their use in stand-in runs."""

    spec: Data  # The recipe's section that says how the rows are read
    stand_ins: Any  # A datasets.Dataset of the prompts that stand in for users
    scoring: Any
    scored: int  # Number of the rows in scoring on which the reward is measured

    @property
    def digest(self) -> str:
        """A SHA-256 digest of all rows, by which a search that goes on knows them again."""
        state = hashlib.sha256()
        for rows in (self.stand_ins, self.scoring):
            for batch in rows.with_format("arrow").iter(batch_size=1000):
                state.update(json.dumps(batch.to_pydict(), default=str).encode())
        return state.hexdigest()


def public_rows(
    recipe: Recipe, file: Path | None = None, *, rows: Any = None, scored: int = SCORING
) -> PublicRows:
    """Divide the public prompts of a recipe, or those of a file, for stand-in runs."""
    # Left alone: the first evaluation.prompts rows, rows with such a prompt, and the 64 after them,
    # to which the private run fits its settings. No prompt to whose gradient update.subspace is
    # fitted stands in for a user: along its own direction it would do better than any user.
    final = recipe.evaluation.prompts if recipe.evaluation is not None else 0
    spec = _spec(recipe, file)
    all_rows = rows_of(spec, rows if file is None else None)
    if spec.prompt_column not in all_rows.column_names:
        raise DprlhfError(
            f"tuning: there is no column {spec.prompt_column!r} in {spec.path!r}: stand-ins are"
            " told apart by their prompts, also where an environment gives the prompt"
        )
    apart = _prompts_apart(recipe, all_rows if file is None else None, rows)
    start = final if file is None else 0
    fitted = _range(all_rows, start, start + HELD_OUT)
    rest = _range(all_rows, start + HELD_OUT, len(all_rows))
    new = [i for i, prompt in enumerate(rest[spec.prompt_column]) if str(prompt) not in apart]
    if len(new) < scored + _FEWEST:
        left = f" after the {final} of the evaluation and {HELD_OUT} for fitting" if final else ""
        gone = len(rest) - len(new)
        raise DprlhfError(
            f"tuning: {len(new)} public prompts in {spec.path!r}{left} are too few: {scored} score"
            f" the trials, and at least {_FEWEST} stand in for users."
            + (f" {gone} more guide update.subspace or are evaluated." if gone else "")
            + " Give more rows to evaluation.data, a file with --public, or score on fewer prompts"
        )
    order = np.random.default_rng(_SEED).permutation(new)
    # Directions are fitted to rows of the evaluation's data, too, if they have none of their own.
    subspace, beside = recipe.update.subspace, 0
    if subspace is None or subspace.data is None:
        contrasted = CONTRASTED if recipe.policy.adapter.contrast_column is not None else 0
        beside = max(contrasted, subspace.prompts if subspace is not None else 0)
    guides = min(beside, (len(new) - scored) // 2)
    scoring = [rest.select(order[:scored]), fitted, rest.select(order[scored : scored + guides])]
    return PublicRows(
        spec=spec,
        stand_ins=rest.select(order[scored + guides :]),
        scoring=concatenate_datasets(scoring),
        scored=scored,
    )


def _spec(recipe: Recipe, file: Path | None) -> Data:
    """Return the section by which public rows are read, and refuse the private rows."""
    if file is None and recipe.evaluation is None:
        raise DprlhfError(
            "tuning needs public prompts: name some under evaluation.data, or give --public FILE"
        )
    if file is not None:
        place = PublicData(path=str(file))
        if same_rows(recipe.data, place):
            raise DprlhfError(f"--public {file}: these are the private users' rows")
        return place.like(recipe.data)
    assert recipe.evaluation is not None
    return recipe.evaluation.data.like(recipe.data)


def _prompts_apart(recipe: Recipe, dataset: Any, rows: Any) -> set[str]:
    """Return the prompts that stand in for nobody: of the final evaluation and ``subspace``."""
    apart: set[str] = set()
    column = recipe.data.prompt_column
    if (evaluation := recipe.evaluation) is not None:
        own = rows_of(evaluation.data.like(recipe.data), rows) if dataset is None else dataset
        last = min(evaluation.prompts, len(own))
        apart |= {str(prompt) for prompt in own[:last][column]}
    subspace = recipe.update.subspace
    if subspace is not None and subspace.data is not None:
        guiding = load_rows(subspace.data.like(recipe.data))
        apart |= {str(prompt) for prompt in guiding[column]}
    return apart


def _range(rows: Any, start: int, end: int) -> Any:
    return rows.select(range(start, max(start, min(end, len(rows)))))
