"""What a search returns: the settings that it tried, with their rewards, and the best of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dprlhf.recipe import Recipe


@dataclass(frozen=True)
class Tried:
    """Settings that were tried, with their public reward."""

    changes: dict[str, Any]  # The changed keys with their values; empty for the recipe as it is
    score: float  # Mean over the runs of the public reward at the end, minus the KL penalty
    standard_error: float
    runs: int
    seconds: float
    kl: float  # Mean KL(π ‖ base) of a response at the end, in nats
    excess: float = 0.0  # :attr:`StandInRun.excess` of these settings

    def __str__(self) -> str:
        text = f"{_runs(self.runs)}, KL {self.kl:.3g}"
        return f"{self.score:+.3f} ± {self.standard_error:.3f} ({text})"


@dataclass(frozen=True)
class Tuned:
    """The result of a search."""

    recipe: Recipe
    own: Tried  # The recipe as it was, in the runs that decided
    best: Tried  # The settings that were chosen; those of own where nothing was better
    decided: list[Tried]  # All settings between which the last runs decided, the best one first
    searched: list[Tried]  # All settings whose trials ended, in the search, the best one first
    stopped: int
    failed: list[str]  # Messages of trials whose settings the recipe refused
    users: int  # Number N of private users that the runs imitate
    stand_ins: int  # Number N′ of stand-ins in a run
    prompts: int  # Number of distinct public prompts that they are drawn from
    scored: int  # Number of other public prompts on which the reward was measured
    excess: float


def ranked(trials: Sequence[Any]) -> list[Tried]:
    """Return the settings of Optuna's trials with their mean reward, the best one first."""
    groups: dict[str, list[Any]] = {}
    for trial in trials:
        groups.setdefault(changes_key(trial.user_attrs["changes"]), []).append(trial)
    return sorted(map(_tried, groups.values()), key=lambda tried: -tried.score)


def _tried(runs: Sequence[Any]) -> Tried:
    scores = np.array([t.value for t in runs])
    within = float(np.mean([t.user_attrs["standard_error"] for t in runs]))
    over = float(scores.std(ddof=1)) / len(scores) ** 0.5 if len(scores) > 1 else 0.0
    return Tried(
        changes=runs[0].user_attrs["changes"],
        score=float(scores.mean()),
        # Runs share the prompts, so that the error over prompts does not fall with their number.
        standard_error=float(np.hypot(over, within)),
        runs=len(runs),
        seconds=float(np.mean([t.user_attrs["seconds"] for t in runs])),
        kl=float(np.mean([t.user_attrs["kl"] for t in runs])),
        excess=runs[0].user_attrs["excess"],
    )


def changes_key(changes: dict[str, Any]) -> str:
    """Return changed settings as text that identifies them, whatever their order."""
    return json.dumps(changes, sort_keys=True)


def changes_text(changes: dict[str, Any]) -> str:
    """Return changed settings in one line for a person, such as ``rounds=8``."""
    return ", ".join(f"{k}={json.dumps(v)}" for k, v in changes.items()) or "the recipe as it is"


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
