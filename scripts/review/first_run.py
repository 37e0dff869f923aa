"""A first run with nothing but its answers: what the defaults gain, and how long runs take.

    PYTHONPATH=src python -m scripts.review.first_run

Writes rows to ``docs/results/first_run.json``. A small model is trained on this project's pages,
and then tuned by ``dprlhf.train`` with a model, prompts, a reward, public prompts and ε alone. No
default was chosen on these tasks:

- ``short words``: everybody wants the share of spaces in a response to rise;
- ``majority``: four in five users want it to fall and the others want it to rise, which only their
  rows say. The gain is that of the majority.

A gain is the mean over seeds of the difference on held-out public prompts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from scripts.from_trl.stand_ins import byte_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

import dprlhf
from dprlhf.data.in_memory import rows_of
from dprlhf.data.public import Guides
from dprlhf.data.users import Users
from dprlhf.recipe import load_recipe
from dprlhf.runs.measurements import Result, write_results
from dprlhf.training.timing import seconds_a_round

ROOT = Path.cwd()
OUT = ROOT / "docs/results/first_run.json"
COMMAND = "python -m scripts.review.first_run --kept FOLDER"
PUBLIC = 192
STEPS = 300


def spaces(completions: list[str], **columns: Any) -> list[float]:
    """Return ten times the share of spaces, less what English has."""
    return [10 * text.count(" ") / max(len(text), 1) - 1.5 for text in completions]


def sentences() -> list[str]:
    """Return beginnings of sentences of this project's pages, in an order of their own."""
    pages = sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "docs/proofs").glob("*.md"))
    found = []
    for page in pages:
        words = re.sub(r"[^A-Za-z .,]+", " ", page.read_text("utf-8")).split()
        found += [" ".join(words[i : i + 4]) for i in range(0, len(words) - 4, 7)]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(1)).tolist()
    return list(dict.fromkeys(found[i] for i in order))


def small_model(folder: Path) -> str:
    """Train a byte-level model of four layers on the pages, and save it."""
    pages = "\n".join(p.read_text("utf-8") for p in sorted((ROOT / "docs").rglob("*.md")))
    tokenizer = byte_tokenizer("qwen3")
    tokens = torch.tensor(tokenizer(re.sub(r"[^A-Za-z .,\n]+", " ", pages))["input_ids"])
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_positions=128, n_embd=96, n_layer=4, n_head=4,
            bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(STEPS):
        starts = torch.randint(len(tokens) - 97, (24,))
        batch = torch.stack([tokens[s : s + 96] for s in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"model: loss {loss.item():.2f} nats a byte", flush=True)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def one_run(model: str, task: str, users: int, epsilon: float, seed: int) -> dict[str, float]:
    """Tune on so many users with the defaults, and return the gain and the two durations."""
    texts = sentences()
    public = [{"prompt": text, "wants": 1.0} for text in texts[:PUBLIC]]
    own = texts[PUBLIC + seed * users : PUBLIC + (seed + 1) * users]
    likes = [-1.0 if task == "majority" and i % 5 else 1.0 for i in range(users)]
    rows = [{"prompt": t, "wants": w} for t, w in zip(own, likes, strict=True)]
    reward = dprlhf.recipe.Reward(
        function=f"{Path(__file__).resolve()}:spaces", times_column="wants"
    )
    with tempfile.TemporaryDirectory() as place:
        started = time.monotonic()
        result = dprlhf.train(
            model=model, prompts=rows, reward=reward, epsilon=epsilon, seed=seed,
            evaluation_prompts=public, output_dir=Path(place) / "run", quiet=True,
        )  # fmt: skip
        seconds = time.monotonic() - started
        secret = Path(place) / "run/secret/telemetry-0.jsonl"
        lines = [json.loads(line) for line in secret.read_text().splitlines()]
        timing = json.loads((Path(place) / "run/timing.json").read_text())
        recipe = load_recipe(Path(place) / "run/recipe.yaml")
        assert recipe.evaluation is not None
        guides = Guides(Users(rows_of(recipe.data, public), recipe.data), recipe.evaluation.prompts)
    assert result.difference is not None
    sign = -1.0 if task == "majority" else 1.0
    return {
        "gain": sign * result.difference.mean,
        "estimated": result.plan.rounds * seconds_a_round(recipe, result.plan, timing, guides),
        "measured": sum(sum(line["seconds"].values()) for line in lines),
        "whole": seconds,
    }


def main() -> None:
    """Run every cell that is missing, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--users", type=int, nargs="+", default=[300, 1000])
    parser.add_argument("--kept", type=Path, required=True, help="folder of what is done already")
    options = parser.parse_args()
    folder = options.kept / "model"
    model = str(folder) if folder.is_dir() else small_model(folder)
    rows, ratios = [], []
    for task in ("short words", "majority"):
        for users, epsilon in itertools.product(options.users, (4.0, 1.0)):
            found = []
            for seed in range(options.seeds):
                file = options.kept / f"{task}-{users}-{epsilon:g}-{seed}.json"
                if not file.is_file():
                    file.write_text(json.dumps(one_run(model, task, users, epsilon, seed)))
                found.append(json.loads(file.read_text()))
                print(task, users, epsilon, seed, found[-1], flush=True)
            ratios += [one["estimated"] / one["measured"] for one in found]
            gains = [one["gain"] for one in found]
            error = statistics.stdev(gains) / len(gains) ** 0.5
            name = f"first run: {task}, {users} users, epsilon {epsilon:g}"
            mean = statistics.fmean(gains)
            rows += [
                Result(f"{name}: gain", mean, "reward", "above 0", mean > 0, COMMAND),
                Result(f"{name}: standard error of the gain", error, "reward", "", None, COMMAND),
            ]
    name, ratio = "first run: estimated over measured time of rounds", statistics.median(ratios)
    within = abs(ratio - 1) <= 0.3
    rows.append(Result(name, ratio, "1", "within 30% of 1", within, COMMAND))
    write_results(OUT, rows)


if __name__ == "__main__":
    main()
