"""A first run with nothing but its answers: what the defaults gain, and how long runs take.

    PYTHONPATH=src python -m scripts.review.first_run --kept FOLDER

Writes rows to ``docs/results/first_run.json``. No default was chosen on these tasks (``TASKS``):
two of a small model that is trained on this project's pages first, and four of SmolLM2-135M with
sentences of Rotten Tomatoes for prompts, three of which are chats. ``dprlhf.train`` gets a model,
prompts, a reward, public prompts and ε alone; so do, ``--by``, the recipe that ``dprlhf init``
writes, TRL's trainer, and ``dprlhf tune``, for ten minutes on public prompts of its own. In some
tasks four in five users want the opposite of the others, which only their rows say; the gain is
that of the majority.

A gain is the mean over seeds of the difference on held-out public prompts. Several processes may
fill one folder at a time (``--tasks``); on an idle machine one says ``--timed``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import dprlhf
from dprlhf.assets import resolve
from dprlhf.cli.init import new_recipe
from dprlhf.data.in_memory import rows_of
from dprlhf.data.public import Guides
from dprlhf.data.users import Users
from dprlhf.recipe import load_recipe
from dprlhf.runs.measurements import Result, machine, write_results
from dprlhf.training.timing import seconds_a_round
from dprlhf.trl import PrivateGRPOConfig, PrivateGRPOTrainer

ROOT = Path.cwd()
OUT = ROOT / "docs/results/first_run.json"
COMMAND = "python -m scripts.review.first_run --kept FOLDER"
PUBLIC = 192
STEPS = 300


class Task(NamedTuple):
    """What users want: a reward of this module, and the share of them who want its opposite."""

    reward: str
    against: float = 0.0
    question: str = "{}"
    smollm2: bool = True

    def prompt(self, text: str) -> Any:
        """Return a text, or a chat about it."""
        question = self.question.format(text)
        return [{"role": "user", "content": question}] if question != text else text


TASKS = {
    "short words": Task("spaces", smollm2=False),
    "majority": Task("spaces", 0.8, smollm2=False),
    "commas": Task("commas"),
    "chat, plain words": Task("plain_words", 0.0, "Continue this review: {}"),
    "chat, the reader is spoken to": Task("second_person", 0.0, "What should I think of this? {}"),
    "chat, majority against questions": Task("questions", 0.8, "A friend writes: {} Answer."),
}


def as_wanted(score: Callable[[list[str]], list[float]]) -> Callable[..., list[float]]:
    """Return a reward with TRL's signature: a score, times 1 or −1 by what the user wants."""

    def reward(completions: list[Any], wants: list[float], **columns: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        return [want * value for want, value in zip(wants, score(texts), strict=True)]

    reward.__name__ = score.__name__
    return reward


@as_wanted
def spaces(texts: list[str]) -> list[float]:
    """Return ten times the share of spaces, less what English has."""
    return [10 * text.count(" ") / max(len(text), 1) - 1.5 for text in texts]


@as_wanted
def commas(texts: list[str]) -> list[float]:
    """Return the number of commas, at most 4, less 1."""
    return [min(text.count(","), 4) - 1.0 for text in texts]


@as_wanted
def plain_words(texts: list[str]) -> list[float]:
    """Return 1 less four times the share of words with more than seven letters."""
    found = [re.findall("[A-Za-z]+", text) for text in texts]
    return [1 - 4 * sum(len(w) > 7 for w in ws) / max(len(ws), 1) for ws in found]


@as_wanted
def second_person(texts: list[str]) -> list[float]:
    """Return the number of words such as "you", at most 3, less 1."""
    pattern = re.compile(r"\b(you|your|yours|yourself)\b", re.IGNORECASE)
    return [min(len(pattern.findall(text)), 3) - 1.0 for text in texts]


@as_wanted
def questions(texts: list[str]) -> list[float]:
    """Return 1 for a text with a question mark, otherwise −1."""
    return [1.0 if "?" in text else -1.0 for text in texts]


def sentences() -> list[str]:
    """Return beginnings of sentences of this project's pages, in an order of their own."""
    pages = sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "docs/proofs").glob("*.md"))
    found = []
    for page in pages:
        words = re.sub(r"[^A-Za-z .,]+", " ", page.read_text("utf-8")).split()
        found += [" ".join(words[i : i + 4]) for i in range(0, len(words) - 4, 7)]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(1)).tolist()
    return list({"".join(found[i].lower().split()): found[i] for i in order}.values())


def byte_tokenizer(template: str) -> Any:
    """Return a byte-level tokenizer with one of TRL's chat templates."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|finetune_right_pad_id|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *alphabet])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=special[0], eos_token=special[2], pad_token=special[0],
        additional_special_tokens=special[1:],
    )  # fmt: skip
    folder = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (folder / f"{template}.jinja").read_text()
    return tokenizer


def small_model(folder: Path, steps: int = STEPS) -> str:
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
    for _ in range(steps):
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


def texts_of(task: Task, users: int, seed: int) -> tuple[list[str], list[str]]:
    """Return public texts, and a text of each user."""
    if not task.smollm2:
        texts = sentences()
        return texts[:PUBLIC], random.Random(seed).sample(texts[PUBLIC:], users)
    folder = Path(resolve("asset:rotten-tomatoes"))
    public, private = (pd.read_parquet(folder / f"{n}.parquet")["text"] for n in ("test", "train"))
    return list(public[:PUBLIC]), random.Random(seed).sample(list(private), users)


def to_file(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tuned(recipe: Path, task: Task, users: int, kept: Path) -> Path:
    """Return what ``dprlhf tune`` makes of a recipe; all seeds share one search."""
    made = kept / f"{task.reward}-{task.against:g}-{users}.yaml"
    if not made.is_file():
        drawn = {text for seed in range(3) for text in texts_of(task, users, seed)[1]}
        texts = [text for text in sentences() if text not in drawn][:1200]
        public = kept / "public.jsonl"
        to_file(public, [{"prompt": task.prompt(text), "wants": 1.0} for text in texts])
        command = (
            f"dprlhf tune {recipe} --minutes 10 --scored 192 --public {public} --output {made}"
        )
        subprocess.run(
            [Path(sys.executable).parent / command.split()[0], *command.split()[1:]], check=True
        )
    return made


def one_run(
    model: str, task: Task, users: int, epsilon: float, seed: int, by: str, kept: Path
) -> dict[str, Any]:
    """Tune on so many users with the defaults, and return the gain and the two durations."""
    texts, own = texts_of(task, users, seed)
    public = [{"prompt": task.prompt(text), "wants": 1.0} for text in texts]
    likes = [-1.0 if i % 5 < 5 * task.against else 1.0 for i in range(users)]
    rows = [{"prompt": task.prompt(t), "wants": w} for t, w in zip(own, likes, strict=True)]
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "run"
        started = time.monotonic()
        if by == "train":
            result = dprlhf.train(
                model=model, prompts=rows, reward=globals()[task.reward], epsilon=epsilon,
                seed=seed, evaluation_prompts=public, output_dir=out, quiet=True,
            )  # fmt: skip
        elif by == "trl":
            trainer = PrivateGRPOTrainer(
                model=model, reward_funcs=globals()[task.reward],
                args=PrivateGRPOConfig(
                    output_dir=str(out), privacy_epsilon=epsilon, seed=seed, eval_strategy="steps"
                ),
                train_dataset=Dataset.from_list(rows), eval_dataset=Dataset.from_list(public),
            )  # fmt: skip
            trainer.train()
            result = trainer.result
        else:
            recipe_file, private = Path(place) / "recipe.yaml", Path(place) / "private.jsonl"
            to_file(private, rows)
            to_file(private.with_name("public.jsonl"), public)
            recipe_file.write_text(
                new_recipe(
                    model=model, prompts=str(private), user_column="", epsilon=epsilon,
                    public_prompts=str(private.with_name("public.jsonl")),
                    reward=f"{Path(__file__).resolve()}:{task.reward}", users=users, public=PUBLIC,
                )
            )  # fmt: skip
            if by == "tune":
                recipe_file = tuned(recipe_file, task, users, kept)
            result = dprlhf.train(
                recipe_file, output_dir=out, quiet=True,
                overrides=[
                    f"seed={seed}", f"data.path={private}",
                    f"evaluation.data.path={private.with_name('public.jsonl')}",
                ],
            )  # fmt: skip
        seconds = time.monotonic() - started
        secret = out / "secret/telemetry-0.jsonl"
        lines = [json.loads(line) for line in secret.read_text().splitlines()]
        timing = json.loads((out / "timing.json").read_text())
        recipe = load_recipe(out / "recipe.yaml")
        assert recipe.evaluation is not None
        guides = Guides(Users(rows_of(recipe.data, public), recipe.data), recipe.evaluation.prompts)
    assert result.difference is not None
    return {
        "gain": (-1.0 if task.against > 0.5 else 1.0) * result.difference.mean,
        "estimated": result.plan.rounds * seconds_a_round(recipe, result.plan, timing, guides),
        "measured": sum(sum(line["seconds"].values()) for line in lines),
        "whole": seconds,
        "machine": machine(),
    }


def main() -> None:
    """Run every cell that is missing, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--users", type=int, nargs="+", default=[300, 1000, 3000])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[4.0, 1.0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--by", choices=["train", "init", "trl", "tune"], default="train")
    parser.add_argument("--timed", action="store_true", help="write how long it took, too")
    parser.add_argument("--kept", type=Path, required=True, help="folder of what is done already")
    options = parser.parse_args()
    rows, ratios = [], []
    for name, users, epsilon in itertools.product(options.tasks, options.users, options.epsilons):
        task, found, files = TASKS[name], [], []
        for seed in range(options.seeds):
            by = "" if options.by == "train" else f"{options.by}-"
            file = options.kept / f"{by}{name}-{users}-{epsilon:g}-{seed}.json"
            if not file.is_file():
                folder = options.kept / "model"
                model = str(folder) if folder.is_dir() or task.smollm2 else small_model(folder)
                model = resolve("asset:smollm2-135m") if task.smollm2 else model
                one = one_run(model, task, users, epsilon, seed, options.by, options.kept)
                file.write_text(json.dumps(one))
            found.append(json.loads(file.read_text()))
            files.append(file)
            print(name, users, epsilon, seed, found[-1], flush=True)
        ratios += [one["estimated"] / one["measured"] for one in found]
        gains = [one["gain"] for one in found]
        error = statistics.stdev(gains) / len(gains) ** 0.5
        row = f"first run{by and f' by {options.by}'}: {name}, {users} users, epsilon {epsilon:g}"
        mean = statistics.fmean(gains)
        least = mean > -2 * error
        source = COMMAND, found[0]["machine"]
        rows += [
            Result(f"{row}: gain", mean, "reward", "above -2 standard errors", least, *source),
            Result(f"{row}: standard error of the gain", error, "reward", "", None, *source),
        ]
        if options.by == "tune":
            cells = (options.kept / file.name.removeprefix(by) for file in files)
            share = statistics.fmean(json.loads(cell.read_text())["gain"] for cell in cells) / mean
            what = f"{row.replace(' by tune', '')}: share of the gain with tune's recipe"
            rows.append(Result(what, share, "1", "at least 0.8", share >= 0.8, *source))
    if options.timed:
        row, ratio = "first run: estimated over measured time of rounds", statistics.median(ratios)
        within = abs(ratio - 1) <= 0.3
        rows.append(Result(row, ratio, "1", "within 30% of 1", within, COMMAND))
    write_results(OUT, rows)


if __name__ == "__main__":
    main()
