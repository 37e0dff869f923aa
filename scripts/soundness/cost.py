"""What full fine-tuning with a proven bound on rounding costs, and what the bound itself takes.

GPT-2 in its real shape with random weights. The sides alternate in one process; each is timed by
the CPU seconds of this process, so that other programs on the machine distort the ratios less.
Writes rows to ``docs/results/soundness.json``. About 5 minutes on one idle core.

    PYTHONPATH=scripts python -m scripts.soundness.cost
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from bench import models
from bench.overhead import Updates
from dprlhf.gradients import per_user
from dprlhf.runs.measurements import Result, write_results

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "results" / "soundness.json"
AT_MOST = 1.15
SHAPES = {  # users, tokens of a prompt, of a response; two responses each
    "48 tokens a user": (16, 16, 16),
    "224 tokens a user": (8, 32, 96),
}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    policy = models.policy(models.causal_lm("gpt2", small=False), "gpt2", full=True)
    for name, (users, prompt, response) in SHAPES.items():
        batch = models.responses(users=users, each=2, prompt=prompt, response=response)
        with tempfile.TemporaryDirectory() as folder:
            updates = Updates(policy, batch, Path(folder))
            rows = of_shape(f"full fine-tuning of GPT-2, {name}", updates, repeats)
        write_results(OUT, rows)
        for row in rows:
            print(f"{row.name}: {row.value:.4g} {row.unit} ({row.goal or 'no goal'})", flush=True)


def of_shape(name: str, updates: Updates, repeats: int) -> list[Result]:
    """Return the ratios of times of one shape, and how far bounds exceed norms."""
    excess: list[float] = []
    norms = per_user.PerUserGradients.norms

    def watched(engine: per_user.PerUserGradients) -> tuple[torch.Tensor, torch.Tensor]:
        norm, bound = norms(engine)
        excess.extend((bound / norm - 1)[norm > 0].tolist())
        return norm, bound

    per_user.PerUserGradients.norms = watched  # type: ignore[method-assign]
    with_noise, without, plain = [], [], []
    for repeat in range(repeats + 1):
        private, release = seconds(updates)
        start = time.process_time()
        updates.plain()
        ordinary = time.process_time() - start
        if repeat:
            with_noise.append(private / ordinary)
            without.append((private - release) / ordinary)
            plain.append(ordinary)
    per_user.PerUserGradients.norms = norms  # type: ignore[method-assign]
    rows = []
    for what, ratios in (("noise included", with_noise), ("without noise and ledger", without)):
        middle = statistics.median(ratios)
        goal = f"at most {AT_MOST}"
        rows.append(
            Result(f"{name}: private over plain, {what}", middle, "1", goal, middle <= AT_MOST)
        )
    largest = float(np.max(excess))
    return [
        *rows,
        Result(f"{name}: plain update, CPU time", statistics.median(plain), "s"),
        Result(
            f"{name}: clipping bound over norm, less 1",
            largest,
            "1",
            "at most 0.01",
            largest <= 0.01,
        ),
    ]


def seconds(updates: Updates) -> tuple[float, float]:
    """Return the CPU seconds of a private update, and of its release through the gate."""
    gate, spent = updates.gate.release, []

    def release(*arguments: object) -> object:
        start = time.process_time()
        released = gate(*arguments)  # type: ignore[arg-type]
        spent.append(time.process_time() - start)
        return released

    updates.gate.release = release  # type: ignore[assignment, method-assign]
    start = time.process_time()
    try:
        updates.private()
    finally:
        updates.gate.release = gate  # type: ignore[method-assign]
    return time.process_time() - start, spent[0]


if __name__ == "__main__":
    main()
