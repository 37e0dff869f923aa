"""How well the reward of a private run is predicted before it: ten plans that it was not fitted to.

Pilot runs on public prompts give the constants of the formula (``dprlhf plan --pilot``). Then ten
plans, drawn once at random, run on private users that are in no other table: rows 9,000 and up of
IMDB's private split, with the small model and the word reward of ``scripts/utility.py --small``.
Predictions follow from the pilots and the public probe alone. A plan's result is the mean of its
runs, each with its own secret rounds and noise.

Writes rows to ``docs/results/noise.json``. About 20 minutes on one core; an interrupted call is
continued by the same call.

    PYTHONPATH=scripts python -m scripts.noise.planner
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch

from dprlhf import train
from dprlhf.data.public import evaluated, public_users
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.recipe import Recipe, load_recipe
from dprlhf.rewards import Scorer, load_reward
from dprlhf.training.choices import Candidate
from dprlhf.training.evaluate import evaluate
from dprlhf.training.planner import with_choice
from dprlhf.tuning.pilots import pilots_of
from dprlhf.tuning.public_rows import public_rows
from dprlhf.tuning.stand_in import run_stand_ins
from reviews_lm import train as train_language_model

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "results" / "noise.json"
SETTINGS = {
    "data.skip": 9000, "data.limit": 1000, "rounds": 8, "privacy.epsilon": 2,
    "rollout.responses": 4, "rollout.max_new_tokens": 8, "rollout.batch_size": 256,
    "update.batch_size": 256, "update.clip_norm": 0.7, "evaluation.prompts": 1000,
    "policy.dtype": "float32", "policy.adapter.layers": [2, 3],
    "optimizer.name": "normalized-sgd", "optimizer.momentum": 0.6, "optimizer.learning_rate": 4,
    "rewards": [{"function": f"{ROOT / 'scripts' / 'word_sentiment.py'}:reward"}],
}  # fmt: skip
SCORED = 500
FURTHER_DRAWS = 2
PLANS, MOST_RESPONSES = 10, 6000
SHARE, WANTED = 0.1, 8


def held_out() -> list[tuple[int, float, Candidate]]:
    """Return the held-out plans: users, ε and settings, drawn once with a fixed seed."""
    random = np.random.default_rng(18)
    drawn: list[tuple[int, float, Candidate]] = []
    while len(drawn) < PLANS:
        users = int(random.choice([600, 1000, 1500]))
        epsilon = float(random.choice([1, 2, 4, 8]))
        rounds = int(random.choice([4, 6, 8, 12, 16]))
        passes = int(random.choice([1, 1, 2]))
        responses = int(random.choice([2, 4]))
        partition = str(random.choice(["random-allocation"] * 3 + ["fixed"]))
        bands = 1
        if partition == "fixed":
            passes, bands = 1, int(random.choice([4, rounds]))
        plan = (users, epsilon, Candidate(partition, rounds, passes, bands, responses))
        fits = rounds % passes == 0 and users * passes * responses <= MOST_RESPONSES
        if fits and plan not in drawn:
            drawn.append(plan)
    return drawn


def base_recipe(policy: Path) -> Recipe:
    """Return the recipe that pilots vary and that the held-out plans change."""
    if not (policy / "config.json").exists():
        train_language_model(policy, epochs=6)
    settings = {**SETTINGS, "policy.model_name_or_path": str(policy)}
    return load_recipe(
        ROOT / "recipes" / "imdb_demo.yaml",
        [f"{key}={v if isinstance(v, str) else json.dumps(v)}" for key, v in settings.items()],
    )


def of_plan(recipe: Recipe, users: int, epsilon: float, candidate: Candidate) -> Recipe:
    """Return the recipe of a held-out plan."""
    data = recipe.data.model_copy(update={"limit": users})
    privacy = recipe.privacy.model_copy(update={"epsilon": epsilon})
    changed = recipe.model_copy(update={"data": data, "privacy": privacy})
    return with_choice(changed, candidate)


def pilots(recipe: Recipe, folder: Path, repeats: int) -> list[dict[str, Any]]:
    """Run the pilots, or read those that are finished."""
    found = []
    for repeat in range(repeats):
        for number, (name, variant) in enumerate(pilots_of(recipe).items()):
            file = folder / f"pilot-{number}-{repeat}.json"
            if not file.exists():
                public = public_rows(variant, scored=SCORED)
                every = max(1, variant.rounds // 4)
                done = run_stand_ins(variant, public, every=every, seed=number + 10 * repeat)
                kept = {"name": name, "curve": done.curve, "rise": done.rise.mean}
                file.write_text(json.dumps({**kept, "seconds": done.seconds}))
            found.append(json.loads(file.read_text()))
            print(f"pilot, {name}: rise {found[-1]['rise']:.3f}", flush=True)
    return found


def run(recipe: Recipe, place: Path) -> float:
    """Return the rise of a private run's reward, over several draws; make the run if need be."""
    summary = place.with_suffix(".json")
    if not summary.exists():
        shutil.rmtree(place, ignore_errors=True)
        result = train(recipe, output_dir=place, quiet=True)
        assert result.difference is not None
        rises = [result.difference.mean, *further_draws(recipe, result.policy)]
        summary.write_text(json.dumps({"rise": float(np.mean(rises)), "draws": rises}))
    return float(json.loads(summary.read_text())["rise"])


def further_draws(recipe: Recipe, policy: CausalLMPolicy) -> list[float]:
    """Return the rise on the same public prompts, with other draws of the continuations."""
    prompts = evaluated(recipe, public_users(recipe, None))
    assert prompts is not None
    assert recipe.evaluation is not None
    scorer = Scorer([load_reward(r) for r in recipe.rewards], recipe.reward_range)
    longest = recipe.evaluation.data.max_prompt_tokens
    rises = []
    for seed in range(100, 100 + FURTHER_DRAWS):
        before, after = (
            evaluate(
                policy, scorer, prompts, recipe.rollout,
                seed=seed, max_prompt_tokens=longest, base=base,
            )
            for base in (True, False)
        )  # fmt: skip
        rises.append(float((after.rewards - before.rewards).mean()))
    return rises


def main() -> None:
    """Run what is missing, predict, compare and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/noise-planner"))
    parser.add_argument("--policy", type=Path, help="where the small model is, or shall be")
    parser.add_argument("--seeds", type=int, default=3, help="private runs of each plan")
    parser.add_argument("--repeats", type=int, default=2, help="pilot runs of each kind")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.runs
    folder.mkdir(parents=True, exist_ok=True)
    recipe = base_recipe(options.policy or folder / "reviews-lm")
    pilots(recipe, folder, options.repeats)
    plans = held_out()
    for seed in range(options.seeds):
        for number, plan in enumerate(plans):
            of_run = of_plan(recipe, *plan)
            print(seed, plan, run(of_run, folder / f"plan-{number}-{seed}"), flush=True)


if __name__ == "__main__":
    main()
