"""What a search returns: the settings that it tried, with their rewards; the tuned recipe.

The tuned recipe is a file: the given one, with other values and why, in comments.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dprlhf.errors import DprlhfError
from dprlhf.recipe import Recipe, dump_recipe, load_recipe
from dprlhf.recipe.loading import read_settings


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


_WIDTH = 98
_SHOWN = 6
"""The most settings whose rewards are listed, the best ones first."""


def write_tuned(tuned: Tuned, source: Path, overrides: Sequence[str], output: Path) -> None:
    """Write the tuned recipe: the keys of the given one, with better values where there are any."""
    own = load_recipe(source, overrides)
    keys = [override.partition("=")[0] for override in overrides]
    changes = {key: _plain(own, key) for key in keys} | tuned.best.changes
    if "update.name" in tuned.best.changes:  # another update has other settings
        changes = {k: v for k, v in changes.items() if not k.startswith("update.")}
        values = tuned.recipe.update.model_dump(mode="json")
        given = (yaml.safe_load(source.read_text("utf-8")).get("update") or {}).keys()
        chosen = {key.split(".")[1] for key in [*keys, *tuned.best.changes] if "update." in key}
        changes["update"] = {key: values[key] for key in values if key in given | chosen}
    lines = [
        line for part in header(tuned).splitlines() for line in textwrap.wrap(part, _WIDTH) or [""]
    ]
    head = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    settings = read_settings(source)
    for key, value in changes.items():
        _put(settings, key.split("."), value)
    text = head + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    if _read(text) != tuned.recipe:  # a spelling of YAML's
        text = head + dump_recipe(tuned.recipe)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DprlhfError(f"{output}: could not be written ({error.strerror})") from None


def _put(node: Any, path: Sequence[str], value: Any) -> None:
    """Set the value at a path of keys and indices, whose last sections may be missing."""
    first = int(path[0]) if isinstance(node, list) else path[0]
    if len(path) == 1:
        node[first] = value
        return
    if isinstance(node, dict) and not isinstance(node.get(first), dict | list):
        node[first] = {}
    _put(node[first], path[1:], value)


def header(tuned: Tuned) -> str:
    """Return what the settings come from, in a few lines."""
    ended, refused = sum(t.runs for t in tuned.searched), len(tuned.failed)
    thinned = tuned.stand_ins < tuned.users
    lines = [
        f"Tuned by dprlhf tune on public prompts, at no privacy cost: {tuned.prompts:,} prompts"
        f" stood in for the {tuned.users:,} users"
        + (
            f" ({tuned.stand_ins:,} stand-ins a run at the noise of all, whose sampling adds up to"
            f" {tuned.excess:.0%} of the noise's variance)"
            if thinned
            else ""
        )
        + f". {ended} trials ended, {tuned.stopped} were stopped early"
        + (f", {refused} were refused" if refused else "")
        + f". Reward at the end on {tuned.scored} other public prompts ± standard error of its"
        " rise, and KL to the base model in nats a response:",
    ]
    best = tuned.decided[:_SHOWN]
    shown = best if tuned.own in best else [*best, tuned.own]
    lines += [f"  {changes_text(one.changes)}: {one}" for one in shown]
    if not tuned.best.changes:
        lines.append("  nothing that was tried is better, so nothing has changed")
    lines.append(
        "These rewards chose the settings, so they flatter them: compare runs by their evaluation,"
        " whose prompts were not used."
    )
    return "\n".join(lines)


def _plain(recipe: Recipe, key: str) -> Any:
    """Return a key's value in a recipe as JSON has it."""
    node: Any = recipe.model_dump(mode="json")
    for part in key.split("."):
        node = node[int(part)] if isinstance(node, list) else (node or {}).get(part)
    return node


def _read(text: str) -> Recipe | None:
    from dprlhf.recipe import make_recipe

    try:
        return make_recipe(yaml.safe_load(text))
    except (DprlhfError, yaml.YAMLError):
        return None
