"""Other judges of what runs wrote: texts of finished runs scored by rewards that trained nothing.

Whoever optimises a reward may earn it without what it stands for. A judge that no run was trained
on shows whether the text changed as the reward says: gains should have the same signs, and the
same order over the runs of a table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from dprlhf.data.public import evaluated, public_users
from dprlhf.recipe import load_recipe
from dprlhf.rewards import Scorer, load_reward
from dprlhf.rewards.private import in_form_of
from dprlhf.runs.folder import RunFolder
from dprlhf.worth.statistics import Values

_RANGE = 100.0
"""Judges are clipped to this, far beyond their scores."""


def rise_by(judge: Mapping[str, Any], folder: Path, turned: bool) -> float:
    """Return the rise of a judge's mean score on the public prompts of a finished run.

    Args:
        judge: A reward as in a recipe. The column that the run's own reward is multiplied by, and
            its weight, multiply the judge's score as well.
        folder: The run folder.
        turned: Whether to take the mean over the users' wishes and their opposites.
    """
    own = load_recipe(folder / "recipe.yaml").rewards[0]
    samples = json.loads(RunFolder(folder).samples.read_text())
    rises = []
    for sign in (1.0, -1.0) if turned else (1.0,):
        spec = {**judge, "times_column": own.times_column, "weight": sign * own.weight}
        change = f"rewards={json.dumps([spec])}"
        recipe = load_recipe(folder / "recipe.yaml", overrides=(change,))
        prompts = evaluated(recipe, public_users(recipe, None))
        assert prompts is not None
        asked = list(prompts.prompts)
        assert asked == [sample["prompt"] for sample in samples]
        scorer = Scorer([load_reward(recipe.rewards[0])], _RANGE)
        no_ids: list[list[int]] = [[] for _ in asked]
        before, after = (
            scorer.score(
                asked,
                in_form_of(asked, [sample[when] for sample in samples]),
                no_ids,
                prompts.columns,
                range(len(asked)),
            ).values
            for when in ("before", "after")
        )
        rises.append(float(np.mean(after - before)))
    return sum(rises) / len(rises)


def agreement(proxy: Mapping[str, Values], gold: Mapping[str, Values]) -> tuple[float, float]:
    """Return how a judge agrees with the reward over the runs of a table.

    Args:
        proxy: Gains of the reward by run, ``[seeds]``.
        gold: Gains of the judge by run, ``[seeds]``.

    Returns:
        The share of runs whose mean gains have the same sign, and Spearman's rank correlation of
        the mean gains; NaN where all are equal.
    """
    one, other = (np.array([np.mean(found[name]) for name in proxy]) for found in (proxy, gold))
    constant = len(set(one)) == 1 or len(set(other)) == 1
    ranks = math.nan if constant else float(spearmanr(one, other).statistic)
    return float(np.mean(np.sign(one) == np.sign(other))), ranks
