"""Who is told of each round: experiment trackers, through accelerate, and callbacks.

All get a round's published metrics and nothing else: no model, no batch, no data loader. A tracker
stamps what it logs with the time, and the time between two rounds reveals how many users the second
one had. So a tracker gets all rounds together when the run ends, whatever ends it; TensorBoard
accepts a chosen time stamp and gets each round at once, stamped with its number.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dprlhf.errors import DprlhfError, one_line
from dprlhf.privacy.file_times import stamp_run
from dprlhf.recipe import Tracking
from dprlhf.rewards.isolation import kept_process_state
from dprlhf.runs.folder import JsonLines, RunFolder

Metrics = Mapping[str, Any]

_SETTINGS: dict[str, dict[str, Any]] = {
    # The tracker's system metrics and console output would carry time stamps, too.
    "wandb": {"settings": {"x_disable_stats": True, "console": "off"}},
}


def check_installed(names: Sequence[str]) -> None:
    """Raise a :class:`DprlhfError` if a tracker's package is missing, before anything is spent."""
    for name in names:
        packages = ("tensorboard", "tensorboardX") if name == "tensorboard" else (name,)
        if not any(importlib.util.find_spec(package) for package in packages):
            raise DprlhfError(
                f"tracking.report_to: {name} is not installed; install it with pip install {name},"
                " or leave it out"
            )


@contextlib.contextmanager
def tracked(
    spec: Tracking, folder: RunFolder, config: Mapping[str, Any]
) -> Iterator[list[Callable[[dict[str, Any]], None]]]:
    """Yield a callback for TensorBoard; the others get all rounds when the block ends.

    A tracker that fails is reported once and then ignored: it never stops a run.
    """
    live = [n for n in spec.report_to if n == "tensorboard"]
    trackers = [_Tracker(name, folder, config) for name in live]
    try:
        yield [tracker.log for tracker in trackers]
    finally:
        late = [_Tracker(n, folder, config) for n in spec.report_to if n not in live]
        for tracker in late:
            for line in JsonLines(folder.metrics).read():
                tracker.log(line)
        for tracker in [*trackers, *late]:
            tracker.finish()


class _Tracker:
    """One of accelerate's trackers, which is switched off after its first failure."""

    def __init__(self, name: str, folder: RunFolder, config: Mapping[str, Any]) -> None:
        self._name = name
        self._folder = folder.path / "tracking"
        self._tracker: Any = None
        self._warning: str | None = None

        def start() -> None:
            from accelerate.tracking import LOGGER_TYPE_TO_CLASS

            kind = LOGGER_TYPE_TO_CLASS[name]
            settings = dict(_SETTINGS.get(name, {}))
            if name in ("wandb", "trackio"):
                settings["name"] = folder.path.name
            if name == "mlflow":
                settings["run_name"] = folder.path.name
            if kind.requires_logging_directory:
                settings["logging_dir"] = str(folder.path / "tracking")
            tracker = kind("dprlhf", **settings)
            tracker.start()
            tracker.store_init_configuration(flat(config))
            self._tracker = tracker

        self._attempt(start)

    def log(self, metrics: Metrics) -> None:
        """Log the numbers of one round."""
        step = metrics["round"]
        numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
        stamp = {"walltime": float(step)} if self._name == "tensorboard" else {}
        if self._tracker is not None:
            self._attempt(lambda: self._tracker.log(numbers, step=step, **stamp))

    def finish(self) -> None:
        """Let the tracker send what it has buffered, and close it; report a failure now, at last.

        A line in the middle of the run would show when a round ended.
        """
        if self._tracker is not None:
            self._attempt(self._tracker.finish)
        if self._warning is not None:
            print(self._warning, file=sys.stderr)

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            with _stopped_clock() if self._name == "tensorboard" else contextlib.nullcontext():
                action()
            if self._folder.is_dir():
                stamp_run(self._folder)
        except (Exception, SystemExit) as error:
            self._tracker = None
            reason = one_line(error, 200)
            self._warning = (
                f"dprlhf: warning: tracker {self._name} failed ({type(error).__name__}: {reason});"
                " the run went on without it, and metrics.jsonl has every round"
            )


@contextlib.contextmanager
def _stopped_clock() -> Iterator[None]:
    """Make ``time.time`` return 0: TensorBoard puts it into names of files and first events."""
    clock = time.time
    setattr(time, "time", lambda: 0.0)  # noqa: B010 - to mypy a function cannot be assigned
    try:
        yield
    finally:
        setattr(time, "time", clock)  # noqa: B010


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one level of plain values, as trackers take them.

    >>> flat({"privacy": {"epsilon": 4.0, "adjacency": None}, "rewards": [{"weight": 1}]})
    {'privacy.epsilon': 4.0, 'privacy.adjacency': 'None', 'rewards.0.weight': 1}
    """
    values: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
            value = {str(i): one for i, one in enumerate(value)}
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{key}.")
        else:
            plain = isinstance(value, bool | int | float | str)
            values[prefix + key] = value if plain else str(value)
    return values


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
