"""Attack the guarantee: audits, membership inference, kills and leaks.

Writes ``docs/results/attack.json`` and ``docs/images/membership.png``. Every part can be stopped
and called again: what ``--cache`` holds is not measured twice. On one slow core the audits take
about half an hour, the kills a quarter of an hour.

    python scripts/attack.py [audits] [membership] [kills] [leaks]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from dprlhf.runs.measurements import Result, write_results

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "results" / "attack.json"
IMAGE = ROOT / "docs" / "images" / "membership.png"
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where an fsync costs nothing
PARTS = ("audits", "membership", "kills", "leaks")


class Cache:
    """Measured values by name, on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.held: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def __contains__(self, name: str) -> bool:
        return name in self.held

    def keep(self, name: str, value: Any) -> None:
        self.held[name] = value
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text(json.dumps(self.held))
        os.replace(fresh, self.path)

    def of(self, part: str) -> dict[str, Any]:
        prefix = f"{part}/"
        return {k.removeprefix(prefix): v for k, v in self.held.items() if k.startswith(prefix)}


# --- one-run audits --------------------------------------------------------------------------

PARTITIONS: list[dict[str, Any]] = [
    {"partition": "random-allocation"},
    {"partition": "fixed"},
    {"partition": "stream"},
    {"partition": "stream", "adjacency": "replace-one"},
    {"partition": "poisson"},
]
EPSILONS = (1.0, 2.0, 4.0, 8.0)
SEEDS = 2
UPDATES = ("pg", "grpo", "ppo", "rebel", "npg")


def audits(cache: Cache, canaries: int, most: int | None) -> None:
    from dprlhf.audit import audit
    from dprlhf.privacy.plan import make_plan
    from dprlhf.recipe import make_recipe

    grid = itertools.product(range(SEEDS), EPSILONS, PARTITIONS, UPDATES)
    for done, (seed, epsilon, partition, update) in enumerate(grid):
        kind = "-".join(partition.values())
        name = f"audits/{update}, {kind}, epsilon {epsilon:g}, seed {seed}"
        if name in cache or (most is not None and done >= most):
            continue
        privacy = {"epsilon": epsilon, "delta": 1e-5, **partition}
        recipe = make_recipe(
            {
                "policy": {"model_name_or_path": "bandit"},
                "data": {"path": "none"},
                "rewards": [{"function": "none"}],
                "update": {"name": update},
                "privacy": privacy,
                "rounds": 4,
            }
        )
        # The noise multiplier of a plan is searched for once, not in every audit.
        key = f"noise/{recipe.update.releases}, {kind}, {epsilon:g}"
        if key not in cache:
            plan = make_plan(
                users=canaries, rounds=4, releases_per_round=recipe.update.releases, **privacy
            )
            cache.keep(key, plan.noise_multiplier)
        stated = recipe.privacy.asking(noise_multiplier=cache.held[key])
        recipe = recipe.model_copy(update={"privacy": stated})
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            found = audit(recipe, f"{folder}/audit", canaries=canaries, seed=seed, quiet=True)
        cache.keep(name, {"bound": found.bound, "epsilon": found.epsilon, "holds": found.holds})
        print(f"{name}: {found.bound:.3f} <= {found.epsilon:.4g}", flush=True)


def audit_results(held: dict[str, Any]) -> list[Result]:
    rows = [
        Result(f"audit: {name}", v["bound"], "epsilon", f"at most {v['epsilon']:.5g}", v["holds"])
        for name, v in held.items()
    ]
    survived = sum(v["holds"] for v in held.values())
    rows.append(
        Result(
            "audits whose lower bound is at most the claim", survived, f"of {len(held)}",
            "all of at least 200", survived == len(held) >= 200,
        )
    )  # fmt: skip
    return rows


# --- membership inference --------------------------------------------------------------------


def membership(cache: Cache) -> None:
    """Tune a tiny model on members, with and without noise, and ask who they were."""
    import torch

    sys.path.insert(0, str(ROOT / "tests"))
    import dprlhf
    from dprlhf import recipe
    from dprlhf.audit import membership_scores
    from dprlhf.data.public import in_memory_prompts
    from dprlhf.rewards import Scorer
    from helpers import tiny

    random = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    prompts = ["".join(random.choice(letters, 10)) for _ in range(120)]

    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        # Something to remember of each prompt: whether its first letter is answered.
        return [3.0 * (p[0] in c) for p, c in zip(prompts, completions, strict=True)]

    for name, epsilon in (("epsilon 8", 8.0), ("no noise", math.inf)):
        if f"membership/{name}" in cache:
            continue
        with tempfile.TemporaryDirectory() as folder:
            model = tiny.model()
            with torch.no_grad():
                model.get_input_embeddings().weight.mul_(5)
            model.save_pretrained(f"{folder}/model")
            tiny.tokenizer().save_pretrained(f"{folder}/model")
            tuned = dprlhf.train(
                model=f"{folder}/model",
                prompts=prompts[:60],
                reward=reward,
                epsilon=epsilon,
                rounds=5,
                privacy__participations=5,
                privacy__partition="random-allocation",
                learning_rate=0.03,
                policy__adapter={"type": "lora", "rank": 8, "target_modules": "all-linear"},
                rollout__responses=8,
                rollout__max_new_tokens=4,
                output_dir=f"{folder}/run",
                quiet=True,
            )
            scores = membership_scores(
                tuned.policy, Scorer([reward], 3.0), in_memory_prompts(prompts),
                recipe.Rollout(max_new_tokens=4), responses=8,
            )  # fmt: skip
        cache.keep(f"membership/{name}", {k: v.tolist() for k, v in scores.items()})


def membership_results(held: dict[str, Any]) -> list[Result]:
    from matplotlib import pyplot as plt

    from dprlhf.audit import roc

    rows = []
    figure, axis = plt.subplots(figsize=(4, 4))
    for name, scores in held.items():
        for kind in ("drift", "reward"):
            values = scores[kind]
            curve = roc(np.array(values[:60]), np.array(values[60:]))
            axis.plot(curve.fpr, curve.tpr, label=f"{name}, {kind}: AUC {curve.auc:.2f}")
            # Sixty of each: the standard error of an AUC of chance is 0.053.
            near = abs(curve.auc - 0.5) < 0.11 if name != "no noise" else None
            goal = "0.39 to 0.61" if near is not None else ""
            rows.append(
                Result(
                    f"membership, two-layer model: {name}, {kind}: AUC", curve.auc, "1", goal, near
                )
            )
    axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    axis.set(xlabel="false positives", ylabel="true positives")
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(IMAGE, dpi=150)
    return rows


# --- kills and leaks -------------------------------------------------------------------------


def kill_cases(number: int) -> list[dict[str, Any]]:
    """Return every named point (renames and writes several times over), and random ones."""
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers import kills

    once = {"run folder made", "recipe written", "ledger opened", "card written", "run ended"}
    cases = []
    for point in kills.POINTS:
        often = range(1, 11) if "rename" in point else [1] if point in once else [1, 2, 3]
        cases += [{"kill": [["point", point, n]]} for n in often]
    named, random = len(cases), np.random.default_rng(0)
    while len(cases) < named + number:
        kind = "time" if (len(cases) - named) % 2 else "call"
        lives = 1 + int(random.random() < 0.3)
        case = {"kill": [[kind, round(float(random.random()), 4)] for _ in range(lives)]}
        if case not in cases:
            cases.append(case)
    return cases


def kills(cache: Cache, number: int, at_once: int = 10) -> None:
    todo = [c for c in kill_cases(number) if f"kills/{json.dumps(c)}" not in cache]
    for start in range(0, len(todo), at_once):
        folder = Path(tempfile.mkdtemp(dir=MEMORY))
        subprocess.run(
            [sys.executable, str(ROOT / "tests/helpers/kills.py"), str(folder)],
            input=json.dumps(todo[start : start + at_once]), text=True, check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        for case, wrong in json.loads((folder / "report.json").read_text()).items():
            cache.keep(f"kills/{case}", wrong)
        shutil.rmtree(folder)


def kill_results(held: dict[str, Any]) -> list[Result]:
    rows = []
    for kind, goal in (("named", "all"), ("random", "all of 200")):
        chosen = {
            case: wrong
            for case, wrong in held.items()
            if (json.loads(case)["kill"][0][0] == "point") == (kind == "named")
        }
        survived = sum(not wrong for wrong in chosen.values())
        enough = len(chosen) >= (200 if kind == "random" else 1)
        rows.append(
            Result(
                f"kills survived, {kind} points", survived, f"of {len(chosen)}", goal,
                survived == len(chosen) and enough,
            )
        )  # fmt: skip
    return rows


def leaks(cache: Cache) -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers import leaks as hunt

    if "leaks/planted" in cache:
        return
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        subprocess.run(
            [sys.executable, str(ROOT / "tests/helpers/leaks.py"), folder], check=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        found = {p.name: hunt.search(p) for p in Path(folder).iterdir() if p.name != "model"}
    planted = [bool(found.pop(name)) for name in hunt.PLANTED]
    cache.keep("leaks/planted", [sum(planted), len(planted)])
    cache.keep("leaks/own", [sum(bool(places) for places in found.values()), len(found)])


def leak_results(held: dict[str, Any]) -> list[Result]:
    (found, planted), (own, runs) = held["planted"], held["own"]
    return [
        Result("leaks planted and found", found, f"of {planted}", "all", found == planted),
        Result("runs with a leak of their own", own, f"of {runs}", "0", own == 0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=PARTS, help=f"of {', '.join(PARTS)}")
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "attack")
    parser.add_argument("--canaries", type=int, default=200)
    parser.add_argument("--kills", type=int, default=200, help="at random moments")
    parser.add_argument("--most", type=int, help="stop after so many audits of the grid")
    given = parser.parse_args()
    run: dict[str, Any] = {
        "audits": lambda cache: audits(cache, given.canaries, given.most),
        "membership": membership,
        "kills": lambda cache: kills(cache, given.kills),
        "leaks": leaks,
    }
    results = {
        "audits": audit_results,
        "membership": membership_results,
        "kills": kill_results,
        "leaks": leak_results,
    }
    for part in given.parts:
        cache = Cache(given.cache / f"{part}.json")
        run[part](cache)
        write_results(OUT, results[part](cache.of(part)))


if __name__ == "__main__":
    main()
