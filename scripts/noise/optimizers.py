"""Compare server-side optimizers under noise, each with its last parameters and with their average.

    python scripts/noise/optimizers.py                  # the table; about half a minute a run
    python scripts/noise/optimizers.py --tuning 'sgd:{"optimizer.learning_rate": 10}'

DP-PG on the demo's task with the small public model of ``scripts/utility.py`` and 1,500 users; half
of the rounds are averaged, and every run is evaluated twice: with its last parameters and with the
average, on the same 1,000 public prompts and draws. The users of the table are the first ones of
the private split. ``--tuning`` takes others, the last 6,000, and writes no results. Finished runs
are kept and read again.

Writes rows to docs/results/noise.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from safetensors.torch import load_file

from dprlhf import train
from dprlhf.data.public import evaluated, public_users
from dprlhf.recipe import load_recipe
from dprlhf.rewards import Scorer, load_reward
from dprlhf.runs.measurements import Result, write_results
from dprlhf.training.evaluate import evaluate
from noise.many_runs import ROOT, SMALL, overrides_of, small_policy

RECIPE = ROOT / "recipes" / "imdb_sentiment.yaml"
USERS, PRIVATE, TUNING = 1500, 23_000, 6000
COMMON: dict[str, Any] = {
    **SMALL,
    "rollout.responses": 2,
    "update.clip_norm": 0.7,
    "data.limit": USERS,
    "optimizer.average": {"tail": 0.5},
}
METHODS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer.name": "adam", "optimizer.learning_rate": 1.0},
    "normalized-sgd": {
        "optimizer.name": "normalized-sgd",
        "optimizer.momentum": 0.6,
        "optimizer.learning_rate": 4.0,
    },
    "sgd with momentum": {
        "optimizer.name": "sgd",
        "optimizer.momentum": 0.6,
        "optimizer.learning_rate": 30.0,
    },
    "adam-corrected": {"optimizer.name": "adam-corrected", "optimizer.learning_rate": 0.25},
    "normalized-sgd, clip norm at the median": {
        "optimizer.name": "normalized-sgd",
        "optimizer.momentum": 0.6,
        "optimizer.learning_rate": 4.0,
        "update.clip_norm": {"quantile": 0.5, "initial": 0.7},
    },
}
"""Settings by method. Learning rates were chosen at ε = 1 on the users for tuning."""


def run(folder: Path, settings: dict[str, Any]) -> dict[str, float]:
    """Train or read one run; return the rise of the public reward, last and averaged."""
    summary = folder.with_suffix(".json")
    if summary.exists():
        found: dict[str, float] = json.loads(summary.read_text())
        return found
    torch.set_num_threads(1)
    overrides = overrides_of(settings)
    result = train(RECIPE, overrides=overrides, output_dir=folder, quiet=True)
    recipe = load_recipe(folder / "recipe.yaml")
    assert result.before and result.after and recipe.evaluation  # noqa: PT018
    prompts = evaluated(recipe, public_users(recipe, None))
    assert prompts is not None
    result.policy.load_state(load_file(folder / "checkpoint" / "policy.safetensors"))
    last = evaluate(
        result.policy,
        Scorer([load_reward(r) for r in recipe.rewards], recipe.reward_range),
        prompts,
        recipe.rollout,
        seed=recipe.seed,
        max_prompt_tokens=recipe.evaluation.data.max_prompt_tokens,
    )
    before = result.before.mean
    found = {"last": last.estimate.mean - before, "average": result.after.mean - before}
    summary.write_text(json.dumps(found))
    return found


def rows(method: str, epsilon: float, found: list[dict[str, float]]) -> Iterator[Result]:
    """Yield the rises of a method's seeds, and what the average changes in the same run."""
    name = f"optimizers (small, {USERS} users): {method}, epsilon {epsilon:g}"
    of = {key: np.array([f[key] for f in found]) for key in ("last", "average")}
    yield Result(f"{name}: seeds", len(found), "1")
    columns = {
        "rise of the reward": of["last"],
        "rise with the average of the last half of the rounds": of["average"],
        "what the average changes": of["average"] - of["last"],
    }
    for label, values in columns.items():
        yield Result(f"{name}: {label}", float(values.mean()), "logit difference")
        if len(values) > 1:
            error = float(values.std(ddof=1) / np.sqrt(len(values)))
            yield Result(f"{name}: {label}, its standard error", error, "logit difference")


def main() -> None:
    """Run what is missing, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 0.3])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--runs", type=Path, default=Path("runs/optimizers"))
    parser.add_argument("--policy", type=Path, help="where the small model is, or shall be")
    parser.add_argument("--results", type=Path, default=ROOT / "docs/results/noise.json")
    parser.add_argument("--tuning", nargs="+", metavar="METHOD:JSON", help="settings to try")
    options = parser.parse_args()
    policy = small_policy(options.policy or options.runs / "reviews-lm")
    options.runs.mkdir(parents=True, exist_ok=True)
    for word in options.tuning or []:
        method, _, changes = word.partition(":")
        tried = METHODS[method] | json.loads(changes)
        place = options.runs / f"tuning-{method}-{changes}".translate(_PLAIN)
        users = {"data.skip": PRIVATE - TUNING, "privacy.epsilon": 1.0, "seed": 100}
        print(word, run(place, {**COMMON, **policy, **tried, **users}), flush=True)
    if options.tuning:
        return
    for epsilon in options.epsilons:
        found: dict[str, list[dict[str, float]]] = {method: [] for method in options.methods}
        for seed in range(options.seeds):
            for method in options.methods:
                place = options.runs / f"{method}-{epsilon:g}-{seed}".translate(_PLAIN)
                users = {"data.skip": seed * USERS, "privacy.epsilon": epsilon, "seed": seed}
                settings = {**COMMON, **policy, **METHODS[method], **users}
                found[method].append(run(place, settings))
                print(method, epsilon, seed, found[method][-1], flush=True)
        for method, figures in found.items():
            write_results(options.results, list(rows(method, epsilon, figures)))


_PLAIN = str.maketrans(' "{}:,.', "_______")

if __name__ == "__main__":
    main()
