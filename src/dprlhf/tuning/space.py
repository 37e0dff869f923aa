"""What is searched: the table of the recipe's keys with the values to try for each.

Values are relative to the recipe's own, which is the first trial. A key's values may depend on the
keys above it, which have been chosen by then; a key without values for this recipe is not searched.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dprlhf.errors import DprlhfError, nearest
from dprlhf.privacy.plan import make_plan
from dprlhf.recipe import UPDATE_SETTINGS, Recipe, make_recipe
from dprlhf.recipe.base import values_of
from dprlhf.recipe.loading import put


@dataclass(frozen=True)
class Values:
    """A list of values to choose from."""

    of: Callable[[Recipe], Sequence[Any]]


@dataclass(frozen=True)
class Factor:
    """A range of positive numbers, searched on a logarithmic scale."""

    factor: float  # The range is from own value / factor to own value · factor
    centre: Callable[[Recipe, Recipe], tuple[float, str]] | None = None


def _times(key: str, *factors: float) -> Values:
    """Return whole multiples and parts of a key's own number."""
    return Values(lambda r: sorted({max(1, round(f * value_at(r, key))) for f in factors}))


RATES = {"sgd": 1.0, "normalized-sgd": 0.3, "adam": 0.02}
"""Middle of the range of learning rates of an optimizer that is not the recipe's own."""


def _rate(recipe: Recipe, own: Recipe) -> tuple[float, str]:
    name = recipe.optimizer.name
    same = name == own.optimizer.name
    return own.optimizer.learning_rate if same else RATES.get(name, 0.1), name


def _updates(recipe: Recipe) -> Sequence[str]:
    # The clip norms of the other updates bound something else, so that they are not to be compared
    # by one range of clip norms.
    return ("pg", "grpo") if recipe.update.name in ("pg", "grpo") else ()


def _layers(recipe: Recipe) -> Sequence[Any]:
    """Return all of the recipe's layers, the upper half and the upper quarter of them."""
    own = recipe.policy.adapter.layers
    layers = own if own is not None else list(range(_config(recipe).num_hidden_layers))
    return [layers[-max(1, len(layers) // part) :] for part in (2, 4)]


def _modules(recipe: Recipe) -> Sequence[list[str]]:
    """Return the modules that PEFT adapts in this architecture, together and one by one."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    names = list(KNOWN.get(_config(recipe).model_type, []))
    return [names, *([name] for name in names)] if names else []


def _config(recipe: Recipe) -> Any:
    from transformers import AutoConfig

    from dprlhf.assets import resolve

    policy = recipe.policy
    return AutoConfig.from_pretrained(
        resolve(policy.model_name_or_path),
        revision=policy.revision,
        trust_remote_code=policy.trust_remote_code,
    ).get_text_config()


SPACE: dict[str, Values | Factor] = {
    "update.name": Values(_updates),
    "optimizer.name": Values(lambda r: ("adam", "normalized-sgd", "sgd")),
    "optimizer.momentum": Values(
        lambda r: (0.0, 0.6, 0.9) if r.optimizer.name in ("sgd", "normalized-sgd") else ()
    ),
    "optimizer.learning_rate": Factor(30, _rate),
    "update.clip_norm": Factor(10),
    "update.subspace.rank": _times("update.subspace.rank", 0.5, 1, 2),
    "update.subspace.target_kl": Factor(4),
    "update.subspace.refresh": _times("update.subspace.refresh", 1, 2, 4),
    "policy.adapter.rank": _times("policy.adapter.rank", 1, 2, 4),
    "policy.adapter.layers": Values(_layers),
    "policy.adapter.target_modules": Values(_modules),
    "rollout.responses": _times("rollout.responses", 1, 2, 4),
    "rounds": _times("rounds", 0.5, 1, 2),
    "privacy.bands": Values(lambda r: (1, 2, 4, r.rounds)),
}
"""The searched keys, in the order in which they are chosen."""


def keys_of(asked: Sequence[str]) -> list[str]:
    """Return the keys to search, in the order of :data:`SPACE`; all of them for an empty list."""
    for key in asked:
        if key not in SPACE:
            near = nearest(key, SPACE)
            raise DprlhfError(
                f"--search: {key!r} is not searched"
                + (f"; did you mean {near!r}?" if near else f"; the keys are {', '.join(SPACE)}")
            )
    return [key for key in SPACE if not asked or key in asked]


@dataclass(frozen=True)
class Parameter:
    """One choice in a trial."""

    key: str
    name: str  # The parameter's name for the sampler: the key, with what its range belongs to
    own: Any  # The recipe's own value, or the middle of the range
    choices: tuple[str, ...] | None = None
    low: float = 0.0
    high: float = 0.0


def draw(own: Recipe, keys: Sequence[str], choose: Callable[[Parameter], Any]) -> dict[str, Any]:
    """Choose a value for each key that this recipe can search, in the order of the table."""
    changes: dict[str, Any] = {}
    recipe = own
    for key in keys:
        parameter = _parameter(key, recipe, own)
        if parameter is None:
            continue
        value = choose(parameter)
        # What is tried is what is written down: three digits of a number from a range.
        if parameter.choices is not None:
            value = json.loads(value)
        elif value != value_at(recipe, key):  # else the recipe's own, which may have more digits
            value = float(f"{value:.3g}")
        if value != value_at(recipe, key):
            changes[key] = value
            recipe = with_settings(own, changes)
    return changes


def _parameter(key: str, recipe: Recipe, own: Recipe) -> Parameter | None:
    search, current = SPACE[key], value_at(recipe, key)
    if isinstance(search, Factor):
        if not isinstance(current, int | float) or math.isinf(current):
            return None  # a baseline without clipping
        centre, of = search.centre(recipe, own) if search.centre else (current, "")
        name = f"{key} ({of})" if of else key
        return Parameter(key, name, centre, low=centre / search.factor, high=centre * search.factor)
    if current is None and value_at(recipe, key.rpartition(".")[0]) is None:
        return None  # its section is not in the recipe
    options, base = {json.dumps(current): current}, recipe if key == "optimizer.momentum" else own
    for value in search.of(base):
        if _accepted(base, key, value):
            options[json.dumps(value)] = value
    choices = tuple(sorted(options))
    return Parameter(key, key, json.dumps(current), choices) if len(choices) > 1 else None


def _released(recipe: Recipe) -> tuple[int, int, int]:
    """Return what ε depends on beside the noise, as far as it is searched."""
    return recipe.rounds, recipe.privacy.bands, recipe.update.releases


def _accepted(recipe: Recipe, key: str, value: Any) -> bool:
    """Return whether a recipe takes a value, and its partition, too, and keeps its ε."""
    try:
        changed = with_settings(recipe, {key: value})
        privacy = changed.privacy
        if privacy.noise_multiplier is not None and _released(changed) != _released(recipe):
            return False  # with a given noise multiplier, ε follows from these
        make_plan(  # without noise no accountant is asked, and what a partition refuses is refused
            users=10**9,
            rounds=changed.rounds,
            delta=privacy.delta,
            epsilon=math.inf,
            partition=privacy.partition,
            adjacency=privacy.adjacency,
            participations=privacy.participations,
            releases_per_round=changed.update.releases,
            bands=privacy.bands,
        )
    except DprlhfError:
        return False
    return True


def with_settings(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    """Return a recipe with other values for some keys; a new update keeps what it has, too."""
    values = values_of(recipe)
    for key, value in changes.items():
        put(values, key, value)
        if key == "update.name" and value in UPDATE_SETTINGS:
            known = UPDATE_SETTINGS[value].model_fields
            values["update"] = {k: v for k, v in values["update"].items() if k in known}
    return make_recipe(values, source="tune")


def value_at(recipe: Recipe, key: str) -> Any:
    """Return a key's value in a recipe; None where a section of its path is absent."""
    node: Any = recipe
    for part in key.split("."):
        node = getattr(node, part, None)
    return node
