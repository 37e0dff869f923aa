"""Measure, before any run, how much a noised critic adds to what users' clipped gradients agree on.

The signal s is the norm of the mean clipped contribution over S, at the start of training, on
public prompts; a run's utility at equal ε goes with s (and s already has the critic's share of the
clip norm taken off). V is fitted on the first half of the prompts with the noise that a private run
of this size would release it with; s is measured on the second half, from the products of different
users' contributions. The small public model of ``utility.py``; two responses a prompt.

    python scripts/critic_signal.py
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch

from dprlhf.boundary import Released
from dprlhf.data.loading import load_rows
from dprlhf.data.users import Users
from dprlhf.gradients.micro_batches import user_gradients
from dprlhf.policies.loading import load_policy
from dprlhf.privacy.plan import make_plan
from dprlhf.recipe import Critic as Settings
from dprlhf.recipe import load_recipe
from dprlhf.rewards import Scorer, load_reward
from dprlhf.rewards.private import score_responses
from dprlhf.rollout import sample
from dprlhf.runs.measurements import Result, write_results
from dprlhf.training.evaluate import _PUBLIC_KEY
from dprlhf.updates.critic import Critic
from noise.many_runs import small_policy

ROOT = Path(__file__).resolve().parents[1]
K, HALF = 2, 1000
VARIANTS: dict[str, tuple[float, int | None]] = {
    "no baseline": (1.0, None), "loo": (0.0, None),
    "loo and mean reward": (0.5, 0), "mean reward": (1.0, 0),
    "loo and critic": (0.5, 4), "critic": (1.0, 4),
}  # fmt: skip
"""The weight of r − V(x), and the features that V has (None: V = 0)."""


def signal(contributions: torch.Tensor, share: float) -> tuple[float, float]:
    """Return s and its standard error from twenty groups of users, ``[draws, users, d]``."""
    norms = contributions.norm(dim=2)
    clip = 0.5 * norms[norms > 0].median()
    clipped = contributions * (clip / norms.clamp(min=1e-12)).clamp(max=1)[..., None] / clip

    def square(users: torch.Tensor) -> float:
        c = clipped[:, users]
        total, own = c.sum(1).square().sum(1), c.square().sum((1, 2))
        return float(((total - own) / (len(users) * (len(users) - 1))).mean())

    everyone = torch.arange(clipped.shape[1])
    s2 = square(everyone)
    left = np.array([square(everyone[everyone % 20 != group]) for group in range(20)])
    error = math.sqrt(19 / 20 * ((left - left.mean()) ** 2).sum())
    s = math.sqrt(max(s2, 1e-12))
    return s * math.sqrt(1 - share), error / (2 * s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--policy", type=Path, default=ROOT / "runs/utility/small/reviews-lm")
    parser.add_argument("--results", type=Path, default=ROOT / "docs/results/critic.json")
    options = parser.parse_args()
    small_policy(options.policy)  # made on the first call
    changes = [f"policy.model_name_or_path={options.policy}", "policy.dtype=float32"]
    changes += ["policy.adapter.layers=[0,1,2,3]", "data.limit=2000"]
    changes += ["rollout.max_new_tokens=8", "rollout.batch_size=128", "privacy.epsilon=1"]
    recipe = load_recipe(ROOT / "recipes/imdb_sentiment.yaml", changes)
    assert recipe.evaluation is not None
    plan = make_plan(users=2000, rounds=8, delta=1e-5, epsilon=1.0)
    public = Users(load_rows(recipe.evaluation.data), recipe.evaluation.data)
    prompts = public.select(np.arange(2 * HALF))
    policy = load_policy(recipe.policy)
    scorer = Scorer([load_reward(r) for r in recipe.rewards], recipe.reward_range)
    rewards = np.zeros((options.draws, 2 * HALF, K))
    gradients = torch.zeros(options.draws, 2 * HALF, K, policy.dimension)
    for draw in range(options.draws):
        responses = sample(
            policy, prompts, recipe.rollout, key=_PUBLIC_KEY, context=("critic", draw),
            max_prompt_tokens=recipe.data.max_prompt_tokens,
        )  # fmt: skip
        rewards[draw] = score_responses(scorer, responses).values.reshape(-1, K)
        ones = np.ones(2 * HALF * K)
        for users, parts, _ in user_gradients(policy, responses, ones, batch_size=128, rows=1):
            gradients[draw, users] = parts
    within = rewards.var(2, ddof=1).mean()
    between = np.cov(rewards.mean(2))[np.triu_indices(options.draws, 1)].mean()
    print(f"variance of rewards within a prompt {within:.3f}, of prompts' means {between:.3f}")
    tokens, generator = responses.prompt_tokens, torch.Generator().manual_seed(0)
    random = np.random.default_rng(0)
    results = [
        Result("critic: variance of rewards within a prompt", within, "logit difference²"),
        Result("critic: variance of prompts' mean rewards", between, "logit difference²"),
    ]
    for name, (weight, features) in VARIANTS.items():
        values, share = np.zeros(HALF), 0.0
        if features is not None:
            spec = Settings(features=features)
            share = spec.share
            critic = Critic.from_plan(
                spec, plan, policy, recipe.reward_range, recipe.data.max_prompt_tokens
            )
            critic.fit_features(policy, tokens[:256])
            phi = critic.features(policy, tokens)
            for t in range(1, 5):  # rounds of this size, as a run has them half-way
                chosen = random.choice(HALF, int(plan.expected_batch_size), replace=False)
                seen = rewards[0, chosen].mean(1)
                users, valid = np.arange(len(chosen)), np.ones(len(chosen), dtype=bool)
                mean = torch.from_numpy(critic.of_users(users, seen, valid, phi[chosen]).mean(0))
                noise = torch.randn(len(mean), generator=generator, dtype=mean.dtype)
                noised = mean + plan.noise_std / plan.expected_batch_size * noise
                critic.read(Released(noised, t), t)
            values = critic.values(phi)[HALF:]
        own = rewards[:, HALF:]
        loo = (own - own.mean(2, keepdims=True)) * K / (K - 1)
        advantages = (1 - weight) * loo + weight * (own - values[:, None])
        weighed = torch.from_numpy(advantages).float()[..., None] * gradients[:, HALF:] / K
        off = float(((own.mean((0, 2)) - values) ** 2).mean() - within / (K * options.draws))
        s, error = signal(weighed.sum(2), share)
        print(f"{name:<22} s = {s:.4f} ± {error:.4f}, V off by {off:.3f} (mean square)", flush=True)
        label = f"critic: signal s at equal epsilon, {name}"
        results += [Result(label, s, "1"), Result(f"{label}, standard error", error, "1")]
    write_results(options.results, results)


if __name__ == "__main__":
    main()
