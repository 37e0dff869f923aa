"""Run 10,000 rounds of a tiny policy, stopped and resumed on the way: does a round get dearer?

Writes rows to ``docs/results/scaling.json``: processor time of a round and of its checkpoint in the
first and in the last thousand rounds, sizes of the journals, and the time of ``dprlhf resume``. Can
be stopped and started again: it goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import dprlhf
from bench.models import byte_tokenizer
from dprlhf.runs.measurements import Result, write_results
from dprlhf.training import rounds as of_rounds

OUT = Path(__file__).resolve().parents[1] / "docs" / "results" / "scaling.json"
FLAT = 1.2
"""Time of a round in the last tenth over the first tenth: at most this."""


def save_model(folder: Path) -> str:
    """Save the smallest GPT-2 that samples: what is left is what a round costs beside the model."""
    torch.manual_seed(0)
    size = {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 257, "n_positions": 32}
    GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


class Watch:
    """Notes each round's processor time and its checkpoint's; stops the run after given rounds."""

    def __init__(self, file: Path, stops: set[int]) -> None:
        self._file, self._stops = file, stops
        self.kept: dict[str, Any] = {"rounds": {}, "checkpoints": {}, "resumed": {}, "sizes": {}}
        if file.exists():
            self.kept = json.loads(file.read_text())
        self._called = self._last = time.process_time()
        self._started = False
        self._checkpoint = 0.0
        save = of_rounds.save_checkpoint

        def timed(*args: Any, **kwargs: Any) -> None:
            start = time.process_time()
            save(*args, **kwargs)
            self._checkpoint = time.process_time() - start

        of_rounds.save_checkpoint = timed

    def call(self, action: Callable[[], object]) -> None:
        """Start or continue the run, until its end or the next stop."""
        self._called, self._started = time.process_time(), False
        try:
            action()
        except KeyboardInterrupt:
            pass
        finally:
            self._file.write_text(json.dumps(self.kept))

    def __call__(self, metrics: dict[str, Any]) -> None:
        now, t = time.process_time(), metrics["round"]
        if self._started:
            self.kept["rounds"][str(t)] = now - self._last
            self.kept["checkpoints"][str(t)] = self._checkpoint
        elif t > 1:
            self.kept["resumed"][str(t - 1)] = now - self._called
        self._started, self._last = True, now
        if t in self._stops or t % 500 == 0:
            self._file.write_text(json.dumps(self.kept))
        if t in self._stops:
            raise KeyboardInterrupt


def run(folder: Path, rounds: int) -> dict[str, Any]:
    """Train to the last round but one, with stops; then resume once more."""
    folder.mkdir(parents=True, exist_ok=True)
    file, stops = folder / "watch.json", {rounds // 100, rounds // 10, rounds - 2}
    watch = Watch(file, stops)
    made: dict[str, Any] = {
        "prompts": [f"user {i}" for i in range(rounds)],
        "reward": reward,
        "callbacks": [watch],
        "quiet": True,
    }
    first = {
        "model": str(folder / "model"),
        "rounds": rounds,
        "epsilon": 8.0,
        "learning_rate": 0.01,
        "policy__adapter": {"type": "lora", "rank": 1, "target_modules": ["c_attn"]},
        "data__max_prompt_tokens": 16,
        "rollout__responses": 2,
        "rollout__max_new_tokens": 1,
        "rollout__batch_size": 2,
        "update__batch_size": 2,
        "privacy__partition": "fixed",
    }
    where = folder / "run"
    if not where.exists():
        save_model(folder / "model")
        watch.call(lambda: dprlhf.train(**made, **first, output_dir=where))
    while not (where / "policy").exists():
        watch.call(lambda: dprlhf.resume(where, **made))
    names = {"ledger": "ledger.jsonl", "metrics": "metrics.jsonl"}
    sizes = {name: (where / path).stat().st_size for name, path in names.items()}
    sizes["telemetry"] = (where / "secret/telemetry-0.jsonl").stat().st_size
    return watch.kept | {"sizes": sizes}


def rows_of(kept: dict[str, Any], rounds: int) -> list[Result]:
    tenth, rows = rounds // 10, []
    for kind, title in (("rounds", "a round"), ("checkpoints", "its checkpoint")):
        of = {int(t): seconds for t, seconds in kept[kind].items()}
        first, last = (
            float(np.median([s for t, s in of.items() if low < t <= low + tenth]))
            for low in (0, rounds - tenth)
        )
        name = f"{rounds:,} rounds, {title}"
        rows += [
            Result(f"{name}: median of the first tenth", 1e3 * first, "ms (CPU)"),
            Result(
                f"{name}: last tenth over first tenth",
                last / first,
                "1",
                f"flat: at most {FLAT:g}",
                last / first <= FLAT,
            ),
        ]
    resumed = {int(t): seconds for t, seconds in kept["resumed"].items()}
    for t in (rounds // 100, rounds // 10, rounds - 2):
        rows.append(Result(f"resumed after {t:,} rounds", resumed[t], "s (CPU)"))
    growth = (resumed[rounds - 2] - resumed[rounds // 100]) / (rounds - 2 - rounds // 100)
    rows.append(
        Result(
            f"resumed after {rounds - 2:,} rounds: more for each round before",
            1e3 * growth,
            "ms (CPU)",
            "at most 0.2",
            growth <= 2e-4,
        )
    )
    for name, size in kept["sizes"].items():
        rows.append(Result(f"{rounds:,} rounds: {name}", size / rounds, "bytes a round"))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, default=Path("runs/many-rounds"))
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = rows_of(run(arguments.folder, arguments.rounds), arguments.rounds)
    write_results(arguments.out, rows)
    for row in rows:
        print(f"{row.value:12.6g} {row.unit:22} {row.holds!s:5} {row.name}")
