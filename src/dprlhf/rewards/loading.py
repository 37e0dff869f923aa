"""Load the rewards that a recipe names or a program passes, each with its weight."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import operator
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dprlhf import recipe
from dprlhf.data.given_rewards import GivenReward, is_model, rewards_of
from dprlhf.errors import DprlhfError, missing_path
from dprlhf.rewards.reward import (
    LoadedReward,
    as_reward,
    suggestion,
    type_and_message,
)

if TYPE_CHECKING:
    import torch


def load_function(source: str, kind: str = "reward") -> object:
    """Load what ``package.module:attribute`` or ``path/to/file.py:attribute`` names."""
    place, _, attribute = source.rpartition(":")
    if not place or not attribute:
        raise DprlhfError(
            f"{kind} function {source!r} is not of the form 'package.module:attribute' or "
            "'path/to/file.py:attribute'"
        )
    module = (_module_from_file if place.endswith(".py") else _module_by_name)(place, kind)
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError:
        known = [
            name
            for name, value in sorted(vars(module).items())
            if callable(value) and not name.startswith("_")
        ]
        raise DprlhfError(
            f"{kind} function {source!r}: {place} has no {attribute!r}; "
            + suggestion(attribute, known, "its callables")
        ) from None


def _module_by_name(name: str, kind: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as problem:
        raise DprlhfError(
            f"{kind} module {name!r} cannot be imported ({type_and_message(problem)}): install it,"
            " or name a file as 'path/to/file.py:attribute'"
        ) from problem


def _module_from_file(place: str, kind: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise missing_path(f"{kind} file {place!r} does not exist", place)
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise DprlhfError(f"{kind} file {place!r} cannot be read: {problem.strerror}") from problem
    # A name of its own, because two files may share a stem; registered, because pickle and
    # dataclasses look modules up. It follows from the content too: the same file is loaded once,
    # one that was edited meanwhile (in a notebook, say) anew.
    digest = hashlib.sha256(str(path).encode() + b"\0" + content).hexdigest()[:8]
    name = f"dprlhf_reward_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as problem:
        del sys.modules[name]
        if isinstance(problem, KeyboardInterrupt):
            raise
        raise DprlhfError(f"{kind} file {place!r} fails: {type_and_message(problem)}") from problem
    return module


def load_rewards(
    specs: Sequence[recipe.Reward],
    given: Sequence[GivenReward] | None,
    *,
    device: str | torch.device = "cpu",
) -> list[LoadedReward]:
    """Load the rewards of a recipe, of which the program may pass some or all as objects."""
    return [_load(one, device) for one in rewards_of(specs, given)]


def load_reward(
    spec: Any, *, tokenizer: Any = None, device: str | torch.device = "cpu"
) -> LoadedReward:
    """Load a reward by its name or settings, or wrap one that is already in memory.

    >>> def shouting(completions):
    ...     return [float(text.isupper()) for text in completions]
    >>> load_reward(shouting).name
    'shouting'
    >>> load_reward((shouting, 0.5)).weight
    0.5
    """
    from dprlhf.data.reward_arguments import given_rewards  # which says what it may be

    rewards = given_rewards(spec, tokenizers=tokenizer)
    if len(rewards) != 1:
        raise DprlhfError(f"load_reward takes one reward, not {len(rewards)}: call it for each")
    return _load(rewards[0], device)


def _load(one: GivenReward, device: str | torch.device) -> LoadedReward:
    """Take the object that is given, or load what the settings name; a model is a classifier."""
    spec, function = one.settings, one.given
    own = {"weight": spec.weight, "times_column": spec.times_column}
    if isinstance(function, LoadedReward):
        return LoadedReward(**{**vars(function), **own})
    source = spec.function or spec.classifier
    if function is None and spec.function is not None:
        function = load_function(spec.function)
    if isinstance(function, type):
        raise DprlhfError(
            f"reward {source!r} is the class {function.__name__}, not an instance: "
            f"add `name = {function.__name__}(...)` beside it and name that"
        )
    if spec.classifier is not None or is_model(function):
        # Here, because torch and transformers take seconds to import.
        from dprlhf.rewards.classifier import ClassifierReward

        function = ClassifierReward(
            spec.classifier or function,
            tokenizer=one.tokenizer,
            label=spec.label,
            text=spec.text,
            device=device,
        )
    if not callable(function):
        raise DprlhfError(
            f"reward {source!r} is a {type(function).__name__}, not a callable: name a function "
            "reward(prompts, completions, **columns)"
        )
    return as_reward(function, source if one.given is None else None, **own)
