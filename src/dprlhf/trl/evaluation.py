"""Evaluation of a trainer's policy on public prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import EvalPrediction

from dprlhf.data.public import evaluated, public_users
from dprlhf.data.users import Users
from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.recipe import Recipe
from dprlhf.rewards import LoadedReward, Scorer
from dprlhf.rewards.reward import RoundState
from dprlhf.rollout import resolve_batch_size
from dprlhf.runs.opening import check_public
from dprlhf.training.evaluate import ComputeMetrics, Evaluated, evaluate
from dprlhf.training.measures import PolicyEstimate, RewardEstimate, as_metrics
from dprlhf.trl.logs import as_evaluation


def evaluate_on(
    policy: CausalLMPolicy,
    recipe: Recipe,
    users: Users,
    rows: Any,
    rewards: list[LoadedReward],
    compute_metrics: ComputeMetrics | None,
) -> Evaluated:
    """Sample and score one response to each public prompt.

    Args:
        policy: The policy.
        recipe: The recipe, with a section ``evaluation``.
        users: The private users, among whom no public row may be.
        rows: The public rows, a ``datasets.Dataset``.
        rewards: The rewards.
        compute_metrics: Further measures of the responses; None for none.

    Raises:
        DprlhfError: A public row is a user's, too.
    """
    public = public_users(recipe, rows)
    check_public(recipe, users, public)
    prompts = evaluated(recipe, public)
    assert prompts is not None
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
        compute_metrics=compute_metrics,
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
        found = compute_metrics(EvalPrediction(texts, rewards, prompts))
        if not isinstance(found, Mapping):
            return found
        return {str(name).removeprefix("eval_"): value for name, value in found.items()}

    return told


def public_values(found: PolicyEstimate) -> dict[str, float]:
    """Return an estimate on public prompts under TRL's names."""
    reward = RewardEstimate(found.mean, found.standard_error, found.prompts)
    return as_evaluation(as_metrics({"reward": reward, **found.judges, **found.measures}))
