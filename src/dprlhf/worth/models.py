"""The models of the comparisons, and the settings with which each is trained.

The settings were chosen on public prompts or on users that are in no reported table.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from dprlhf.errors import DprlhfError

FEW = 500
"""Up to this many users are few: see ``RESPONSES``."""

_SMALL: dict[str, Any] = {
    "data.limit": 6000, "rounds": 8, "rollout.responses": 4, "rollout.max_new_tokens": 8,
    "rollout.batch_size": 256, "update.batch_size": 256, "evaluation.prompts": 1000,
    "policy.dtype": "float32", "optimizer.learning_rate": 0.5,
}  # fmt: skip

PLAIN = {"privacy.epsilon": ".inf", "update.clip_norm": ".inf"}
"""Changes that take the noise and the clipping from a recipe."""

_FIXED_STEPS = {"optimizer.name": "normalized-sgd", "optimizer.momentum": 0.6}
"""Steps of a fixed length, which noise turns but does not lengthen."""

METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "small": {
        "reference": {**_FIXED_STEPS, "optimizer.learning_rate": 4.0},
        "today": {"update.clip_norm": 0.7},
        "subspace": {
            **_FIXED_STEPS,
            "optimizer.learning_rate": 4.0,
            "update.subspace": {"rank": 64, "prompts": 128, "refresh": 4},
        },
        "axis": {
            **_FIXED_STEPS,
            "optimizer.learning_rate": 8.0,
            "rollout.responses": 8,
            "update.subspace": {"rank": 1, "mean_first": True, "prompts": 512, "refresh": 4},
        },
    },
    "smollm2": {
        "reference": {},
        "today": {},
        "subspace": {
            **_FIXED_STEPS,
            "rounds": 8,
            "optimizer.learning_rate": 0.5,
            "update.subspace": {"rank": 16, "prompts": 64, "refresh": 2},
        },
        "axis": {
            **_FIXED_STEPS,
            "rounds": 8,
            "optimizer.learning_rate": 0.5,
            "update.subspace": {"rank": 1, "mean_first": True, "prompts": 256, "refresh": 4},
        },
        "moving-axis": {
            **_FIXED_STEPS,
            "rounds": 8,
            "optimizer.learning_rate": 0.7,
            "update.subspace": {"rank": 1, "mean_first": True, "prompts": 256, "refresh": 2},
        },
    },
}
"""Changes by model and method: "reference" is the run without noise and clipping, "today" the
recipe as it is, "subspace" a private run along directions in which public gradients vary, "axis"
one along the mean public gradient alone, for wishes that are the public's or their opposite, and
"moving-axis" one along that axis found anew more often, with longer steps."""

RESPONSES = (8, 4)
"""Responses to a prompt with few users and with more, where the method says nothing else."""


def word_reward(clone: Path) -> dict[str, Any]:
    """Return the small model's reward, word weights from public film reviews, in a clone."""
    return {"function": f"{clone / 'scripts' / 'word_sentiment.py'}:reward"}


def small(clone: Path) -> dict[str, Any]:
    """Return what the small model changes in a recipe of the IMDB task, besides the model."""
    return {**_SMALL, "rewards": [word_reward(clone)]}


def base(model: str, clone: Path) -> dict[str, Any]:
    """Return what a model changes in every recipe, besides the policy itself."""
    evaluation = {"evaluation.prompts": 256}
    if model != "small":
        return evaluation
    sizes = {"rollout.responses": 2, "rollout.batch_size": 64, "update.batch_size": 64}
    return {**small(clone), **sizes, "evaluation.every": 2, **evaluation}


def small_policy(folder: Path, clone: Path, *, train: bool = True) -> dict[str, Any]:
    """Return what the small policy changes in every recipe; it is trained on the first call.

    Args:
        folder: Folder of the small policy.
        clone: Folder of the repository, whose script trains it on public sentences.
        train: Whether to train it where it is not there.

    Raises:
        DprlhfError: It is not there, and shall not be trained.
    """
    if not (folder / "config.json").exists():
        if not train:
            raise DprlhfError(f"{folder}: no such model, and none is trained: drop --write-only")
        script = clone / "scripts" / "reviews_lm.py"
        subprocess.run([sys.executable, str(script), str(folder), "--epochs", "6"], check=True)
    return {"policy.model_name_or_path": str(folder), "policy.adapter.layers": [2, 3]}
