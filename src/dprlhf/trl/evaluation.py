"""Evaluation of a trainer on public prompts, and what a trainer logs, under TRL's names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import EvalPrediction, TrainerCallback, TrainerControl, TrainerState

from dprlhf.data.public import evaluated, public_users
from dprlhf.data.users import Prompts, Users
from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.refusals import refuse_foreign_hooks
from dprlhf.recipe import Recipe
from dprlhf.rewards import LoadedReward, Scorer
from dprlhf.rewards.isolation import kept_process_state
from dprlhf.rewards.reward import RoundState
from dprlhf.rollout import resolve_batch_size
from dprlhf.runs.opening import check_public
from dprlhf.training.evaluate import (
    ComputeMetrics,
    Evaluated,
    PolicyEstimate,
    RewardEstimate,
    as_metrics,
    compared,
    comparison_metrics,
    evaluate,
)

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


def evaluate_on(
    policy: CausalLMPolicy,
    recipe: Recipe,
    users: Users,
    rows: Any,
    rewards: list[LoadedReward],
    compute_metrics: ComputeMetrics | None,
    *,
    log_probs: bool = False,
    first: int | None = None,  # Sample for so many of the rows alone; None for all
) -> Evaluated:
    """Sample and score one response to each public prompt."""
    public = public_users(recipe, rows)
    check_public(recipe, users, public)
    prompts = evaluated(recipe, public)
    assert prompts is not None
    if first is not None:
        compute_metrics = _repeated(compute_metrics, prompts)
        prompts = prompts.first(first)
    longest = recipe.data.max_prompt_tokens
    one = recipe.rollout.model_copy(update={"responses": 1})
    rollout = resolve_batch_size(one, policy, rows=len(prompts), max_prompt_tokens=longest)
    rounds = recipe.rounds
    end = RoundState(rounds, rounds, recipe.privacy.participations)  # as in the run's evaluations
    return evaluate(
        policy,
        Scorer(rewards, recipe.reward_range, state=end),
        prompts,
        rollout,
        seed=recipe.seed,
        max_prompt_tokens=longest,
        batch_size=recipe.update.batch_size if log_probs else None,
        compute_metrics=compute_metrics,
    )


TRIED = 4
"""Number of public prompts on which an evaluation is tried before the first round."""


def _repeated(compute_metrics: ComputeMetrics | None, public: Prompts) -> ComputeMetrics | None:
    """Return a function that shows ``compute_metrics`` a few responses as if to all prompts.

    It may look at the rows of ``eval_dataset`` by their number, and fail on fewer.
    """
    if compute_metrics is None:
        return None

    def told(texts: Sequence[str], rewards: NDArray[np.float64], prompts: Sequence[Any]) -> Any:
        place = np.arange(len(public)) % len(prompts)
        return compute_metrics([texts[int(i)] for i in place], rewards[place], public.prompts)

    return told


def check_best(metric: str, of_start: Evaluated) -> None:
    """Check that evaluations during a run have the metric of ``metric_for_best_model``."""
    metrics = {**as_metrics(of_start.estimates), **comparison_metrics(compared(of_start, of_start))}
    names = as_evaluation(dict.fromkeys(metrics, 0.0))
    if name_of_best(metric) not in names:
        raise DprlhfError(
            f"metric_for_best_model={metric!r}: no evaluation of public prompts has it: take one of"
            f" {', '.join(sorted(names))}, or let compute_metrics return it"
        )


def metrics_of(compute_metrics: Any) -> ComputeMetrics | None:
    """Return a trainer's ``compute_metrics`` as an evaluation calls it; None for None."""
    if compute_metrics is None:
        return None
    if not callable(compute_metrics):
        raise DprlhfError(
            "compute_metrics: give a function of transformers.EvalPrediction, not a"
            f" {type(compute_metrics).__name__}"
        )

    def told(texts: Any, rewards: Any, prompts: Any) -> Any:
        metrics = compute_metrics(EvalPrediction(texts, rewards, prompts))
        if not isinstance(metrics, Mapping):
            return metrics
        return {str(name).removeprefix("eval_"): value for name, value in metrics.items()}

    return told


def public_values(estimate: PolicyEstimate) -> dict[str, float]:
    """Return an estimate on public prompts under TRL's names."""
    reward = RewardEstimate(estimate.mean, estimate.standard_error, estimate.prompts)
    return as_evaluation(as_metrics({"reward": reward, **estimate.measures}))
