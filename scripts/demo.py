"""Run the demo (recipes/imdb_sentiment.yaml), print what it shows, and keep the figures.

make demo
python scripts/demo.py --results docs/results/demo.json --started 1700000000
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from dprlhf import train
from dprlhf.assets import path
from dprlhf.cli.output import show
from dprlhf.runs.measurements import Result, write_results

RECIPE = Path(__file__).parent.parent / "recipes" / "imdb_sentiment.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, help="write the figures here")
    parser.add_argument(
        "--started", type=float, help="when 'make demo' started, seconds since 1970"
    )
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    options = parser.parse_args()
    began = time.time()
    result = train(RECIPE, overrides=options.overrides)
    show(result)
    accuracy = json.loads((path("sentiment-minilm") / "metrics.json").read_text())["accuracy"]
    print(f"accuracy of the reward model on held-out sentences: {accuracy:.3f}")
    print(f"seconds for tuning and evaluation: {time.time() - began:.0f}")
    if options.results is None:
        return
    before, after, rise = result.before, result.after, result.difference
    assert before
    assert after
    assert rise
    unit = "logit difference"
    rows = [
        Result("demo: epsilon (delta 1e-5)", result.plan.guarantee.epsilon, "1", "at most 8",
               result.plan.guarantee.epsilon <= 8),
        Result("demo: private users", result.plan.users, "users"),
        Result("demo: held-out prompts", before.prompts, "prompts", "at least 256",
               before.prompts >= 256),
        Result("demo: reward before", before.mean, unit),
        Result("demo: reward before, standard error", before.standard_error, unit),
        Result("demo: reward after", after.mean, unit),
        Result("demo: reward after, standard error", after.standard_error, unit),
        Result("demo: rise over its standard error", rise.mean / rise.standard_error, "1",
               "at least 5", rise.mean >= 5 * rise.standard_error),
        Result("demo: accuracy of the reward model", accuracy, "1", "at least 0.82",
               accuracy >= 0.82),
        Result("demo: tuning and evaluation", time.time() - began, "s"),
    ]  # fmt: skip
    if options.started is not None:
        seconds = time.time() - options.started
        rows.append(
            Result("demo: make demo, clean clone", seconds, "s", "under 900", seconds < 900)
        )
    write_results(options.results, rows)


if __name__ == "__main__":
    main()
