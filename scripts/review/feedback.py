"""What a log of users' reactions teaches at which ε, with the recipes that ``dprlhf init`` writes.

    PYTHONPATH=src python -m scripts.review.feedback --kept FOLDER

Writes rows to ``docs/results/feedback.json``. The users are simulated: each was shown two
completions that the untuned model wrote, and likes one if it has more of something than the median
of public completions; every fifth user likes the others. The result is the share of fresh
completions of held-out public prompts that the majority likes.

``feedback`` fits that log, ``sft`` the liked completions alone, and ``public only`` is a run
without noise on the labelled public rows, from which the directions of the other two come.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
import yaml
from scripts.review.first_run import commas, sentences, small_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import dprlhf
from dprlhf.assets import resolve
from dprlhf.cli.init import new_recipe
from dprlhf.recipe.loading import recipe_from
from dprlhf.runs.measurements import Result, machine, write_results

OUT = Path.cwd() / "docs/results/feedback.json"
COMMAND = "python -m scripts.review.feedback --kept FOLDER"
PUBLIC, SHOWN, NO_NOISE = 192, 2, 1e6


class Task(NamedTuple):
    """What the majority likes more of, the model, and tokens of a prompt and a completion."""

    score: Any
    smollm2: bool
    tokens: tuple[int, int]


def vowels(texts: list[str]) -> list[float]:
    """Return the number of vowels in each text."""
    return [float(sum(letter in "aeiou" for letter in text)) for text in texts]


TASKS = {
    "small model, vowels": Task(vowels, False, (48, 24)),
    "SmolLM2, commas": Task(commas, True, (32, 24)),
}


class Simulation:
    """A task's model, prompts and users."""

    def __init__(self, task: Task, model: str) -> None:
        self.task, self.model = task, model
        self.tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.eos_token
        self.base = AutoModelForCausalLM.from_pretrained(model).eval()
        if task.smollm2:
            folder = Path(resolve("asset:rotten-tomatoes"))
            public, private = (
                [
                    " ".join(text.split()[:8])
                    for text in pd.read_parquet(folder / f"{n}.parquet").text
                ]
                for n in ("test", "train")
            )
        else:
            texts = [text for text in sentences() if len(text) < 48]
            public, private = texts[:PUBLIC], texts[PUBLIC:]
        self.public, self.private = public[:PUBLIC], private
        shown = self.completions(self.base, self.public, 1)
        self.middle = statistics.median(task.score(shown))
        self.public_rows = [
            {"prompt": p, "completion": c, "label": like}
            for p, c, like in zip(self.public, shown, self.liked(shown), strict=True)
        ]

    def completions(self, model: Any, prompts: list[str], seed: int) -> list[str]:
        """Return a sampled completion of each prompt."""
        torch.manual_seed(seed)
        found: list[str] = []
        for first in range(0, len(prompts), 128):
            batch = self.tokenizer(prompts[first : first + 128], return_tensors="pt", padding=True)
            with torch.no_grad():
                tokens = model.generate(
                    **batch, max_new_tokens=self.task.tokens[1], do_sample=True, top_k=0, top_p=1.0,
                    pad_token_id=self.tokenizer.eos_token_id,
                )  # fmt: skip
            own = tokens[:, batch.input_ids.shape[1] :]
            found += self.tokenizer.batch_decode(own, skip_special_tokens=True)
        return found

    def liked(self, texts: list[str]) -> list[bool]:
        """Return which texts the majority likes."""
        return [score > self.middle for score in self.task.score(texts)]

    def share(self, model: Any) -> float:
        """Return the share of fresh completions of the public prompts that the majority likes."""
        liked = [self.liked(self.completions(model, self.public, seed)) for seed in (101, 102)]
        return statistics.fmean(itertools.chain(*liked))

    def log(self, users: int, seed: int) -> list[dict[str, Any]]:
        """Return what so many users were shown and whether they liked it."""
        prompts, rows = random.Random(seed).sample(self.private, users), []
        for shown in range(SHOWN):
            texts = self.completions(self.base, prompts, 1000 * (seed + 1) + shown)
            for user, (prompt, text, like) in enumerate(
                zip(prompts, texts, self.liked(texts), strict=True)
            ):
                label = like != (user % 5 == 0)
                rows.append(
                    {"prompt": prompt, "completion": text, "label": label, "user": f"u{user}"}
                )
        return rows

    def tuned(self, method: str, users: int, epsilon: float, seed: int) -> float:
        """Return the share after a run with the recipe of ``dprlhf init``."""
        stage, rows = method, self.log(users, seed) if method != "public only" else []
        if method == "sft":
            rows = [row for row in rows if row["label"]]
        elif method == "public only":
            stage, epsilon, users = "feedback", NO_NOISE, PUBLIC
            rows = [{**row, "user": f"p{i}"} for i, row in enumerate(self.public_rows)]
        text = new_recipe(
            model=self.model, prompts="in-memory", user_column="user", stage=stage,
            public_prompts="in-memory", epsilon=epsilon, users=users, public=PUBLIC,
        )  # fmt: skip
        recipe = recipe_from(yaml.safe_load(text), (), source="init")
        prompt, completion = self.task.tokens
        data = {"max_prompt_tokens": prompt, "max_completion_tokens": completion}
        values = recipe.model_dump() | {"seed": seed}
        values["data"] |= data
        values["evaluation"]["declared_public"] = True  # those of "public only" are the users'
        folder = tempfile.mkdtemp()
        try:
            dprlhf.train_stage(
                type(recipe).model_validate(values), data=rows, evaluation_data=self.public_rows,
                output_dir=Path(folder) / "run", quiet=True,
            )  # fmt: skip
            tuned = AutoModelForCausalLM.from_pretrained(Path(folder) / "run/model")
            return self.share(tuned.eval())
        finally:
            shutil.rmtree(folder)


def main() -> None:
    """Run every cell that is missing, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--users", type=int, nargs="+", default=[300, 1000, 3000])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.3, 1.0, 4.0, NO_NOISE])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=["feedback", "sft", "public only"])
    parser.add_argument("--kept", type=Path, required=True, help="folder of what is done already")
    options = parser.parse_args()
    rows = []
    for name in options.tasks:
        task, simulation = TASKS[name], None
        cells = list(itertools.product(options.methods, options.users, options.epsilons))
        if "public only" in options.methods:
            cells = [c for c in cells if c[0] != "public only"] + [("public only", 0, 0.0)]
        for method, users, epsilon in [("before", 0, 0.0), *cells]:
            shares = []
            for seed in range(options.seeds):
                file = options.kept / f"{name}-{method}-{users}-{epsilon:g}-{seed}.json"
                if not file.is_file():
                    if simulation is None:
                        folder = options.kept / "model"
                        model = (
                            str(folder) if folder.is_dir() or task.smollm2 else small_model(folder)
                        )
                        model = resolve("asset:smollm2-135m") if task.smollm2 else model
                        simulation = Simulation(task, model)
                    share = (
                        simulation.share(simulation.base)
                        if method == "before"
                        else simulation.tuned(method, users, epsilon, seed)
                    )
                    file.write_text(json.dumps({"share": share, "machine": machine()}))
                shares.append(json.loads(file.read_text())["share"])
                print(name, method, users, epsilon, seed, shares[-1], flush=True)
                if method == "before":
                    break
            row = f"feedback: {name}, {method}"
            if users:
                noise = "no noise" if epsilon == NO_NOISE else f"epsilon {epsilon:g}"
                row += f", {users} users, {noise}"
            by = COMMAND, json.loads(file.read_text())["machine"]
            rows.append(Result(row + ": liked", statistics.fmean(shares), "share", "", None, *by))
            if len(shares) > 1:
                error = statistics.stdev(shares) / len(shares) ** 0.5
                rows.append(Result(row + ": standard error", error, "share", "", None, *by))
    write_results(OUT, rows)


if __name__ == "__main__":
    main()
