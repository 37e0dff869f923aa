"""Evaluation of a trainer's policy on public prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import EvalPrediction

from dprlhf.data.public import evaluated, public_users
from dprlhf.data.users import Prompts, Users
from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.recipe import Recipe
from dprlhf.rewards import LoadedReward, Scorer
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
from dprlhf.trl.logs import as_evaluation, name_of_best


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
