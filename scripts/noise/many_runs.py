"""Many runs of recipes, side by side and resumable, and the small public model and reward.

A call that was interrupted is continued by the same call: finished runs are read, started ones
resumed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from tqdm import tqdm

from dprlhf.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]

SMALL: dict[str, Any] = {
    "data.limit": 6000, "rounds": 8, "rollout.responses": 4, "rollout.max_new_tokens": 8,
    "rollout.batch_size": 256, "update.batch_size": 256, "evaluation.prompts": 1000,
    "policy.dtype": "float32", "optimizer.learning_rate": 0.5,
    "rewards": [{"function": f"{ROOT / 'scripts' / 'word_sentiment.py'}:reward"}],
}  # fmt: skip
"""What the small model changes in a recipe of the IMDB task, besides the model."""


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        file: Name of its folder, and of the file of its figures.
        recipe: Name of its recipe.
        overrides: What the run changes in the recipe.
    """

    file: str
    recipe: str
    overrides: tuple[str, ...]

    def is_done(self, folder: Path) -> bool:
        """Return whether its figures are there."""
        return (folder / f"{self.file}.json").exists()


def overrides_of(settings: dict[str, Any]) -> tuple[str, ...]:
    """Return settings by key as the overrides of a recipe."""
    return tuple(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in settings.items()
    )


def run(job: Job, folder: Path, threads: int) -> dict[str, Any]:
    """Train, resume or read one run; return its figures.

    ``public`` and ``private`` are the rewards after each round where the run has them: the mean on
    the public prompts (``evaluation.every``), and the users' noised mean, before the round's step.
    """
    import torch

    from dprlhf import resume, train

    torch.set_num_threads(threads)
    place, summary = folder / job.file, folder / f"{job.file}.json"
    if summary.exists():
        figures: dict[str, Any] = json.loads(summary.read_text())
        return figures
    if (place / "ledger.jsonl").exists():
        result = resume(place, quiet=True)
    else:
        shutil.rmtree(place, ignore_errors=True)
        recipe = ROOT / "recipes" / f"{job.recipe}.yaml"
        result = train(recipe, overrides=job.overrides, output_dir=place, quiet=True)
    assert result.before and result.after and result.difference  # noqa: PT018
    rounds = [json.loads(line) for line in RunFolder(place).metrics.read_text().splitlines()]
    guarantee = result.plan.guarantee
    figures = {
        "before": result.before.mean,
        "after": result.after.mean,
        "rise": result.difference.mean,
        "public": [r["public_reward"] for r in rounds if "public_reward" in r],
        "private": [r["private_reward_noised"] for r in rounds if "private_reward_noised" in r],
        "users": result.plan.users,
        "rounds": result.plan.rounds,
        "dimension": result.policy.dimension,
        "epsilon": guarantee.epsilon,
    }
    summary.write_text(json.dumps(figures))
    return figures


def run_all(
    jobs: Iterable[Job], folder: Path, *, side_by_side: int, write_only: bool = False
) -> dict[str, dict[str, Any]]:
    """Run or read all jobs; return their figures by the job's file name.

    Args:
        jobs: The runs, the most wanted ones first.
        folder: Folder of the run folders and figures.
        side_by_side: Number of processes.
        write_only: Read what is finished, and run nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = {job.file: run(job, folder, 1) for job in jobs if job.is_done(folder)}
    todo = [] if write_only else [job for job in jobs if job.file not in done]
    threads = max(1, len(os.sched_getaffinity(0)) // side_by_side)
    context = get_context("spawn")
    with ProcessPoolExecutor(side_by_side, mp_context=context) as pool:
        pending = {pool.submit(run, job, folder, threads): job for job in todo}
        for future in tqdm(as_completed(pending), total=len(pending), unit="run"):
            done[pending[future].file] = future.result()
    return done


def small_policy(folder: Path) -> dict[str, Any]:
    """Return what the small policy changes in every recipe; it is trained on the first call."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from reviews_lm import train

    if not (folder / "config.json").exists():
        train(folder, epochs=6)
    return {"policy.model_name_or_path": str(folder), "policy.adapter.layers": [2, 3]}
