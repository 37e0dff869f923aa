"""Compare all updates, adapters and noises on the IMDB task: what share of the gain privacy keeps.

    python scripts/utility.py --small --jobs 2    # a small public model and reward, on 2 cores
    python scripts/utility.py --users 1500        # SmolLM2-135M, the recipes as they are
    python scripts/utility.py --jobs 10           # SmolLM2-135M and all 23,000 users: for a GPU

Every run is one of the recipes of the IMDB task with the same users; a seed draws what is public
(the adapter's start, the evaluation), the noise and the rounds of the users are fresh in each run.
An interrupted call is continued by the same call: finished runs are read, started ones resumed.

Writes docs/results/utility.json, and the table and the plot beside it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dprlhf.runs.measurements import Result, command, write_results
from noise.many_runs import SMALL, Job, overrides_of, run_all, small_policy

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
EPSILONS = [1.0, 2.0, 4.0, 8.0, None]
OF_MANY = [0.1, 0.3, 1.0, 4.0, None]  # with all users, from 1 on nothing is lost any more
GOAL = 0.95

UPDATES = {
    "pg": "imdb_sentiment", "grpo": "imdb_grpo", "ppo": "imdb_ppo", "rebel": "imdb_rebel",
    "npg": "imdb_npg",
}  # fmt: skip
"""Each update's recipe."""

UNCLIPPED = ("pg", "grpo", "rebel")
"""Where the clip norm is not part of the algorithm, the baseline goes without it."""

FULL = {
    "data.limit": None, "rounds": 16, "evaluation.prompts": 512, "rollout.batch_size": 3200,
    "rollout.cuda_graphs": True, "update.batch_size": 1600, "rewards.0.batch_size": 1600,
}  # fmt: skip
EVALUATION_PROMPTS = 256  # where --users says how many users there are; the rest is the recipe's


@dataclass(frozen=True)
class Case:
    """One run: where it stands in the table, and what it changes in which recipe."""

    part: str
    name: str
    epsilon: float | None
    seed: int
    recipe: str
    overrides: tuple[str, ...]

    @property
    def job(self) -> Job:
        epsilon = "none" if self.epsilon is None else f"{self.epsilon:g}"
        file = f"{self.part}-{self.name}-epsilon-{epsilon}-seed-{self.seed}"
        return Job(file, self.recipe, self.overrides)


def cases(
    parts: list[str],
    epsilons: list[float | None],
    seeds: int,
    size: dict[str, Any],
    small: dict[str, Any] | None,
) -> Iterator[Case]:
    """List the runs, the most wanted ones first."""
    for seed in range(seeds):
        for part in parts:
            for name, recipe, changes in PARTS[part](small):
                for epsilon in epsilons if part == "updates" else [1.0, None]:
                    baseline = {"privacy.epsilon": ".inf"}
                    if name in UNCLIPPED or part in ("adapters", "critic"):
                        baseline["update.clip_norm"] = ".inf"
                    privacy = baseline if epsilon is None else {"privacy.epsilon": epsilon}
                    settings = {**size, **changes, **privacy, "seed": seed}
                    yield Case(part, name, epsilon, seed, recipe, overrides_of(settings))


def of_updates(small: dict[str, Any] | None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name, recipe in UPDATES.items():
        yield name, recipe, {**(small or {}), **(TUNED_SMALL[name] if small else {})}


def of_adapters(small: dict[str, Any] | None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """DP-PG with each adapter; all settings but the adapter are those of the update's row."""
    base = {**(small or {}), **(TUNED_SMALL["pg"] if small else {})}
    layers = {} if small is None else {"policy.adapter.layers": "null"}
    for name, changes in ADAPTERS.items():
        adapter = {f"policy.adapter.{key}": value for key, value in changes.items()}
        if changes["type"] not in ("lora", "ffa-lora"):
            adapter["policy.adapter.init"] = "random"
        yield name, UPDATES["pg"], {**base, **layers, **adapter}


def of_noise(small: dict[str, Any] | None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """DP-PG with independent noise on random allocation and on disjoint batches, and correlated."""
    base = {**(small or {}), **(TUNED_SMALL["pg"] if small else {})}
    for optimizer in ("adam", "sgd"):
        for name, changes in NOISES.items():
            rate = {} if optimizer == "adam" else {"optimizer.learning_rate": SGD_RATE}
            settings = {"optimizer.name": optimizer, **rate, **changes}
            yield f"{name}, {optimizer}", UPDATES["pg"], {**base, **settings}


def of_critic(small: dict[str, Any] | None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """DP-PG at two responses a prompt, whose advantages have a part of r − V(x), or have none."""
    base = {**(small or {}), **(TUNED_SMALL["pg"] if small else {}), "rollout.responses": 2}
    for name, changes in CRITICS.items():
        critic = {f"update.critic.{key}": value for key, value in changes.items()}
        yield name, UPDATES["pg"], {**base, **critic}


PARTS = {"updates": of_updates, "adapters": of_adapters, "noise": of_noise, "critic": of_critic}

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora r=4": {"type": "lora", "rank": 4, "alpha": 4},
    "lora-b r=4": {"type": "ffa-lora", "rank": 4, "alpha": 4},
    "lora-b r=1": {"type": "ffa-lora", "rank": 1},
    "lora-xs r=8": {"type": "lora-xs", "rank": 8, "alpha": 8},
    "vera r=64": {"type": "vera", "rank": 64},
    "ia3": {"type": "ia3", "target_modules": "null"},
    "norms": {"type": "norms", "target_modules": "null"},
    "biases": {"type": "biases"},
}
NOISES: dict[str, dict[str, Any]] = {
    "random allocation": {},
    "disjoint batches": {"privacy.partition": "fixed"},
    "disjoint batches, 4 bands": {"privacy.partition": "fixed", "privacy.bands": 4},
    "disjoint batches, all bands": {"privacy.partition": "fixed", "privacy.bands": 1000},
}
CRITICS: dict[str, dict[str, Any]] = {
    "loo": {},
    "loo and mean reward": {"features": 0, "weight": 0.5},
    "loo and critic": {"features": 4, "weight": 0.5},
    "mean reward": {"features": 0, "weight": 1.0},
    "critic": {"features": 4, "weight": 1.0},
}
SGD_RATE = 1.0
TUNED_SMALL: dict[str, dict[str, Any]] = {
    "pg": {"update.clip_norm": 0.7},
    "grpo": {"update.clip_norm": 0.7},
    "ppo": {"update.clip_norm": 0.7},
    # A second step on the same loss goes back: with this learning rate the first overshoots.
    "rebel": {"update.clip_norm": 0.7, "update.steps": 1},
    "npg": {},
}
"""Looked for at ε = 1, mostly with pg and on other seeds. REBEL's one step was chosen after its
first runs with two, on seed 0, which were thrown away."""


def table(done: dict[Case, dict[str, Any]], part: str, size: str) -> tuple[list[Result], str]:
    """Summarise a part: result rows, and a Markdown table."""
    names = list(dict.fromkeys(c.name for c in done if c.part == part))
    rises = {
        (name, epsilon): np.array(
            [
                f["rise"]
                for c, f in done.items()
                if (c.part, c.name, c.epsilon) == (part, name, epsilon)
            ]
        )
        for name in names
        for epsilon in sorted({c.epsilon for c in done}, key=_largest_last)
    }
    rises = {key: values for key, values in rises.items() if len(values)}
    plain = [values.mean() for (_, epsilon), values in rises.items() if epsilon is None]
    if not plain:
        return [], ""
    best = max(plain)
    results, lines = [], []
    epsilons = list(dict.fromkeys(e for _, e in sorted(rises, key=lambda k: _largest_last(k[1]))))
    head = ["d", *("no privacy" if e is None else f"ε = {e:g}" for e in epsilons)]
    lines.append(f"| {part} | " + " | ".join(head) + " |")
    lines.append("|---" * (len(head) + 1) + "|")
    for name in names:
        dimension = next(
            f["dimension"] for c, f in done.items() if (c.part, c.name) == (part, name)
        )
        cells = [f"{dimension:,.0f}"]
        for epsilon in epsilons:
            values = rises.get((name, epsilon))
            if values is None:
                cells.append("")
                continue
            label = f"{part}, {name}, {'no privacy' if epsilon is None else f'epsilon {epsilon:g}'}"
            label = f"utility ({size}): {label}"
            cell = f"{values.mean():.2f}"
            if len(values) > 1:
                error = values.std(ddof=1) / np.sqrt(len(values))
                cell += f" ± {error:.2f}"
                results.append(
                    Result(f"{label}: its standard error over seeds", error, "logit difference")
                )
            cells.append(f"{cell} ({values.mean() / best:.0%})")
            results += [
                Result(f"{label}: rise of the reward", values.mean(), "logit difference"),
                Result(f"{label}: seeds", len(values), "1"),
                Result(f"{label}: share of the best non-private rise", values.mean() / best, "1"),
            ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if part == "updates":
        shares = {n: rises[n, 1.0].mean() / best for n in names if (n, 1.0) in rises}
        if shares:
            top = max(shares, key=lambda name: shares[name])
            name = f"utility ({size}): share of the best non-private rise at epsilon 1, best update"
            reached = float(shares[top])
            results.append(
                Result(f"{name} ({top})", reached, "1", f"at least {GOAL}", reached >= GOAL)
            )
    return results, "\n".join(lines)


def _largest_last(epsilon: float | None) -> float:
    return math.inf if epsilon is None else epsilon


def plot(done: dict[Case, dict[str, Any]], picture: Path) -> None:
    """Draw the rise against ε for each update, with standard errors over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    finite = sorted({c.epsilon for c in done if c.epsilon is not None})
    for name in UPDATES:
        points = []
        for place, epsilon in enumerate([*finite, None]):
            key = ("updates", name, epsilon)
            values = [f["rise"] for c, f in done.items() if (c.part, c.name, c.epsilon) == key]
            if values:
                error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0.0
                points.append((place, np.mean(values), error))
        if points:
            x, y, error = zip(*points, strict=True)
            axes.errorbar(x, y, yerr=error, marker="o", capsize=3, label=name)
    axes.set_xticks(range(len(finite) + 1), [*(f"{e:g}" for e in finite), "no privacy"])
    axes.set_xlabel("ε")
    axes.set_ylabel("rise of the reward on held-out public prompts")
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--small", action="store_true", help="a small public model and reward, 6,000 users"
    )
    sizes.add_argument("--users", type=int, help="so many, and the recipes' own rounds")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--epsilons", nargs="+", type=lambda e: None if e == "none" else float(e))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--runs", type=Path, default=Path("runs/utility"))
    parser.add_argument("--policy", type=Path, help="where the small model is, or shall be")
    parser.add_argument("--results", type=Path, default=RESULTS / "utility.json")
    parser.add_argument("--write-only", action="store_true", help="write what is finished")
    options = parser.parse_args()
    if options.small:
        size, settings = "small", SMALL
    elif options.users:
        size = f"{options.users}-users"
        settings = {"data.limit": options.users, "evaluation.prompts": EVALUATION_PROMPTS}
    else:
        size, settings = "full", FULL
    epsilons = options.epsilons or (OF_MANY if size == "full" else EPSILONS)
    folder = options.runs / size
    folder.mkdir(parents=True, exist_ok=True)
    small = small_policy(options.policy or folder / "reviews-lm") if options.small else None
    todo = list(cases(options.parts, epsilons, options.seeds, settings, small))
    figures = run_all(
        [case.job for case in todo],
        folder,
        side_by_side=options.jobs,
        write_only=options.write_only,
    )
    done = {case: figures[case.job.file] for case in todo if case.job.file in figures}
    text = [f"# Utility ({size})", "", f"`{command()}`", ""]
    text += ["Rise of the mean reward on held-out public prompts, ± standard error over seeds, and"]
    text += ["in brackets its share of the best rise without privacy.", ""]
    for part in options.parts:
        results, lines = table(done, part, size)
        write_results(options.results, results)
        text += [lines, ""]
    (options.results.parent / f"utility-{size}.md").write_text("\n".join(text))
    if "updates" in options.parts and len(epsilons) > 2:
        plot(done, options.results.parent / f"utility-{size}.png")
    print("\n".join(text))


if __name__ == "__main__":
    sys.exit(main())
