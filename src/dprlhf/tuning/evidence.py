"""The tuned recipe as a file: the given one, with other values and why, in comments."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from dprlhf.errors import DprlhfError
from dprlhf.recipe import Recipe, dump_recipe, load_recipe
from dprlhf.recipe.loading import read_settings
from dprlhf.tuning.tried import Tried, Tuned

_WIDTH = 98
_SHOWN = 6
"""The most values of a key whose rewards are listed."""
_NEAR = 0.9
"""From this share of the reward's range on, trials are taken to be hard to tell apart."""


def write_tuned(tuned: Tuned, source: Path, overrides: Sequence[str], output: Path) -> None:
    """Write the tuned recipe: the keys of the given one, with other values where some are better.

    Args:
        tuned: The result of a search.
        source: The recipe's file.
        overrides: The overrides with which it was searched; they are written into the file.
        output: The new file.

    Raises:
        DprlhfError: The file cannot be written.
    """
    own = load_recipe(source, overrides)
    keys = [override.partition("=")[0] for override in overrides]
    changes = {key: _plain(own, key) for key in keys} | tuned.best.changes
    notes = {key: note(tuned, own, key) for key in tuned.best.changes}
    if "update.name" in tuned.best.changes:  # another update has other settings
        changes = {k: v for k, v in changes.items() if not k.startswith("update.")}
        changes["update"] = _update_section(tuned, source, keys)
        of_update = [notes.pop(key) for key in list(notes) if key.startswith("update.")]
        notes["update"] = "\n".join(of_update)
    head = "".join(_comment(text) for text in (header(tuned), *notes.values()))
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


def _comment(text: str) -> str:
    lines = [line for part in text.splitlines() for line in textwrap.wrap(part, _WIDTH) or [""]]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


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
        f"  the recipe as it was: {tuned.own}",
    ]
    if tuned.best.changes:
        lines.append(f"  the recipe as below:  {tuned.best}")
    else:
        lines.append("  nothing that was tried is better, so nothing has changed")
    most = tuned.recipe.reward_range
    if tuned.best.score >= _NEAR * most:
        lines.append(
            f"That is near the end of the reward's range (reward_range: {most:g}), where trials"
            " can hardly be told apart, and texts that have come apart may earn as much. With the"
            " same reward, less KL is nearer to the base model; kl.beta makes it count."
        )
    lines.append(
        "These rewards chose the settings, so they flatter them: compare runs by their evaluation,"
        " whose prompts were not used."
    )
    return "\n".join(lines)


def note(tuned: Tuned, own: Recipe, key: str) -> str:
    """Return the evidence for a changed key: the values that were tried, and their rewards.

    A value's reward is that of the best settings which had it, so it is not the effect of this key
    alone.
    """
    best: dict[str, Tried] = {}
    for tried in [*tuned.decided, *tuned.searched]:  # best ones first; those that decided lead
        best.setdefault(json.dumps(tried.changes.get(key, _plain(own, key))), tried)
    found = [json.loads(value) for value in list(best)[:_SHOWN]]
    ordered = sorted(found) if all(isinstance(v, int | float) for v in found) else found
    told = "; ".join(f"{json.dumps(v)}: {best[json.dumps(v)]}" for v in ordered)
    left = len(best) - len(found)
    more = f"; and {left} more that did worse" if left else ""
    return f"{key}: was {json.dumps(_plain(own, key))}. Best reward with each value: {told}{more}."


def _update_section(tuned: Tuned, source: Path, overridden: Sequence[str]) -> dict[str, Any]:
    """Return the new update's section with what the file, the overrides or the search set."""
    values = tuned.recipe.update.model_dump(mode="json")
    given = (yaml.safe_load(source.read_text("utf-8")).get("update") or {}).keys()
    chosen = {key.split(".")[1] for key in [*overridden, *tuned.best.changes] if "update." in key}
    return {key: values[key] for key in values if key in given | chosen}


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
