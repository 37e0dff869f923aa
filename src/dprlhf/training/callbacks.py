"""Callbacks: plain functions, or objects as transformers' ``Trainer`` takes them.

Both receive a round's published metrics and nothing else: no model, no batch, no data loader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dprlhf.errors import DprlhfError
from dprlhf.rewards.isolation import kept_process_state

Function = Callable[[dict[str, Any]], None]


def taken(callbacks: Any) -> list[Any]:
    """Return the callbacks of a run; of a class that is a ``TrainerCallback``, an object."""
    from transformers import TrainerCallback

    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise DprlhfError(f"callbacks: give a list, not a {type(callbacks).__name__}")
    made = [
        one() if isinstance(one, type) and issubclass(one, TrainerCallback) else one
        for one in callbacks
    ]
    for one in made:
        if not isinstance(one, TrainerCallback) and not callable(one):
            raise DprlhfError(
                "callbacks: give functions of a round's metrics, or transformers.TrainerCallback"
                f" objects or classes, not a {type(one).__name__}"
            )
    return made


def as_functions(callbacks: Sequence[Any], folder: Path, rounds: int) -> list[Function]:
    """Return the callbacks as functions of a round's metrics."""
    from transformers import TrainerCallback

    return [_Events(c, folder, rounds) if isinstance(c, TrainerCallback) else c for c in callbacks]


class _Events:
    """Calls the events of a ``TrainerCallback``; a round is a step.

    ``on_train_begin`` comes first. At the end of each round come ``on_step_begin``, ``on_step_end``
    and ``on_log`` with the round's metrics; after the last, ``on_train_end``. ``args`` has
    ``output_dir`` and ``max_steps``; ``state`` is a ``TrainerState`` with ``global_step``,
    ``max_steps`` and ``log_history``. Changes to ``control`` are ignored: a callback stops a run by
    raising ``KeyboardInterrupt``, and ``dprlhf resume`` continues it.
    """

    def __init__(self, callback: Any, folder: Path, rounds: int) -> None:
        from transformers import TrainerControl, TrainerState

        self._callback = callback
        self._args = SimpleNamespace(output_dir=str(folder), max_steps=rounds)
        self._state = TrainerState(max_steps=rounds)
        self._control = TrainerControl()
        self._call("on_train_begin")

    def __call__(self, metrics: dict[str, Any]) -> None:
        self._call("on_step_begin")
        self._state.global_step = metrics["round"]
        self._state.epoch = metrics["round"] / self._args.max_steps
        self._state.log_history.append(metrics)
        self._call("on_step_end")
        self._call("on_log", logs=dict(metrics))
        if metrics["round"] == self._args.max_steps:
            self._call("on_train_end")

    def _call(self, event: str, **values: Any) -> None:
        with kept_process_state():
            getattr(self._callback, event)(self._args, self._state, self._control, **values)
