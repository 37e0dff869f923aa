"""Evaluation on public prompts, which costs no privacy: the reward, and measures of responses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.data.users import Prompts
from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.protocol import Sampling
from dprlhf.rewards import Scorer
from dprlhf.rewards.isolation import kept_process_state
from dprlhf.rewards.scoring import score_responses
from dprlhf.rollout import Responses, most_kept, public_sampling_settings, sample
from dprlhf.rollout.logprobs import base_logprobs, token_logprobs
from dprlhf.rollout.sampling import ended
from dprlhf.training.processes import Processes

Array = NDArray[np.float64]

_Z95 = 1.959963984540054
"""The 97.5% quantile of the normal distribution."""


@dataclass(frozen=True)
class RewardEstimate:
    """Mean reward over public prompts, or another mean over them, with its standard error."""

    mean: float
    standard_error: float
    prompts: int

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, which has no NaN and no infinity: None in their place."""
        return {k: v if math.isfinite(v) else None for k, v in asdict(self).items()}


@dataclass(frozen=True)
class PolicyEstimate(RewardEstimate):
    """A policy's mean reward over public prompts, and what else was measured on its responses."""

    # The built-in measures by name, see :func:`measure`
    measures: Mapping[str, RewardEstimate] = field(default_factory=dict)


def drift_warnings(
    rounds: Sequence[Mapping[str, Any]],
    reward_range: float,
    before: PolicyEstimate | None,  # The base model on public prompts; None without them
    after: PolicyEstimate | None,
) -> list[str]:
    """Return what the RELEASED and public values of a run say against its result."""
    messages = []
    steps = [line for line in rounds if "released_gradient_norm" in line]
    released = sum(line["released_gradient_norm"] ** 2 for line in steps)
    noise = sum(line["expected_noise_norm"] ** 2 for line in steps)
    if noise and released < 1.1 * noise:
        messages.append(
            "the released gradients of all rounds together are about as long as noise alone: what"
            " was learned is mostly noise; take more users, fewer dimensions or a larger epsilon"
        )
    means = [
        (line["private_reward_noised"], line["private_reward_noise_std"])
        for line in rounds
        if line.get("private_reward_noised") is not None
    ]
    public = after.mean if after is not None else 0.0
    last, error = means[-1] if means else (0.0, 0.0)
    if abs(public) > 0.9 * reward_range or abs(last) - 2 * error > 0.9 * reward_range:
        messages.append(
            f"the mean reward is close to the range of {reward_range:g} to which rewards are"
            " clipped, where they differ no more: raise reward_range, or scale the reward"
        )
    if before is None or after is None:
        return messages
    moved = after.measures.get("kl_per_token")
    texts = before.measures.get("perplexity"), after.measures.get("perplexity")
    far = moved is not None and moved.mean > 1
    if far or (texts[0] and texts[1] and texts[1].mean > 2 * texts[0].mean):
        messages.append(
            "the policy is far from the base model (KL divergence above 1 nat a token, or twice the"
            " perplexity): read its texts; a penalty keeps it closer (kl.beta), or shorter steps"
        )
    return messages


@dataclass(frozen=True)
class WinRate:
    """Share of public prompts whose response scores higher than the base model's; ties count half.

    Both responses to a prompt are sampled with the same random numbers, so a policy that has not
    moved ties everywhere.
    """

    rate: float
    low: float  # Lower end of the 95% score interval (Wilson 1927); ties make it wider than need be
    high: float
    ties: int
    prompts: int  # Number of prompts where both responses have a score


@dataclass(frozen=True)
class Comparison:
    """The tuned policy against the base model, by the reward."""

    difference: RewardEstimate  # Mean of after − before on the same prompts and draws
    win_rate: WinRate

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        rate = {k: None if v != v else v for k, v in asdict(self.win_rate).items()}
        return {"difference": self.difference.as_dict(), "win_rate": rate}


def estimate(values: Array) -> RewardEstimate:
    """Return the mean of values, ``[prompts]``, and its standard error; NaN values are left out."""
    known = values[~np.isnan(values)]
    error = float(known.std(ddof=1)) / math.sqrt(len(known)) if len(known) > 1 else math.nan
    return RewardEstimate(float(known.mean()) if len(known) else math.nan, error, len(known))


def compare(before: Array, after: Array) -> Comparison:
    """Compare scores of the same prompts, each ``[prompts]``; NaN in either leaves a prompt out."""
    difference = after - before
    known = difference[~np.isnan(difference)]
    count, ties = len(known), int((known == 0).sum())
    wins = float((known > 0).sum()) + ties / 2
    rate = wins / count if count else math.nan
    middle, half = math.nan, math.nan
    if count:
        middle = (wins + _Z95**2 / 2) / (count + _Z95**2)
        spread = wins * (count - wins) / count + _Z95**2 / 4
        half = _Z95 * math.sqrt(spread) / (count + _Z95**2)
    return Comparison(
        estimate(difference), WinRate(rate, middle - half, middle + half, ties, count)
    )


def distinct(texts: Sequence[str], n: int) -> float:
    """Return distinct-n of texts: different n-grams of words over the number of all words.

    A word is what stands between spaces. The measure is of all texts together, and falls as there
    are more of them (Li et al. 2016, arXiv 1510.03055, section 5.4); 0 without words.
    """
    words = [text.split() for text in texts]
    grams = {tuple(w[i : i + n]) for w in words for i in range(len(w) - n + 1)}
    return len(grams) / max(1, sum(map(len, words)))


@dataclass(frozen=True)
class TokenLogs:
    """Log-probabilities of sampled tokens; 0 on padding."""

    plain: Array  # log μ(token) of the base model at temperature 1, [rows, response]
    ratio: Array  # log μ(token) − log π(token) at the sampling temperature, [rows, response]


def token_logs(policy: CausalLMPolicy, responses: Responses, batch_size: int) -> TokenLogs:
    """Return the log-probabilities of the responses' tokens under the policy and the base model."""
    plain = base_logprobs(policy, responses, batch_size)
    if policy.is_base:
        return TokenLogs(plain, np.zeros_like(plain))
    with policy.sampled_with(Sampling()):
        current = token_logprobs(policy, responses, batch_size)
        plainly = policy.sampling == Sampling() and policy.temperature == 1.0
        with policy.base():
            base = plain if plainly else token_logprobs(policy, responses, batch_size)
    return TokenLogs(plain, base - current)


def measure(
    policy: CausalLMPolicy, responses: Responses, logs: TokenLogs | None
) -> dict[str, RewardEstimate]:
    """Measure PUBLIC responses of a policy: what reveals reward hacking while the reward rises."""
    lengths = responses.response_mask.sum(1)
    tokens, count = responses.policy_mask.sum(1).double().numpy(), len(lengths)
    measures = {
        "response_tokens": estimate(tokens),
        "ended_share": estimate(ended(policy, responses).astype(np.float64)),
        "distinct_1": RewardEstimate(distinct(responses.texts, 1), math.nan, count),
        "distinct_2": RewardEstimate(distinct(responses.texts, 2), math.nan, count),
    }
    if logs is None:
        return measures
    likelihood = _per_token(-logs.plain.sum(1), tokens)
    perplexity = math.exp(likelihood.mean)
    return {
        **measures,
        # Nats in a response: the plain estimator (TRL's k1) of KL(π ‖ μ) at the sampling
        # temperature, without top-k, top-p and min-p, which would make it infinite.
        "kl": estimate(-logs.ratio.sum(1)),
        # μ/π − log(μ/π) − 1, the estimator k3 that TRL's GRPO logs as kl.
        "kl_per_token": _per_token((np.expm1(logs.ratio) - logs.ratio).sum(1), tokens),
        "perplexity": RewardEstimate(perplexity, perplexity * likelihood.standard_error, count),
    }


def _per_token(sums: Array, tokens: Array) -> RewardEstimate:
    """Return the mean over all tokens, with the standard error of a ratio of two means."""
    mean = float(sums.sum() / tokens.sum())
    error = estimate((sums - mean * tokens) / tokens.mean()).standard_error
    return RewardEstimate(mean, error, len(tokens))


def as_metrics(estimates: Mapping[str, RewardEstimate]) -> dict[str, float | None]:
    """Return means and standard errors as ``public_NAME`` and ``public_NAME_standard_error``."""
    metrics: dict[str, float | None] = {}
    for name, value in estimates.items():
        values = value.as_dict()
        metrics[f"public_{name}"] = values["mean"]
        if values["standard_error"] is not None:
            metrics[f"public_{name}_standard_error"] = values["standard_error"]
    return metrics


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
    keep = None
    if batch_size is not None:
        sizes = {"rows": len(own), "max_prompt_tokens": longest}
        keep = most_kept(policy, one, **sizes, most="logits")
    responses = sample(
        policy,
        prompts.take(own),
        one,
        key=_PUBLIC_KEY,
        context=("evaluation", seed),
        max_prompt_tokens=longest,
        tick=tick,
        keep=keep,
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
