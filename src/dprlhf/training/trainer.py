"""The one-pass trainer: the meta-algorithm (He & Zhou 2025, Algorithm 1) in this form.

Every user's prompts are drawn once (or k times, as the plan says). What is computed from them is
``Private`` until the gate releases it; only the released gradient reaches policy and optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dprlhf.boundary import Private
from dprlhf.data.users import Prompts, Users
from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.optimizers import set_learning_rate
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.partition import Allocation
from dprlhf.privacy.plan import Plan
from dprlhf.recipe import Recipe
from dprlhf.rewards import Scorer, Scores, Spread
from dprlhf.rewards.private import score_private
from dprlhf.rollout import Responses, sample_responses
from dprlhf.runs.earlier import Earlier
from dprlhf.runs.folder import JsonLines, RunFolder
from dprlhf.training.evaluate import Evaluated, RewardEstimate, drift_metrics, evaluate
from dprlhf.training.interrupt import Interruptible
from dprlhf.training.processes import Processes
from dprlhf.training.progress import Progress
from dprlhf.training.rounds import (
    gate_for_round,
    log_metrics,
    record_secret,
    released_metrics,
    remaining_rounds,
    save,
    users_of_round,
)
from dprlhf.updates import PrivateRound, find_update
from dprlhf.updates.critic import Critic
from dprlhf.updates.kl import subtract_kl
from dprlhf.updates.telemetry import ReleasedReward, TelemetryCoordinates

MAX_FAILED_ROUNDS = 3
SAMPLES = 5
"""Public responses that an evaluation during the run keeps."""


@dataclass
class Run:
    """Everything that a run is made of; :mod:`dprlhf.training.build` builds it."""

    recipe: Recipe
    plan: Plan
    earlier: Earlier
    folder: RunFolder
    key: bytes
    processes: Processes
    users: Users
    allocation: Private[Allocation]
    policy: CausalLMPolicy
    optimizer: torch.optim.Optimizer
    scorer: Scorer
    public_prompts: Prompts | None
    gate: Gate | None  # on the main process only: one writer of the ledger
    telemetry: TelemetryCoordinates
    critic: Critic | None
    progress: Progress
    spread: Spread
    callbacks: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)


def run_rounds(run: Run) -> None:
    """Run all remaining rounds."""
    recipe, policy = run.recipe, run.policy
    update = find_update(recipe.update)
    failed_rounds = 0
    for t in remaining_rounds(run):
        with Interruptible() as interrupt, run.progress.round(t) as bar:
            users = users_of_round(run, t)
            bar.start("sampling", users)
            prompts = _readable(run, users)
            responses: Private[Responses] = sample_responses(
                policy,
                prompts,
                recipe.rollout,
                key=run.key,
                round_=t,
                max_prompt_tokens=recipe.data.max_prompt_tokens,
                tick=interrupt.checked(bar.tick),
            )
            bar.start("rewards", users)
            scores: Private[Scores] = score_private(run.scorer, responses)
            bar.start("gradients", users)
            round_ = PrivateRound(
                policy=policy,
                responses=responses,
                scores=scores,
                plan=run.plan,
                telemetry=run.telemetry,
                critic=run.critic,
                optimizer=run.optimizer,
                reduce=run.processes.sum,
                gate=gate_for_round(run, t, interrupt),
                t=t,
                tick=interrupt.checked(bar.tick),
            )
            set_learning_rate(run.optimizer, recipe.optimizer, t, run.plan.rounds)
            subtract_kl(round_, recipe.kl, recipe.update.batch_size)
            update(round_, recipe.update)
            save(run, t)
            reward = _report(run, t, round_)
            bar.stop()
            assert round_.norms is not None
            record_secret(run, t, users, round_.norms, bar.seconds, _rewards(round_))
        failed_rounds = failed_rounds + 1 if reward is not None and reward.all_failed else 0
        if failed_rounds == MAX_FAILED_ROUNDS:
            raise DprlhfError(
                f"the noised count of valid rewards is zero for {MAX_FAILED_ROUNDS} rounds in a"
                f" row: check the reward (details in {run.folder.secret}); nothing is lost, but"
                f" the users of the first {t} rounds are spent"
            )


def _readable(run: Run, users: Private[Any]) -> Private[Prompts]:
    """Return the prompts of those users whose prompts the policy can read."""
    longest = run.recipe.data.max_prompt_tokens
    return users.map(
        lambda some: run.users.readable(some, lambda read: run.policy.encode(read.prompts, longest))
    )


def _report(run: Run, t: int, round_: PrivateRound) -> ReleasedReward | None:
    """Write the round's line of public and released values, and tell the callbacks."""
    assert round_.released is not None
    metrics = released_metrics(run, t, round_.released)
    reward = round_.reward
    if reward is not None:
        metrics["private_reward_noised"] = reward.mean
        metrics["private_reward_noise_std"] = reward.noise_std
        metrics["valid_share_noised"] = reward.valid_share
    if run.critic is not None:
        metrics["critic_value_noised"] = run.critic.mean_value
    every = run.recipe.evaluation.every if run.recipe.evaluation else None
    if every and t % every == 0 and t < run.plan.rounds and run.processes.main:
        metrics |= _public_metrics(run, t)
    log_metrics(run, metrics)
    return reward


def _public_metrics(run: Run, t: int) -> dict[str, float]:
    """Evaluate on the public prompts after round t, and keep a few of the responses."""
    public = evaluate_policy(run, f"evaluation after round {t}")
    kept = JsonLines(run.folder.public_samples)
    prompts, texts = public.responses.prompts.prompts, public.responses.texts
    for prompt, text, reward in list(zip(prompts, texts, public.rewards, strict=True))[:SAMPLES]:
        line = {"round": t, "prompt": prompt, "response": text, "reward": float(reward)}
        kept.write(line)
    return {
        "public_reward": public.estimate.mean,
        "public_reward_standard_error": public.estimate.standard_error,
        **drift_metrics(run.policy, public.responses, run.recipe.update.batch_size),
    }


def evaluate_policy(run: Run, description: str, *, base: bool = False) -> Evaluated:
    """Evaluate on the public prompts."""
    assert run.public_prompts is not None
    assert run.recipe.evaluation is not None
    with run.progress.bar(description, len(run.public_prompts)) as tick:
        return evaluate(
            run.policy,
            run.scorer,
            run.public_prompts,
            run.recipe.rollout,
            seed=run.recipe.seed,
            max_prompt_tokens=run.recipe.evaluation.data.max_prompt_tokens,
            base=base,
            tick=tick,
        )


def _rewards(round_: PrivateRound) -> Private[dict[str, Any]]:
    """Return what ``secret/`` keeps of this process's rewards."""
    return round_.unpenalised.map(
        lambda scored: {
            "reward_mean": float(scored.values.mean()) if len(scored.values) else None,
            "reward_failures": dict(scored.failures),
        }
    )


@dataclass(frozen=True)
class Result:
    """What a finished run leaves.

    Attributes:
        folder: the run folder.
        plan: the guarantee.
        before: reward of the base model on the public prompts; None without evaluation.
        after: reward of the tuned policy.
        difference: after − before on the same prompts and draws, with its standard error.
        samples: public prompts with both continuations and their rewards.
        policy: the tuned policy.
    """

    folder: RunFolder
    plan: Plan
    before: RewardEstimate | None
    after: RewardEstimate | None
    difference: RewardEstimate | None
    samples: list[dict[str, Any]]
    policy: CausalLMPolicy
