"""Compare settings found on public prompts with those found by hand: private runs, several seeds.

    python scripts/noise/tune.py --policy runs/reviews-lm              # about 15 minutes on a core

The start is the demo's recipe on the small public model, with the demo's learning rate and clip
norm, which were chosen for another model. ``dprlhf tune`` changes them on public prompts that stand
in for users; the settings by hand are those of scripts/utility.py, found with private runs on other
seeds. All three then train on the same private users. A call that was interrupted is continued by
the same call. Writes docs/results/noise.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from dprlhf.recipe import load_recipe
from dprlhf.runs.measurements import Result, write_results
from noise.many_runs import ROOT, SMALL, Job, overrides_of, run_all, small_policy

GOAL = 0.97
RECIPE = "imdb_sentiment"
SCORED = 400
"""Public prompts that score a trial: single rewards of words spread widely, and cost nothing."""

KEYS = ["optimizer.learning_rate", "update.clip_norm"]
BY_HAND = {"optimizer.learning_rate": 0.5, "update.clip_norm": 0.7}
"""What scripts/utility.py has for this model: looked for at ε = 1, on other seeds."""


def found(settings: dict[str, Any], folder: Path, minutes: float) -> dict[str, Any]:
    """Search on public prompts, or read what an earlier call found."""
    from dprlhf.training.build import hush_libraries
    from dprlhf.tuning.evidence import header, write_tuned
    from dprlhf.tuning.public_rows import public_rows
    from dprlhf.tuning.search import Search

    kept = folder / "tuned.json"
    if kept.exists():
        known: dict[str, Any] = json.loads(kept.read_text())
        return known
    hush_libraries()
    source = ROOT / "recipes" / f"{RECIPE}.yaml"
    overrides = overrides_of(settings)
    recipe = load_recipe(source, overrides)
    public = public_rows(recipe, scored=SCORED)
    search = Search(recipe, public, KEYS, folder / "tuned.trials", minutes=minutes)
    search.run(lambda line: print(line, flush=True))
    tuned = search.result()
    write_tuned(tuned, source, overrides, folder / "tuned.yaml")
    print(header(tuned), flush=True)
    kept.write_text(json.dumps(tuned.best.changes))
    return tuned.best.changes


def rows_of(rises: dict[str, list[float]], name: str) -> list[Result]:
    """Return the rows of the comparison: the rise of each recipe, and the ratio."""
    means = {kind: float(np.mean(values)) for kind, values in rises.items()}
    rows = []
    for kind, values in rises.items():
        rows.append(Result(f"{name}: {kind}: rise of the public reward", means[kind], "logit"))
        if len(values) > 1:
            error = float(np.std(values, ddof=1) / len(values) ** 0.5)
            rows.append(
                Result(
                    f"{name}: {kind}: its standard error over {len(values)} seeds", error, "logit"
                )
            )
    ratio = means["tuned on public prompts"] / means["set by hand on private runs"]
    goal = f"at least {GOAL}"
    rows.append(
        Result(f"{name}: tuned on public prompts over set by hand", ratio, "1", goal, ratio >= GOAL)
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--users", type=int, default=1500)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--minutes", type=float, default=8.0, help="time of the search")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--runs", type=Path, default=Path("runs/tune"))
    parser.add_argument("--policy", type=Path, help="where the small model is, or shall be")
    parser.add_argument("--results", type=Path, default=ROOT / "docs/results/noise.json")
    options = parser.parse_args()
    folder = options.runs / f"{options.users}-users-epsilon-{options.epsilon:g}"
    folder.mkdir(parents=True, exist_ok=True)
    small = {key: value for key, value in SMALL.items() if key not in KEYS}
    start = {
        **small,
        **small_policy((options.policy or options.runs / "reviews-lm").absolute()),
        "data.limit": options.users,
        "evaluation.prompts": 600,
        "privacy.epsilon": options.epsilon,
    }
    settings = {
        "tuned on public prompts": found(start, folder, options.minutes),
        "set by hand on private runs": BY_HAND,
        "as for another model": {},
    }
    jobs = {
        (kind, seed): Job(
            f"{kind.replace(' ', '-')}-{seed}",
            RECIPE,
            overrides_of({**start, **changes, "seed": 100 + seed}),
        )
        for seed in range(options.seeds)
        for kind, changes in settings.items()
    }
    done = run_all(jobs.values(), folder, side_by_side=options.jobs)
    rises: dict[str, list[float]] = {kind: [] for kind in settings}
    for (kind, _), job in jobs.items():
        rises[kind].append(done[job.file]["rise"])
    name = f"tuning, small model, {options.users} users, epsilon {options.epsilon:g}"
    rows = rows_of(rises, name)
    write_results(options.results, rows)
    for row in rows:
        print(f"{row.name}: {row.value:.4g} {row.unit} ({row.goal or 'no goal'})", flush=True)


if __name__ == "__main__":
    main()
