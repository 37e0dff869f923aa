"""Checks of a whole recipe of any stage, most of which the stated ε would be wrong without."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from dprlhf.recipe.base import IN_MEMORY
from dprlhf.recipe.data import Data, PublicData


def check_shared(recipe: Any) -> None:
    """Refuse what would make the stated ε wrong, publish what is private, or lack public rows."""
    data, subspace = recipe.data, recipe.update.subspace
    public = recipe.evaluation.data if recipe.evaluation else None
    if math.isinf(recipe.update.clip_norm) and not recipe.privacy.baseline:
        raise ValueError("update.clip_norm must be finite unless privacy.epsilon is .inf")
    if public is not None and same_rows(data, public):
        raise ValueError(
            "evaluation.data names the private users: evaluation writes prompts and scores in the"
            " open, so it needs public rows"
        )
    if subspace is not None and subspace.data is not None and same_rows(data, subspace.data):
        raise ValueError(
            "update.subspace.data names the private users: the directions that are fitted to it are"
            " used without noise, so it needs public rows"
        )
    if subspace is not None and subspace.data is None and public is None:
        raise ValueError(
            "update.subspace needs public rows: give update.subspace.data, or evaluation with"
            " more rows than evaluation.prompts"
        )
    if subspace is not None and recipe.privacy.bands > 1 and subspace.refresh < recipe.rounds:
        raise ValueError(
            "privacy.bands: noise of earlier rounds is taken back along the directions of"
            " earlier rounds: set update.subspace.refresh to the number of rounds, or bands 1"
        )
    if recipe.policy.adapter.init != "random" and public is None:
        raise ValueError(
            f"policy.adapter.init: {recipe.policy.adapter.init} needs public rows (evaluation.data)"
        )


def same_rows(a: Data, b: Data | PublicData) -> bool:
    """Return whether two sections may name the same rows, ``skip`` and ``limit`` left aside."""
    if IN_MEMORY in (a.path, b.path) or _place(a.path) != _place(b.path):
        return False
    place = Path(_place(a.path))
    # A file, and a folder with one saved dataset, are read whatever name and split are asked for.
    if place.is_file() or (place / "dataset_info.json").is_file():
        return True
    # Two different slices of one split are taken to have no row in common.
    return a.name == b.name and any(
        one.partition("[")[0] == other.partition("[")[0]
        and (one == other or "[" not in one or "[" not in other)
        for one in a.split.split("+")
        for other in b.split.split("+")
    )


def _place(path: str) -> str:
    return os.path.realpath(path) if os.path.exists(path) else path
