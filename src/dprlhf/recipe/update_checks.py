"""Checks of the section ``update`` against the recipe's other sections, for all updates alike.

What only one update refuses stands in its settings class (``check``).
"""

from __future__ import annotations

from collections.abc import Callable

from dprlhf.recipe.private_update import PrivateUpdate, Sections
from dprlhf.recipe.updates import UPDATE_SETTINGS


def check_update(update: PrivateUpdate, recipe: Sections) -> None:
    """Refuse a recipe whose other sections do not work with its update."""
    if update.least_squares is not None and update.clip_norm == float("inf"):
        raise ValueError(
            "update.clip_norm bounds the features of the regression: give a finite one, also"
            " with privacy.epsilon .inf"
        )
    if update.subspace is not None and update.least_squares is not None:
        raise ValueError(
            f"update.subspace: update.name {update.name} releases the answers of a regression,"
            " not gradients: leave subspace out, or take pg, grpo or ppo"
        )
    if recipe.rollout.mask_truncated and not update.leaves_rows_out:
        raise ValueError(
            "rollout.mask_truncated works with update.name"
            f" {updates_that(lambda kind: kind.leaves_rows_out)}; {update.name} takes a user's"
            " responses together: leave it out"
        )
    if recipe.rollout.truncates and update.moves_within_round:
        key = recipe.rollout.truncates[0]
        instead = {
            "ppo": "write update.epochs: 1",
            "rebel": "write update.steps: 1 or give update.oracle",
        }
        raise ValueError(
            f"{key}: update.name {update.name} takes several steps on a round's responses, after"
            " which the policy keeps other tokens than those it sampled from:"
            f" {instead.get(update.name, 'take pg, grpo or npg')}, or leave {key} out"
        )
    update.check(recipe)


def updates_that(fits: Callable[[type[PrivateUpdate]], bool]) -> str:
    """Return the names of the updates that have some property: ``pg, grpo or ppo``."""
    *first, last = [name for name, kind in UPDATE_SETTINGS.items() if fits(kind)]
    return f"{', '.join(first)} or {last}" if first else last
