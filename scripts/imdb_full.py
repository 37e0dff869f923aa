"""Run recipes/imdb_full.yaml at several ε and without noise and clipping, and keep the figures.

An interrupted call is continued by the same call: finished runs are read, started ones resumed.

    python scripts/imdb_full.py --epsilon 4 1            # all 23,000 users: hours on 2 cores
    python scripts/imdb_full.py --epsilon 4 1 --limit 3000
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dprlhf import resume, train
from dprlhf.runs.measurements import Result, write_results

RECIPE = Path(__file__).parent.parent / "recipes" / "imdb_full.yaml"
BASELINE = ["privacy.epsilon=.inf", "update.clip_norm=.inf"]


def run(name: str, overrides: list[str], folder: Path) -> dict[str, float]:
    """Train, resume or read one run; return its figures."""
    place = folder / name
    summary = folder / f"{name}.json"
    if summary.exists():
        return json.loads(summary.read_text())
    result = (
        resume(place) if place.exists() else train(RECIPE, overrides=overrides, output_dir=place)
    )
    assert result.before
    assert result.after
    assert result.difference
    figures = {
        "before": result.before.mean,
        "after": result.after.mean,
        "after_se": result.after.standard_error,
        "rise": result.difference.mean,
        "rise_se": result.difference.standard_error,
        "epsilon": result.plan.guarantee.epsilon,
        "users": result.plan.users,
    }
    summary.write_text(json.dumps(figures))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epsilon", type=float, nargs="+", default=[4.0, 1.0])
    parser.add_argument("--limit", type=int, help="use only so many of the users")
    parser.add_argument("--runs", type=Path, default=Path("runs/imdb_full"))
    parser.add_argument("--results", type=Path, default=Path("docs/results/imdb_full.json"))
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    limit = [f"data.limit={options.limit}"] if options.limit else []
    plain = None
    for epsilon in [*sorted(options.epsilon, reverse=True), None]:
        name = "no-privacy" if epsilon is None else f"epsilon-{epsilon:g}"
        overrides = BASELINE if epsilon is None else [f"privacy.epsilon={epsilon:g}"]
        figures = run(name, [*overrides, *limit], options.runs)
        label = f"imdb_full {figures['users']} users, {name}"
        rows = [
            Result(f"{label}: reward before", figures["before"], "logit difference"),
            Result(f"{label}: reward after", figures["after"], "logit difference"),
            Result(f"{label}: standard error after", figures["after_se"], "logit difference"),
            Result(f"{label}: standard error of the rise", figures["rise_se"], "logit difference"),
            Result(
                f"{label}: rise",
                figures["rise"],
                "logit difference",
                "at least 5 standard errors",
                figures["rise"] >= 5 * figures["rise_se"],
            ),
        ]
        write_results(options.results, rows)
        plain = figures if epsilon is None else plain
    assert plain is not None
    for epsilon in options.epsilon:
        figures = run(f"epsilon-{epsilon:g}", [], options.runs)
        label = f"imdb_full {figures['users']} users, epsilon-{epsilon:g}"
        share = figures["rise"] / plain["rise"]
        goal = "at least 0.95 at epsilon 1" if epsilon == 1 else ""
        row = Result(
            f"{label}: share of the non-private rise kept",
            share,
            "1",
            goal,
            share >= 0.95 if goal else None,
        )
        write_results(options.results, [row])


if __name__ == "__main__":
    main()
