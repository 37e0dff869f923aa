"""Evaluation on public prompts, which costs no privacy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.data.users import Prompts
from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rewards import Scorer
from dprlhf.rewards.isolation import kept_process_state
from dprlhf.rewards.scoring import score_responses
from dprlhf.rollout import Responses, keeps_outputs, public_sampling_settings, sample
from dprlhf.training.measures import (
    Comparison,
    PolicyEstimate,
    RewardEstimate,
    TokenLogs,
    compare,
    estimate,
    measure,
    token_logs,
)
from dprlhf.training.processes import Processes

# Evaluation draws need no secrecy, and the same draws before and after make the two comparable.
_PUBLIC_KEY = bytes(32)


@dataclass(frozen=True)
class Evaluated:
    """One policy's continuations of the public prompts, and how they score."""

    rewards: NDArray[np.float64]  # The rewards, [prompts]
    responses: Responses
    measures: Mapping[str, RewardEstimate] = field(default_factory=dict)

    @property
    def estimate(self) -> PolicyEstimate:
        """The mean reward and its standard error, with the measures."""
        reward = estimate(self.rewards)
        return PolicyEstimate(reward.mean, reward.standard_error, reward.prompts, self.measures)

    @property
    def estimates(self) -> dict[str, RewardEstimate]:
        """All estimates by name: ``reward`` and each measure."""
        return {"reward": estimate(self.rewards), **self.measures}


def compared(before: Evaluated | None, after: Evaluated | None) -> dict[str, Comparison]:
    """Compare the tuned policy with the base model by the reward."""
    if before is None or after is None:
        return {}
    return {"reward": compare(before.rewards, after.rewards)}


def comparison_metrics(comparisons: Mapping[str, Comparison]) -> dict[str, float]:
    """Return the win rates and their 95% intervals as ``public_NAME_win_rate``, ``…_low/high``."""
    metrics = {}
    for name, one in comparisons.items():
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
    tick: Any = None,
    batch_size: int | None = None,  # Rows of a forward pass for KL and perplexity
    processes: Processes | None = None,
    compute_metrics: ComputeMetrics | None = None,
) -> Evaluated:
    """Sample one continuation of each public prompt and score it."""
    # An agent's responses hold what only the process that sampled them has.
    if processes is not None and (policy.sampler is not None or len(prompts) < processes.count):
        processes = None
    own = np.arange(len(prompts)) if processes is None else processes.share(np.arange(len(prompts)))
    one = public_sampling_settings(rollout, len(own), 1)
    longest = max_prompt_tokens
    room = keeps_outputs(policy, one, rows=len(own), max_prompt_tokens=longest, gradients=False)
    responses = sample(
        policy,
        prompts.take(own),
        one,
        key=_PUBLIC_KEY,
        context=("evaluation", seed),
        max_prompt_tokens=longest,
        tick=tick,
        keep="logits" if batch_size is not None and room else None,
    )
    logs = None if batch_size is None else token_logs(policy, responses, batch_size)
    responses = Responses(**{**vars(responses), "kept": None})
    if processes is not None and processes.count > 1:
        parts = processes.gathered((own, responses, logs))
        order = np.argsort(np.concatenate([places for places, _, _ in parts]))
        joined = [some for _, some, _ in parts]
        responses = _joined(joined, order, prompts, policy.tokenizer.pad_token_id)
        if logs is not None:
            of_all = [some for _, _, some in parts]
            plain, ratio = (
                np.concatenate([getattr(x, n) for x in of_all]) for n in ("plain", "ratio")
            )
            logs = TokenLogs(plain[order], ratio[order])
    measures = measure(policy, responses, logs)
    scored = score_responses(scorer, responses)
    if compute_metrics is not None:
        with kept_process_state():
            metrics = compute_metrics(responses.texts, scored.values, responses.prompts.prompts)
        measures |= _further(metrics, {"reward", *measures}, len(responses.texts))
    return Evaluated(scored.values, responses, measures)


ComputeMetrics = Callable[[Sequence[str], NDArray[np.float64], Sequence[Any]], Any]
"""From the responses, their rewards and the prompts, ``[prompts]`` each, to numbers by name."""


def _further(metrics: Any, taken: set[str], prompts: int) -> dict[str, RewardEstimate]:
    """Return what ``compute_metrics`` gave as measures, which have no standard error."""
    if not isinstance(metrics, Mapping):
        raise DprlhfError(
            "compute_metrics: it must return a dictionary of numbers, not a"
            f" {type(metrics).__name__}"
        )
    measured = {}
    for name, value in metrics.items():
        if name in taken:
            raise DprlhfError(f"compute_metrics: {name!r} is measured already: give another name")
        try:
            measured[name] = RewardEstimate(float(value), math.nan, prompts)
        except (TypeError, ValueError, RuntimeError):  # also an array or tensor of several numbers
            raise DprlhfError(
                f"compute_metrics: {name!r} must be a number, not a {type(value).__name__}"
            ) from None
    return measured


def _joined(
    parts: Sequence[Responses], order: NDArray[np.int64], prompts: Prompts, pad: int
) -> Responses:
    """Return the responses of all processes as one process would have sampled them."""
    width = max(some.tokens.shape[1] for some in parts)

    def whole(name: str, value: int) -> torch.Tensor:
        tensors = [getattr(some, name) for some in parts]
        return torch.cat([F.pad(x, (width - x.shape[1], 0), value=value) for x in tensors])[order]

    texts = [text for some in parts for text in some.texts]
    asked = [prompt for some in parts for prompt in some.prompts.prompts]
    left_out = [some.left_out for some in parts if some.left_out is not None]
    _, user = np.unique(prompts.users, return_inverse=True)
    of_all = {
        "tokens": whole("tokens", pad),
        "mask": whole("mask", 0),
        "prompt": np.arange(len(order)),
        "user": user,
        "from_base": np.zeros(len(order), dtype=np.bool_),
        "texts": [texts[place] for place in order],
        "prompts": Prompts(**{**vars(prompts), "prompts": [asked[place] for place in order]}),
        "users": int(user.max()) + 1,
        "grid": np.empty(0, dtype=np.int64),
        "left_out": np.concatenate(left_out)[order] if left_out else None,
    }
    return Responses(**{**vars(parts[0]), **of_all})


SAMPLES = 5
"""Number of public responses that each evaluation during the run keeps."""


def first_samples(evaluated: Evaluated, round_: int) -> Iterator[dict[str, Any]]:
    """Yield the first few prompts and responses of an evaluation during the run, with rewards."""
    for row, text in enumerate(evaluated.responses.texts[:SAMPLES]):
        yield {
            "round": round_,
            "prompt": evaluated.responses.prompts.prompts[row],
            "response": text,
            "reward": float(evaluated.rewards[row]),
        }


def samples(before: Evaluated, after: Evaluated) -> list[dict[str, Any]]:
    """Return every public prompt with both policies' responses and their rewards."""
    shown = []
    for row, prompt in enumerate(after.responses.prompts.prompts):
        sample: dict[str, Any] = {"prompt": prompt}
        for when, one in (("before", before), ("after", after)):
            sample[when] = one.responses.texts[row]
            sample[f"reward_{when}"] = float(one.rewards[row])
        shown.append(sample)
    return shown


def figures(before: Evaluated, after: Evaluated) -> dict[str, Any]:
    """Return the estimates of both policies by name, and how they compare."""
    both = {"before": before, "after": after}
    values: dict[str, Any] = {
        when: {name: estimate.as_dict() for name, estimate in one.estimates.items()}
        for when, one in both.items()
    }
    values["compared"] = {name: one.as_dict() for name, one in compared(before, after).items()}
    return values
