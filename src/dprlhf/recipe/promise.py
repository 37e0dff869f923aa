"""Checks of a whole recipe without which the stated ε would be wrong."""

from __future__ import annotations

import math
import os
from pathlib import Path

from dprlhf.recipe.base import IN_MEMORY
from dprlhf.recipe.data import Data, PublicData
from dprlhf.recipe.privacy import Privacy


def check_promise(
    privacy: Privacy,
    *,
    clip_norm: float,  # Clip norm S
    data: Data,
    public: PublicData | None,
    guides: PublicData | None = None,  # The section of the public rows of update.subspace
) -> None:
    """Refuse what would make the stated ε wrong, or publish what is private."""
    if math.isinf(clip_norm) and not privacy.baseline:
        raise ValueError("update.clip_norm must be finite unless privacy.epsilon is .inf")
    if public is not None and same_rows(data, public):
        raise ValueError(
            "evaluation.data names the private users: evaluation writes prompts and scores in the"
            " open, so it needs public rows"
        )
    if guides is not None and same_rows(data, guides):
        raise ValueError(
            "update.subspace.data names the private users: the directions that are fitted to it are"
            " used without noise, so it needs public rows"
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
