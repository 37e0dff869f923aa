"""What more responses to a prompt bring, and what they cost.

    python scripts/noise/responses.py signal     # 20 to 30 minutes of one core
    python scripts/noise/responses.py time       # 10 minutes of one core
    python scripts/noise/responses.py utility    # 30 minutes of one core

- ``signal``: how much users' clipped gradients agree, by responses and advantage estimator, with
  SmolLM2-135M at the start of training, on public prompts as users. s is the norm of the mean
  clipped contribution over S (``adapter_signal.py``), estimated without bias from products of
  different users' vectors; errors are a jackknife over users.
- ``time``: CPU seconds of one response, by responses to a prompt, with what the responses share and
  without. Sides alternate; CPU time, because other programs may share the machine.
- ``utility``: whole private runs of the small public model of ``utility.py`` with few users.

Finished parts of a measurement are kept under ``runs/responses`` and read again.
Writes docs/results/noise.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf import train
from dprlhf.boundary import Private
from dprlhf.data.loading import load_rows
from dprlhf.data.users import Prompts, Users
from dprlhf.gradients.clipping import Weighted, clipped_sum
from dprlhf.gradients.micro_batches import user_gradients
from dprlhf.policies.activations import align_with_activations
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import load_policy
from dprlhf.recipe import Recipe, Rollout, load_recipe
from dprlhf.rewards import Scorer, load_reward
from dprlhf.rewards.private import score_responses
from dprlhf.rollout import sample
from dprlhf.runs.measurements import Result, write_results
from dprlhf.training.evaluate import _PUBLIC_KEY
from dprlhf.updates.baselines import BASELINES
from noise.many_runs import ROOT, SMALL, overrides_of, small_policy

RECIPE = ROOT / "recipes" / "imdb_sentiment.yaml"
RESULTS = ROOT / "docs" / "results" / "noise.json"
RUNS = ROOT / "runs" / "responses"
RESPONSES = (2, 4, 8, 16, 32)
MOST = max(RESPONSES)

Array = NDArray[np.float64]


def public_users(recipe: Recipe) -> Users:
    assert recipe.evaluation is not None
    return Users(load_rows(recipe.evaluation.data), recipe.evaluation.data)


# --- signal --------------------------------------------------------------------------------------

PART = 16  # users in one file of finished gradients


def collect(users: int, folder: Path) -> tuple[torch.Tensor, Array, Array]:
    """Return each response's ∇ log π, ``[users, responses, d]``, its reward and its length."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = load_recipe(RECIPE, [f"rollout.responses={MOST}", "reward_range=1e6"])
    public, policy = public_users(recipe), load_policy(recipe.policy)
    longest = recipe.data.max_prompt_tokens
    scorer = Scorer([load_reward(r) for r in recipe.rewards], recipe.reward_range)
    some = sample(
        policy,
        public.select(np.arange(1000, 1064)),
        recipe.rollout.model_copy(update={"responses": 1}),
        key=_PUBLIC_KEY, context=("directions",), max_prompt_tokens=longest,
    )  # fmt: skip
    align_with_activations(policy, some.tokens, some.mask, 32)
    for start in range(0, users, PART):
        file = folder / f"gradients-{start}.pt"
        if file.exists():
            continue
        responses = sample(
            policy, public.select(np.arange(start, start + PART)), recipe.rollout,
            key=_PUBLIC_KEY, context=("responses", start), max_prompt_tokens=longest,
        )  # fmt: skip
        rewards = score_responses(scorer, responses).values.reshape(PART, MOST)
        gradients = torch.zeros(PART, MOST, policy.dimension)
        ones = np.ones(PART * MOST)
        for of, parts, _ in user_gradients(policy, responses, ones, batch_size=MOST, rows=1):
            gradients[of] = parts.float().cpu()
        lengths = responses.response_mask.sum(1).numpy().reshape(PART, MOST)
        torch.save((gradients, rewards, lengths), file)
        print(start + PART, "users", flush=True)
    files = [folder / f"gradients-{start}.pt" for start in range(0, users, PART)]
    found = [torch.load(file, weights_only=False)[:3] for file in files]
    gradients = torch.cat([part[0] for part in found])
    return gradients, *(np.concatenate([part[i] for part in found]) for i in (1, 2))


def baseline(name: str) -> Callable[[Array, float], Array]:
    """Return one of the project's baselines, all rows from π_t."""
    return lambda r, public: BASELINES[name](r, np.zeros(r.shape[1], dtype=bool))


def ranks(r: Array, public: float) -> Array:
    """How many of the other responses are worse, less how many are better, over k."""
    return np.sign(r[:, :, None] - r[:, None, :]).sum(2) / r.shape[1]


ESTIMATORS: dict[str, Callable[[Array, float], Array]] = {
    "loo": baseline("loo"),
    "paired": baseline("paired"),
    "group": baseline("group"),
    "ranks": ranks,
    "sign of r - mean": lambda r, public: np.sign(r - r.mean(1, keepdims=True)),
    "best of k": lambda r, public: (r == r.max(1, keepdims=True)) - 1 / r.shape[1],
    "loo, shrunk to the public mean by two": (
        lambda r, public: r - (r.sum(1, keepdims=True) - r + 2 * public) / (r.shape[1] + 1)
    ),
}
"""Each takes rewards ``[users, k]`` and the mean reward of public prompts."""


def agreement(contributions: torch.Tensor, clip_norm: float) -> tuple[float, float]:
    """Return s and its standard error, from ``[draws, users, d]``."""
    norms = contributions.norm(dim=2, keepdim=True)
    clipped = contributions * (clip_norm / norms.clamp(min=1e-12)).clamp(max=1) / clip_norm

    def s(users: torch.Tensor) -> float:
        c, n = clipped[:, users], len(users)
        total, own = c.sum(1).square().sum(1), c.square().sum((1, 2))
        return max(float(((total - own) / (n * (n - 1))).mean()), 0.0) ** 0.5

    everyone, groups = torch.arange(clipped.shape[1]), 12
    left = np.array([s(everyone[everyone % groups != group]) for group in range(groups)])
    error = float(((groups - 1) / groups * ((left - left.mean()) ** 2).sum()) ** 0.5)
    return s(everyone), error


def signal(options: argparse.Namespace) -> Iterator[Result]:
    gradients, rewards, lengths = collect(options.users, RUNS)
    bound, root = 3.0, gradients.shape[2] ** 0.5
    rewards = np.clip(rewards, -bound, bound)
    public = float(rewards.mean())

    def contributions(name: str, k: int, per_token: bool) -> torch.Tensor:
        draws = []
        for start in range(0, MOST, k):
            columns = slice(start, start + k)
            weights = ESTIMATORS[name](rewards[:, columns], public) / k
            if per_token:
                weights = weights / lengths[:, columns]
            draws.append(
                torch.einsum("uk,ukd->ud", torch.from_numpy(weights).float(), gradients[:, columns])
            )
        return torch.stack(draws)

    for k in RESPONSES:
        for name in ESTIMATORS:
            found = contributions(name, k, per_token=False)
            norm = float(found.norm(dim=2).median())
            s, error = agreement(found, 0.5 * norm)
            print(f"{k:>2} {name:<40} s = {s:.3f} ± {error:.3f}, norm {norm:.2f}", flush=True)
            label = f"responses: {k}, {name}"
            yield Result(f"{label}: signal s", s, "1")
            yield Result(f"{label}: signal s, standard error", error, "1")
            yield Result(f"{label}: 1000 s/√d", 1000 * s / root, "1")
            yield Result(f"{label}: median gradient norm", norm, "1")
        found = contributions("loo", k, per_token=True)  # grpo with scale_rewards: false
        norm, (s, _) = float(found.norm(dim=2).median()), agreement(found, 1.0)
        print(f"{k:>2} grpo at S = 1: s = {s:.3f}, norm {norm:.2f}", flush=True)
        yield Result(f"responses: {k}, grpo at clip norm 1: signal s", s, "1")
        yield Result(f"responses: {k}, grpo: median gradient norm", norm, "1")


# --- time ----------------------------------------------------------------------------------------

PROMPTS = {16: 8, 128: 120}  # tokens of a padded prompt; words of a review
ROWS = 32
PHASES = ("sampling", "reward", "update")


def one_turn(
    policy: CausalLMPolicy, scorer: Scorer, prompts: Prompts, rollout: Rollout, tokens: int
) -> dict[str, float]:
    """Sample, score and differentiate; return the CPU seconds of each phase."""
    clock = [time.process_time()]
    responses = sample(
        policy, prompts, rollout, key=_PUBLIC_KEY, context=("time",), max_prompt_tokens=tokens
    )
    clock.append(time.process_time())
    score_responses(scorer, responses)
    clock.append(time.process_time())
    ones = np.ones(len(responses.user))
    weighted = Weighted(responses, ones, np.zeros((responses.users, 0)), 0.0)
    clipped_sum(
        policy, Private(weighted), clip_norm=1.0, batch_size=ROWS, reduce=lambda total: total
    )
    clock.append(time.process_time())
    return dict(zip(PHASES, np.diff(clock).tolist(), strict=True))


def timed(options: argparse.Namespace) -> Iterator[Result]:
    shared = {name: getattr(CausalLMPolicy, name) for name in ("shared_cache", "shared_rows")}
    apart: dict[str, Any] = {name: lambda self, *shape: 1 for name in shared}
    torch.set_num_threads(1)
    for tokens, words in PROMPTS.items():
        changes = [f"evaluation.data.prompt_words={words}", f"rollout.batch_size={ROWS}"]
        changes += [f"evaluation.data.max_prompt_tokens={tokens}", "policy.adapter.init=random"]
        recipe = load_recipe(RECIPE, changes)
        policy, public = load_policy(recipe.policy), public_users(recipe)
        scorer = Scorer([load_reward(r) for r in recipe.rewards], recipe.reward_range)
        for k in RESPONSES if tokens == 16 else (8, 32):
            prompts = public.select(np.arange(ROWS // k))
            rollout = recipe.rollout.model_copy(update={"responses": k})
            took: dict[tuple[str, str], list[float]] = {}
            for _ in range(options.repeats):
                for side, methods in {"apart": apart, "together": shared}.items():
                    for name, method in methods.items():
                        setattr(CausalLMPolicy, name, method)
                    turn = one_turn(policy, scorer, prompts, rollout, tokens)
                    for phase, took_now in turn.items():
                        took.setdefault((phase, side), []).append(took_now)
            yield from of_times(took, f"responses: {k}, prompt of {tokens} tokens")


def of_times(took: dict[tuple[str, str], list[float]], label: str) -> Iterator[Result]:
    """Yield milliseconds of a response by phase, and what sharing saves."""
    total = 0.0
    for phase in PHASES:
        each = 1000 * statistics.median(took[phase, "together"]) / ROWS
        total += each
        yield Result(f"{label}: {phase}, CPU time of a response", each, "ms")
    yield Result(f"{label}: CPU time of a response", total, "ms")
    text = f"{label}: {total:.0f} ms a response"
    for phase in ("sampling", "update"):
        pairs = zip(took[phase, "apart"], took[phase, "together"], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        text += f", {phase} {ratio:.2f}"
        yield Result(f"{label}: {phase}, responses apart over together", ratio, "1")
    print(text, flush=True)


# --- utility -------------------------------------------------------------------------------------

CELLS = ((300, 1.0), (600, 0.3))  # users, ε


def run(users: int, epsilon: float, k: int, seed: int, policy: dict[str, Any]) -> dict[str, float]:
    """Train or read one run; return the rise of the reward and the CPU seconds of the whole run."""
    name = f"{users}-{epsilon:g}-{k}-{seed}"
    place, summary = RUNS / name, RUNS / f"{name}.json"
    if summary.exists():
        read: dict[str, float] = json.loads(summary.read_text())
        return read
    shutil.rmtree(place, ignore_errors=True)
    settings = {
        **SMALL, **policy, "data.limit": users, "privacy.epsilon": epsilon, "seed": seed,
        "rollout.responses": k, "update.clip_norm": 0.3,
        "evaluation.prompts": 500,
    }  # fmt: skip
    start = time.process_time()
    result = train(RECIPE, overrides=overrides_of(settings), output_dir=place, quiet=True)
    assert result.difference is not None
    figures = {"rise": result.difference.mean, "seconds": time.process_time() - start}
    summary.write_text(json.dumps(figures))
    return figures


def utility(options: argparse.Namespace) -> Iterator[Result]:
    policy = small_policy(RUNS / "reviews-lm")
    torch.set_num_threads(1)
    for users, epsilon in CELLS:
        for k in options.responses:
            runs = [run(users, epsilon, k, seed, policy) for seed in range(options.seeds)]
            rises = np.array([r["rise"] for r in runs])
            error = rises.std(ddof=1) / len(rises) ** 0.5
            cpu = statistics.median(r["seconds"] for r in runs)
            label = f"responses: small model, {users} users, epsilon {epsilon:g}, {k} responses"
            print(f"{label}: {rises.mean():.2f} ± {error:.2f}, {cpu:.0f} s", flush=True)
            yield Result(f"{label}: rise of the reward", rises.mean(), "logit difference")
            yield Result(f"{label}: rise of the reward, standard error", error, "logit difference")
            yield Result(f"{label}: seeds", len(rises), "1")
            yield Result(f"{label}: CPU time of a run", cpu, "s")


PARTS = {"signal": signal, "time": timed, "utility": utility}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--users", type=int, default=160, help="public prompts (signal)")
    parser.add_argument("--repeats", type=int, default=3, help="of each side (time)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of a cell (utility)")
    parser.add_argument("--responses", type=int, nargs="+", default=(2, 8, 32), help="(utility)")
    options = parser.parse_args()
    for row in PARTS[options.part](options):
        write_results(RESULTS, [row])


if __name__ == "__main__":
    main()
