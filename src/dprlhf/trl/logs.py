"""What a private trainer logs: released and public values, under TRL's names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from dprlhf.errors import DprlhfError
from dprlhf.policies.foreign_hooks import refuse_foreign_hooks
from dprlhf.rewards.isolation import kept_process_state

NAMES = {
    "private_reward_noised": "reward",
    "private_reward_noise_std": "reward_noise_std",
    "valid_share_noised": "valid_share",
    "released_gradient_norm": "grad_norm",
}
"""This package's names of released values, with TRL's."""

_PUBLIC = {
    "public_response_tokens": "eval_completions/mean_length",
    "public_kl": "eval_kl",
}
"""Names of values from public prompts, with TRL's; others become ``eval_NAME``."""


def as_logs(metrics: Mapping[str, Any], means: Mapping[str, str]) -> dict[str, float]:
    """Return a round's released values under TRL's names, without those from public prompts."""
    logs = {
        NAMES.get(name, name): as_number(value)
        for name, value in metrics.items()
        if name != "round" and not name.startswith("public_") and value is not None
    }
    return logs | {new: logs[old] for old, new in means.items() if old in logs}


def as_evaluation(values: Mapping[str, Any], prefix: str = "eval") -> dict[str, float]:
    """Return values from public prompts under TRL's names, which begin with ``prefix``."""
    logs = {}
    for name, value in values.items():
        if name.startswith("public_") and value is not None:
            key = _PUBLIC.get(name, f"eval_{name.removeprefix('public_')}")
            logs[prefix + key.removeprefix("eval")] = value
    return logs


def as_number(value: Any) -> Any:
    """Return a value of a run's file, with the text ``infinity`` (a baseline's ε) as a number."""
    return math.inf if value == "infinity" else value


def name_of_best(metric: str) -> str:
    """Return the name in the logs of ``metric_for_best_model``, which may lack TRL's ``eval_``."""
    return metric if metric.startswith("eval_") else f"eval_{metric}"


class Log:
    """The trainer's state, and the events of its callbacks.

    ``on_init_end`` comes as the trainer is made, and ``on_train_begin`` first in a training; for
    each round ``on_step_begin``, ``on_step_end``, ``on_log``, and where the round has an evaluation
    ``on_log`` again and ``on_evaluate``; then ``on_train_end``. Those of a round come after its
    values are released. There are no others: a run has no epochs, and every round saves a
    checkpoint. A callback that sets ``control.should_training_stop`` ends the run after the round.
    ``state.best_metric`` is that of ``metric_for_best_model`` so far, as in transformers.
    """

    def __init__(self, callbacks: Sequence[Any] | None, args: Any) -> None:
        self.state = TrainerState()
        self.control = TrainerControl()
        self.callbacks: list[Any] = []
        self.args = args
        self.values: dict[str, Any] = {}
        if not isinstance(callbacks, list | tuple | None):
            raise DprlhfError(f"callbacks: give a list, not a {type(callbacks).__name__}")
        for callback in callbacks or ():
            self.add(callback)

    def add(self, callback: Any) -> None:
        """Add a callback, an object or a class."""
        one = callback() if isinstance(callback, type) else callback
        if not isinstance(one, TrainerCallback):
            raise DprlhfError(
                f"callbacks: a {type(one).__name__} is no transformers.TrainerCallback"
            )
        self.callbacks.append(one)

    def remove(self, callback: Any) -> Any:
        """Remove a callback, given as object or class, and return it; None if it is not there."""
        for one in self.callbacks:
            if one is callback or type(one) is callback:
                self.callbacks.remove(one)
                return one
        return None

    def call(self, event: str, **values: Any) -> None:
        """Call an event of every callback."""
        for callback in self.callbacks:
            with kept_process_state():
                answer = getattr(callback, event)(
                    self.args, self.state, self.control, **self.values, **values
                )
            if (model := self.values.get("model")) is not None:
                refuse_foreign_hooks(model, f"callbacks: {type(callback).__name__}")
            self.control = answer or self.control

    def write(self, logs: Mapping[str, float]) -> None:
        """Add an entry to ``state.log_history``, and call ``on_log``."""
        self._add(logs)
        self.call("on_log", logs=dict(logs))

    def round(self, t: int, logs: Mapping[str, float], evaluation: Mapping[str, float]) -> None:
        """Log a round."""
        self.call("on_step_begin")
        self._reach(t)
        self.call("on_step_end")
        self.write(logs)
        if evaluation:
            self.write(evaluation)
            self.call("on_evaluate", metrics=dict(evaluation))
            self._keep_best(t, evaluation)  # after the event, whose callbacks compare with it
        if self.control.should_training_stop and t < self.state.max_steps:
            raise KeyboardInterrupt

    def earlier_round(
        self, t: int, logs: Mapping[str, float], evaluation: Mapping[str, float]
    ) -> None:
        """Add a round that ended before the run was resumed; callbacks were called for it then."""
        self._reach(t)
        for entry in filter(None, (logs, evaluation)):
            self._add(entry)
        self._keep_best(t, evaluation)

    def _reach(self, t: int) -> None:
        self.state.global_step = t
        self.state.epoch = t / max(1, self.state.max_steps) * self.state.num_train_epochs

    def _add(self, logs: Mapping[str, float]) -> None:
        entry = {**logs, "epoch": self.state.epoch, "step": self.state.global_step}
        self.state.log_history.append(entry)

    def _keep_best(self, step: int, evaluation: Mapping[str, float]) -> None:
        """Keep the best value so far of the public metric that ``args`` names, and its step."""
        metric, greater = self.args.metric_for_best_model, self.args.greater_is_better
        value = evaluation.get(name_of_best(metric)) if metric else None
        if value is None:
            return
        best = self.state.best_metric
        if best is None:
            best = -math.inf if greater else math.inf
        if value > best if greater else value < best:
            self.state.best_metric, self.state.best_global_step = value, step

    def evaluation(self, step: int, logs: Mapping[str, float]) -> None:
        """Add an evaluation before the first round or after the last to ``state.log_history``."""
        if not logs:
            return
        whole = self.state.num_train_epochs
        entry = {**logs, "epoch": whole * step / max(1, self.state.max_steps), "step": step}
        place = 0 if step == 0 else len(self.state.log_history)
        self.state.log_history.insert(place, entry)
        if step:
            self._keep_best(step, logs)
