"""Evaluation on public prompts, which costs no privacy."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.data.users import Prompts
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rewards import Scorer
from dprlhf.rewards.logs import Logged
from dprlhf.rewards.private import score_responses
from dprlhf.rollout import Responses, keeps_outputs, sample
from dprlhf.training.measures import (
    Comparison,
    PolicyEstimate,
    RewardEstimate,
    compare,
    estimate,
    measure,
)

# Evaluation draws need no secrecy, and the same draws before and after make the two comparable.
_PUBLIC_KEY = bytes(32)


@dataclass(frozen=True)
class Evaluated:
    """One policy's continuations of the public prompts, and how they score.

    Attributes:
        rewards: The rewards, ``[prompts]``.
        responses: One response to each prompt.
        judges: Scores of each judge, ``[prompts]``; NaN where it gave none.
        measures: The built-in measures of the responses, by name.
        logged: What the rewards logged about the responses, as far as it may be published.
    """

    rewards: NDArray[np.float64]
    responses: Responses
    judges: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    measures: Mapping[str, RewardEstimate] = field(default_factory=dict)
    logged: Logged = field(default_factory=Logged)

    @property
    def estimate(self) -> PolicyEstimate:
        """Return the mean reward and its standard error, with judges and measures."""
        reward = estimate(self.rewards)
        judged = {name: estimate(scores) for name, scores in self.judges.items()}
        return PolicyEstimate(
            reward.mean, reward.standard_error, reward.prompts, judged, self.measures
        )

    def judged(self, row: int) -> dict[str, float | None]:
        """Return each judge's score of one response; None where it gave none."""
        return {n: None if np.isnan(v[row]) else float(v[row]) for n, v in self.judges.items()}

    @property
    def scores(self) -> dict[str, NDArray[np.float64]]:
        """The scores by name: ``reward`` and each judge, ``[prompts]``."""
        return {"reward": self.rewards, **self.judges}

    @property
    def estimates(self) -> dict[str, RewardEstimate]:
        """All estimates by name: ``reward``, each judge and each measure."""
        judged = {name: estimate(scores) for name, scores in self.scores.items()}
        return {**judged, **self.measures}


def compared(before: Evaluated | None, after: Evaluated | None) -> dict[str, Comparison]:
    """Compare the tuned policy with the base model by the reward and by each judge."""
    if before is None or after is None:
        return {}
    return {name: compare(old, after.scores[name]) for name, old in before.scores.items()}


def comparison_metrics(found: Mapping[str, Comparison]) -> dict[str, float]:
    """Return the win rates and their 95% intervals as ``public_NAME_win_rate``, ``…_low/high``."""
    metrics = {}
    for name, one in found.items():
        rate = one.win_rate
        if rate.prompts:
            metrics[f"public_{name}_win_rate"] = rate.rate
            metrics[f"public_{name}_win_rate_low"] = rate.low
            metrics[f"public_{name}_win_rate_high"] = rate.high
    return metrics


def evaluate(
    policy: CausalLMPolicy,
    scorer: Scorer,
    prompts: Prompts,
    rollout: recipe.Rollout,
    *,
    seed: int,
    max_prompt_tokens: int,
    base: bool = False,
    tick: Any = None,
    judges: Mapping[str, Scorer] | None = None,
    batch_size: int | None = None,
) -> Evaluated:
    """Sample one continuation of each public prompt and score it.

    Args:
        policy: The policy that samples the continuations.
        scorer: The rewards that score them.
        prompts: Public prompts.
        rollout: The recipe's sampling settings.
        seed: Seed of the draws: with the same seed, two policies can be compared draw by draw.
        max_prompt_tokens: Longer prompts are cut on the left.
        base: Evaluate the base model (the adapter switched off) in place of the policy.
        tick: Called with the number of rows done since the last call.
        judges: Judges by name; a response that a judge fails on has no score of it.
        batch_size: Rows of a forward pass for KL and perplexity; None leaves them out.
    """
    one = rollout.model_copy(update={"responses": 1, "base_policy": "on-policy"})
    longest = max_prompt_tokens
    with policy.base() if base else contextlib.nullcontext():
        room = keeps_outputs(
            policy, one, rows=len(prompts), max_prompt_tokens=longest, gradients=False
        )
        responses = sample(
            policy,
            prompts,
            one,
            key=_PUBLIC_KEY,
            context=("evaluation", seed),
            max_prompt_tokens=longest,
            tick=tick,
            keep="logits" if batch_size is not None and room else None,
        )
        measures = measure(policy, responses, batch_size)
        responses = Responses(**{**vars(responses), "kept": None})
    judged = {}
    for name, judge in (judges or {}).items():
        scores = score_responses(judge, responses)
        judged[name] = np.where(scores.valid, scores.values, np.nan)
    scored = score_responses(scorer, responses)
    return Evaluated(scored.values, responses, judged, measures, scored.logged)
