"""Runs the stages of recipes/pipeline, and writes what came out (docs/results/pipeline.json).

    dprlhf assets pull
    python scripts/pipeline_results.py

Stages that are finished in runs/pipeline are not run again, and an interrupted one is resumed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from dprlhf.recipe import load_any_recipe
from dprlhf.runs.earlier import total_of_runs
from dprlhf.runs.measurements import Result, write_results
from dprlhf.runs.report import read_run

ROOT = Path(__file__).resolve().parents[1]
STAGES = {"sft": "1_sft.yaml", "reward": "2_reward.yaml", "train": "3_rl.yaml"}


def main() -> None:
    folders = []
    for command, name in STAGES.items():
        file = ROOT / "recipes/pipeline" / name
        folder = Path(str(load_any_recipe(file).output_dir))
        folders.append(folder)
        if (folder / "policy/README.md").is_file():
            continue
        words = ["resume", str(folder)] if folder.exists() else [command, str(file)]
        subprocess.run([sys.executable, "-m", "dprlhf", *words], check=True)
    sft, reward, rl = (read_run(folder) for folder in folders)
    alone = [run.card["epsilon"] for run in (sft, reward, rl)]
    whole = total_of_runs([folders[-1]])[1]
    shared = alone[0] + alone[2]
    rise = rl.rise
    assert rise is not None
    write_results(
        ROOT / "docs/results/pipeline.json",
        [
            Result("pipeline: total epsilon (delta 1e-5)", whole.epsilon, "1",
                   f"below {shared:.3g}, the sum over the stages with shared users",
                   max(alone) <= whole.epsilon < shared),
            Result("pipeline: private documents, loss before", mean(sft, "before", "loss"), "nats"),
            Result("pipeline: private documents, loss after", mean(sft, "after", "loss"), "nats",
                   "below before", mean(sft, "after", "loss") < mean(sft, "before", "loss")),
            Result("pipeline: reward model, accuracy before", mean(reward, "before", "accuracy"),
                   "1"),
            Result("pipeline: reward model, accuracy after", mean(reward, "after", "accuracy"),
                   "1", "above before",
                   mean(reward, "after", "accuracy") > mean(reward, "before", "accuracy")),
            Result("pipeline: rise of the learnt reward over its standard error",
                   rise[0] / rise[1], "1", "at least 2", rise[0] >= 2 * rise[1]),
        ],
    )  # fmt: skip
    print(json.dumps({"alone": alone, "total": whole.epsilon, "rise": rise}))


def mean(run: object, when: str, name: str) -> float:
    found: float = run.evaluation[when][name][0]  # type: ignore[attr-defined]
    return found


if __name__ == "__main__":
    main()
