"""TRL's ``generation_kwargs``: those that a key of the recipe means, by their name there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dprlhf.errors import DprlhfError, nearest

KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "stop_strings": "stop",
    "stop": "stop",
}
"""Arguments of transformers' ``generate`` and vLLM's ``SamplingParams``: keys of ``rollout``."""

_NEEDS_NO_KEY = {
    "do_sample": True, "num_beams": 1, "num_return_sequences": 1, "n": 1, "use_cache": True,
    "repetition_penalty": 1.0,
}  # fmt: skip
"""What a run does anyway."""


def rollout_settings(generation_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of ``rollout`` that TRL's ``generation_kwargs`` stand for.

    >>> rollout_settings({"top_k": 20, "stop_strings": ["END"], "do_sample": True})
    {'top_k': 20, 'stop': ['END']}
    """
    if not isinstance(generation_kwargs, Mapping):
        raise DprlhfError(
            'generation_kwargs: write a mapping, such as {"top_k": 20}, not a'
            f" {type(generation_kwargs).__name__}"
        )
    settings = {}
    for name, value in generation_kwargs.items():
        if name in KEYS:
            if value is not None:
                settings[KEYS[name]] = value
        elif name not in _NEEDS_NO_KEY or value != _NEEDS_NO_KEY[name]:
            near = nearest(name, KEYS)
            hint = f"; did you mean {near}?" if near else f"; known are {', '.join(KEYS)}"
            raise DprlhfError(
                f"generation_kwargs: {name}={value!r} would change what is sampled, and the"
                f" gradient's log-probabilities would not follow{hint}"
            )
    return settings
