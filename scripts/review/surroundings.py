"""What surrounds a run: logged values, hooks, threads, settings of torch, rewards, broken steps.

Writes rows to ``docs/results/review.json``, in about two minutes on one core. With ``--before`` it
measures an older source, which is to be first on the path::

    PYTHONPATH=../before/src python -m scripts.review.surroundings --before
    PYTHONPATH=src python -m scripts.review.surroundings
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "results" / "review.json"
sys.path.insert(1, str(ROOT / "tests"))

import dprlhf  # noqa: E402
from dprlhf.errors import DprlhfError  # noqa: E402
from dprlhf.runs.measurements import Result, write_results  # noqa: E402
from helpers import runs, tiny  # noqa: E402

PROMPTS = [f"user {i}" for i in range(12)]


def trained(base: Path, name: str, **changes: Any) -> int:
    """Train a tiny model on 12 users, and return the number of rounds that were charged."""
    given = runs.run_settings(str(base / "model"), prompts=PROMPTS, rounds=2) | changes
    with contextlib.suppress(DprlhfError):
        dprlhf.train(output_dir=base / name, **given)
    return len(runs.charged(base / name)) if (base / name / "ledger.jsonl").exists() else 0


def hooked(base: Path) -> int:
    """Return how often a hook that was in the model saw a batch of users' prompts."""
    seen: list[Any] = []
    model = tiny.model()
    model.get_input_embeddings().register_forward_hook(lambda *values: seen.append(values))
    trained(base, "hooked", model=model, processing_class=tiny.tokenizer())
    return len(seen)


def beside(base: Path) -> int:
    """Return how many of two runs in threads of this process went on side by side."""
    with ThreadPoolExecutor(2) as pool:
        charged = list(pool.map(lambda name: trained(base, name), ("left", "right")))
    return sum(count > 0 for count in charged)


def logging(value: float) -> Callable[..., list[float]]:
    """Return a reward that logs a value for one user, and 1 for the others."""

    def reward(
        prompts: list[str], completions: list[str], log_metric: Any, log_extra: Any
    ) -> list[float]:
        odd = [value if prompt == PROMPTS[7] else 1 for prompt in prompts]
        for one in odd:
            log_metric("logged", one)
        log_extra("logged", odd)
        return [1.0] * len(prompts)

    return reward


def threads(base: Path) -> int:
    """Return how many numbers of threads the steps of a run have whose reward sets the number."""
    before, seen = torch.get_num_threads(), set()

    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        torch.set_num_threads(before + 2)
        return [1.0] * len(prompts)

    def step(*values: Any) -> None:
        seen.add(torch.get_num_threads())

    hook = register_optimizer_step_pre_hook(step)
    trained(base, "threads", reward=reward)
    hook.remove()
    torch.set_num_threads(before)
    return len({before, *seen})


def anomaly(base: Path) -> int:
    """Return the charged rounds where one user's gradient is no number, in anomaly mode."""
    model, tokenizer = tiny.model(), tiny.tokenizer()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False

    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        if "~" in prompts:  # of the private rows
            with torch.no_grad():
                model.get_input_embeddings().weight[tokenizer("~")["input_ids"][0]] = math.nan
        return [0.1 * len(text) for text in completions]

    with torch.autograd.set_detect_anomaly(True):
        return trained(base, "anomaly", model=model, processing_class=tokenizer, reward=reward,
                       prompts=[*PROMPTS[1:], "~"])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", action="store_true", help="measure an older source")
    before, rows = parser.parse_args().before, []

    def row(name: str, value: float, unit: str, goal: float) -> None:
        when = "before" if before else "after"
        holds = None if before else value == goal
        rows.append(Result(f"surroundings: {name}, {when}", value, unit, f"{goal:g}", holds))
        print(rows[-1].name, value)

    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        tiny.save(base / "model")
        for name, value in (("1e308", 1.2e308), ("an integer of 9,542 digits", 9**9999)):
            charged = trained(base, name, reward=logging(value), prompts=PROMPTS[7:8] * 12)
            row(f"charged rounds of 2 where a reward logs {name}", charged, "rounds", 2)
        row("batches that a hook in the model saw", hooked(base), "batches", 0)
        row("numbers of threads at the steps of a run whose reward sets it", threads(base), "1", 1)
        row("charged rounds of 2 in anomaly mode, one gradient NaN", anomaly(base), "rounds", 2)
        many = trained(base, "empty", epsilon=math.inf, rounds=12)
        row("charged rounds of 12 with one user a round, epsilon infinity", many, "rounds", 12)
        broken = trained(base, "broken", learning_rate=1e30, rounds=4)
        row("charged rounds of 4 at a learning rate of 1e30", broken, "rounds", 1)
        row("runs at once in threads of one process", beside(base), "runs", 1)
    write_results(OUT, rows)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
