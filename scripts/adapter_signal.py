"""Rank adapters before any run: how much users' clipped gradients agree, per √dimension.

The signal s is the norm of the mean clipped contribution over S, at the start of training, on
public prompts; the noise grows with √d, so s/√d ranks adapters at equal ε. s² is estimated without
bias from the products of different users' contributions.

    python scripts/adapter_signal.py --users 512
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from dprlhf.data.loading import load_rows
from dprlhf.data.users import Users
from dprlhf.gradients.micro_batches import user_gradients
from dprlhf.policies.activations import align_with_activations
from dprlhf.policies.loading import load_policy
from dprlhf.recipe import Adapter, load_recipe
from dprlhf.rewards import Scorer, load_reward
from dprlhf.rewards.private import score_responses
from dprlhf.rollout import sample
from dprlhf.runs.measurements import Result, write_results
from dprlhf.training.evaluate import _PUBLIC_KEY
from dprlhf.updates.baselines import loo

RECIPE = Path(__file__).parent.parent / "recipes" / "imdb_sentiment.yaml"
ALL = list(range(30))
ADAPTERS = {
    "q and v, all layers, random A": (["q_proj", "v_proj"], ALL, "random"),
    "v, layers 20 to 29, random A": (["v_proj"], ALL[20:], "random"),
    "v, layers 20 to 29, A from public activations": (["v_proj"], ALL[20:], "public"),
    "v, layers 16 to 23, A from public activations": (["v_proj"], ALL[16:24], "public"),
    "o, layers 16 to 23, A from public activations": (["o_proj"], ALL[16:24], "public"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--users", type=int, default=512)
    parser.add_argument("--results", type=Path, default=Path("docs/results/adapters.json"))
    options = parser.parse_args()
    recipe = load_recipe(RECIPE)
    assert recipe.evaluation is not None
    public = Users(load_rows(recipe.evaluation.data), recipe.evaluation.data)
    prompts = public.select(np.arange(options.users))
    scorer = Scorer([load_reward(r) for r in recipe.rewards], recipe.reward_range)
    responses, weights = None, np.empty(0)
    for name, (modules, layers, init) in ADAPTERS.items():
        adapter = Adapter(type="ffa-lora", target_modules=modules, layers=layers)
        policy = load_policy(recipe.policy.model_copy(update={"adapter": adapter}))
        if responses is None:  # B starts at zero: all adapters start from the same policy
            responses = sample(
                policy, prompts, recipe.rollout, key=_PUBLIC_KEY, context=("signal",),
                max_prompt_tokens=recipe.data.max_prompt_tokens,
            )  # fmt: skip
            rewards = score_responses(scorer, responses).values.reshape(-1, 2)
            weights = loo(rewards, responses.from_base[:2]).ravel() / 2
        if init == "public":
            align_with_activations(policy, responses.tokens[-64:], responses.mask[-64:], 32)
        gradients = torch.zeros(options.users, policy.dimension)
        for users, parts, _ in user_gradients(policy, responses, weights, batch_size=32, rows=2):
            gradients[users] = parts[:, 0]
        norms = gradients.norm(dim=1)
        clip = 0.5 * norms.median()
        clipped = gradients * (clip / norms.clamp(min=1e-12)).clamp(max=1)[:, None] / clip
        total, own = clipped.sum(0).square().sum(), clipped.square().sum()
        square = float((total - own) / (options.users * (options.users - 1)))
        s = max(square, 0.0) ** 0.5
        print(f"{name:<48} d = {policy.dimension:>6}  s = {s:.4f}", flush=True)
        row = Result(f"{name}: 1000 s/√d", 1000 * s / policy.dimension**0.5, "1")
        write_results(options.results, [row])


if __name__ == "__main__":
    main()
