"""What a log of users' reactions teaches at which ε, with the recipes that ``dprlhf init`` writes.

    PYTHONPATH=src python -m scripts.review.feedback --kept FOLDER

Writes rows to ``docs/results/feedback.json``. The users are simulated: each was shown two
completions that the untuned model wrote, and likes one if it has more of something than the median
of public completions; every fifth user likes the others. The result is the share of fresh
completions of the public prompts that the majority likes; ``feedback`` takes its steps on half of
these prompts.

``feedback`` fits that log, ``policy gradient`` and ``kto`` with the losses of these names, and
``sft`` the liked completions alone. ``public only`` is a run without noise on the labelled public
rows, from which the directions of these three come.
``reward model`` fits a private reward model to the log, and the policy to that reward without
noise, by fresh completions of public prompts. ``synthesis`` fits a linear reward in a private
subspace of the model's hidden states, and the policy to the best and worst of public completions:
DPPrefSyn (arXiv 2605.30808), with one cluster of users and this project's loss instead of DPO.
``shuffled`` fits the log with its labels in a random order, from which nothing can be learned.
``windows`` fits four logs of the same users, each written by the model that the one before made.
``interval`` asks, without a model, how often the private value's interval holds the true value.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml
from scipy.optimize import brentq
from scipy.stats import norm
from scripts.review.first_run import sentences, small_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import dprlhf
from dprlhf.assets import resolve
from dprlhf.cli.init import new_recipe
from dprlhf.recipe.loading import recipe_from
from dprlhf.runs.measurements import Result, machine, write_results
from dprlhf.training.defaults import with_defaults

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs/results/feedback.json"
COMMAND = "python -m scripts.review.feedback --kept FOLDER"
PUBLIC, SHOWN, TOKENS, WINDOWS, NO_NOISE = 192, 2, 24, 4, 1e6
GRADIENT = "policy gradient"
LOSSES: dict[str, dict[str, Any]] = {
    GRADIENT: {"loss_type": "policy_gradient", "value_rounds": 1}, "kto": {"loss_type": "kto"},
}  # fmt: skip
SYNTHESIS_DIMENSIONS, SYNTHESIS_STEPS, SYNTHESIS_DRAWS = 8, 20, 8


def vowels(texts: list[str]) -> list[float]:
    """Return the number of vowels in each text."""
    return [float(sum(letter in "aeiou" for letter in text)) for text in texts]


def commas(texts: list[str]) -> list[float]:
    """Return the number of commas in each text."""
    return [float(text.count(",")) for text in texts]


TASKS = {"small model, vowels": vowels, "SmolLM2, commas": commas}
"""What the majority likes more of."""


class Simulation:
    """A task's model, prompts and users."""

    def __init__(self, score: Any, model: str) -> None:
        self.score, self.model = score, model
        self.tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.eos_token
        self.base = AutoModelForCausalLM.from_pretrained(model).eval()
        if score is commas:
            folder = Path(resolve("asset:rotten-tomatoes"))
            public, private = (
                [
                    " ".join(text.split()[:8])
                    for text in pd.read_parquet(folder / f"{n}.parquet").text
                ]
                for n in ("test", "train")
            )
        else:
            public = [text for text in sentences() if len(text) < 48]
            private = public[PUBLIC:]
        self.public, self.private = public[:PUBLIC], private
        shown = self.completions(self.base, self.public, 1)
        self.middle = statistics.median(score(shown))
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
                    **batch, max_new_tokens=TOKENS, do_sample=True, top_k=0, top_p=1.0,
                    pad_token_id=self.tokenizer.eos_token_id,
                )  # fmt: skip
            own = tokens[:, batch.input_ids.shape[1] :]
            found += self.tokenizer.batch_decode(own, skip_special_tokens=True)
        return found

    def liked(self, texts: list[str]) -> list[bool]:
        """Return which texts the majority likes."""
        return [score > self.middle for score in self.score(texts)]

    def share(self, model: Any) -> float:
        """Return the share of fresh completions of the public prompts that the majority likes."""
        liked = [self.liked(self.completions(model, self.public, seed)) for seed in (101, 102)]
        return statistics.fmean(itertools.chain(*liked))

    def log(self, users: int, seed: int, model: Any = None) -> list[dict[str, Any]]:
        """Return what so many users were shown, by the untuned model if none is given."""
        prompts, rows = random.Random(seed).sample(self.private, users), []
        for shown in range(SHOWN):
            texts = self.completions(model or self.base, prompts, 1000 * (seed + 1) + shown)
            for user, (prompt, text, like) in enumerate(
                zip(prompts, texts, self.liked(texts), strict=True)
            ):
                label = like != (user % 5 == 0)
                rows.append(
                    {"prompt": prompt, "completion": text, "label": label, "user": f"u{user}"}
                )
        return rows

    def fitted(
        self, stage: str, rows: list[dict[str, Any]], epsilon: float, seed: int, out: Path,
        before: Path | None = None,
    ) -> Any:  # fmt: skip
        """Return the model after a run with the recipe of ``dprlhf init``, or of its defaults."""
        users, model = len({row["user"] for row in rows}), str(before / "model") if before else None
        text = new_recipe(
            model=model or self.model, prompts="in-memory", user_column="user",
            stage="feedback" if stage in LOSSES else stage, public_prompts="in-memory",
            epsilon=epsilon, users=users, public=PUBLIC,
        )  # fmt: skip
        settings = yaml.safe_load(text)
        if stage in LOSSES:
            for name in ("optimizer", "rounds"):
                del settings[name]
            settings = with_defaults(
                settings | {"update": dict(LOSSES[stage])},
                users=users, public=PUBLIC, model=self.model,
            )  # fmt: skip
        recipe = recipe_from(settings, (), source="init")
        values = recipe.model_dump() | {"seed": seed}
        # Completions have no end where they were cut. A user's places are computed, empty or not.
        values["data"] = recipe.data.model_dump(exclude_unset=True) | {
            "max_prompts_per_user": SHOWN,
            "max_completion_tokens": TOKENS,
        }
        values["evaluation"]["declared_public"] = True  # those of "public only" are the users'
        values["previous"] = [{"run": str(before)}] if before else []
        dprlhf.train_stage(
            type(recipe).model_validate(values), data=rows, evaluation_data=self.public_rows,
            output_dir=out, quiet=True,
        )  # fmt: skip
        return AutoModelForCausalLM.from_pretrained(out / "model").eval()

    def by_reward_model(self, rows: list[dict[str, Any]], epsilon: float, seed: int) -> Any:
        """Return the model that a private reward model trains on public prompts."""
        values: dict[str, Any] = {
            "stage": "reward", "policy": {"model_name_or_path": self.model}, "seed": seed,
            "labels": ["false", "true"], "privacy": {"epsilon": epsilon, "delta": 1e-5},
            "data": {
                "path": "in-memory", "prompt_column": "text", "label_column": "label",
                "user_column": "user", "max_tokens": 48 + TOKENS,
            },
            "evaluation": {"data": {"path": "in-memory"}},
        }  # fmt: skip
        users = len({row["user"] for row in rows})
        values = with_defaults(values, users=users, public=PUBLIC, model=self.model)
        private, public = (
            [
                {
                    **row,
                    "text": row["prompt"] + row["completion"],
                    "label": str(row["label"]).lower(),
                }
                for row in some
            ]
            for some in (rows, self.public_rows)
        )
        with tempfile.TemporaryDirectory() as place:
            dprlhf.train_stage(
                recipe_from(values, (), source="reward"), data=private, evaluation_data=public,
                output_dir=Path(place) / "reward", quiet=True,
            )  # fmt: skip
            reward = dprlhf.recipe.Reward(
                classifier=str(Path(place) / "reward/model"), label="true"
            )
            result = dprlhf.train(
                model=self.model, reward=reward, epsilon=NO_NOISE, seed=seed,
                prompts=[{"prompt": text, "user": text} for text in self.public[64:]],
                data__user_column="user", evaluation_prompts=self.public[:64],
                rollout__max_new_tokens=TOKENS, output_dir=Path(place) / "rl", quiet=True,
                previous=[{"run": str(Path(place) / "reward")}],
            )  # fmt: skip
            return result.policy.model.eval()

    def features(self, rows: list[dict[str, Any]]) -> Any:
        """Return a completion's mean hidden state, ``[rows, hidden size]``, of public mean 0."""
        if not hasattr(self, "_middle"):
            self._middle, self._scale = torch.zeros(()), torch.ones(())
            public = self.features(self.public_rows)
            self._middle, self._scale = public.mean(0), public.std(0)
        found = []
        for row in rows:
            prompt, text = (
                self.tokenizer(row[k], return_tensors="pt").input_ids
                for k in ("prompt", "completion")
            )
            with torch.no_grad():
                ids = torch.cat([prompt, text], 1).long()
                states = self.base(ids, output_hidden_states=True).hidden_states[-1]
            found.append(states[0, prompt.shape[1] - 1 :].mean(0))
        return (torch.stack(found).double() - self._middle) / self._scale

    def synthesised(self, rows: list[dict[str, Any]], epsilon: float, seed: int) -> list[Any]:
        """Return public prompts with the completion that a private reward likes most, and least."""
        rng = np.random.default_rng(seed)
        signs = np.array([1.0 if row["label"] else -1.0 for row in rows])
        points = self.features(rows).numpy()
        points /= np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1)
        # Sums over users' means, each of norm 1 at most: half of the budget (Gaussian DP's mu^2)
        # for the covariance, half for all steps.
        gap = lambda mu: (  # noqa: E731
            norm.cdf(mu / 2 - epsilon / mu)
            - np.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
            - 1e-5
        )
        sigma = 0.0 if epsilon == NO_NOISE else 2**0.5 / brentq(gap, 1e-3, 100)
        noise = np.triu(rng.normal(0, sigma, (points.shape[1],) * 2))
        covariance = points.T @ points / SHOWN + noise + np.triu(noise, 1).T
        basis = np.linalg.eigh(covariance)[1][:, -SYNTHESIS_DIMENSIONS:]
        inputs, weights = points @ basis, np.zeros(SYNTHESIS_DIMENSIONS)
        for _ in range(SYNTHESIS_STEPS):
            slopes = signs / (1 + np.exp(signs * (inputs @ weights)))
            total = inputs.T @ slopes / SHOWN
            total += rng.normal(0, sigma * SYNTHESIS_STEPS**0.5, len(weights))
            weights += 8 * total / (len(rows) / SHOWN)
        drawn = [
            self.completions(self.base, self.public, 7 + draw) for draw in range(SYNTHESIS_DRAWS)
        ]
        kept = []
        for prompt, texts in zip(self.public, zip(*drawn, strict=True), strict=True):
            own = [{"prompt": prompt, "completion": text} for text in texts]
            liked = self.features(own).numpy() @ basis @ weights
            kept.append({**own[int(liked.argmax())], "label": True})
            kept.append({**own[int(liked.argmin())], "label": False})
        return kept

    def tuned(self, method: str, users: int, epsilon: float, seed: int) -> dict[str, Any]:
        """Return the share after a run; of ``windows`` also the total cost."""
        stage, rows = method, self.log(users, seed) if users else []
        if method == "shuffled":
            labels = random.Random(seed).sample([row["label"] for row in rows], len(rows))
            stage = "feedback"
            rows = [{**row, "label": label} for row, label in zip(rows, labels, strict=True)]
        elif method == "sft":
            rows = [row for row in rows if row["label"]]
        elif method == "reward model":
            return {"share": self.share(self.by_reward_model(rows, epsilon, seed))}
        elif method in ("public only", "synthesis"):
            public = self.synthesised(rows, epsilon, seed) if rows else self.public_rows
            stage, epsilon = GRADIENT, NO_NOISE
            rows = [{**row, "user": row["prompt"]} for row in public]
        with tempfile.TemporaryDirectory() as place:
            out = Path(place) / "1"
            if method != "windows":
                one = {"share": self.share(self.fitted(stage, rows, epsilon, seed, out))}
                if method == GRADIENT:
                    value = json.loads((out / "evaluation.json").read_text())["value"]
                    one["known"] = value["tuned"]["weight"]
                return one
            model = self.fitted("feedback", rows, epsilon, seed, out)
            for window in range(2, WINDOWS + 1):  # the same users, and what they were shown since
                rows, before, out = self.log(users, seed, model), out, Path(place) / str(window)
                model = self.fitted("feedback", rows, epsilon, seed, out, before)
            card = json.loads((out / "privacy.json").read_text())
            return {"share": self.share(model), "total": card["total"]["epsilon"]}


def coverage() -> list[Result]:
    """Return how many of 200 simulated deployments have the true value in the 95% interval."""
    sys.path.insert(0, str(ROOT / "tests"))
    from training.test_logged_value import deployments

    rows = []
    for what, tilt in (("the logged policy", 0.0), ("a tuned one", 1.5), ("one far away", 12.0)):
        truth, found = deployments(tilt, count=200)
        held = sum(value.low <= truth <= value.high for value in found)
        name = f"feedback: intervals of a private value that hold the true one: {what}"
        rows.append(Result(name, held, "of 200 deployments", "at least 190", held >= 190, COMMAND))
    return rows


def main() -> None:
    """Run every cell that is missing, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--users", type=int, nargs="+", default=[300, 1000, 3000])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.3, 1.0, 4.0, NO_NOISE])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=["feedback"])
    parser.add_argument("--kept", type=Path, required=True, help="folder of what is done already")
    options = parser.parse_args()
    options.kept.mkdir(parents=True, exist_ok=True)
    rows = []
    if "interval" in options.methods:
        options.methods.remove("interval")
        rows = coverage()
    for name in options.tasks if options.methods else []:
        simulation = None
        cells = list(itertools.product(options.methods, options.users, options.epsilons))
        if "public only" in options.methods:
            cells = [c for c in cells if c[0] != "public only"] + [("public only", 0, 0.0)]
        for method, users, epsilon in [("before", 0, 0.0), *cells]:
            shares, known = [], []
            for seed in range(options.seeds):
                file = options.kept / f"{name}-{method}-{users}-{epsilon:g}-{seed}.json"
                if not file.is_file():
                    if simulation is None:
                        folder = options.kept / "model"
                        if name.startswith("SmolLM2"):
                            folder = Path(resolve("asset:smollm2-135m"))
                        elif not folder.is_dir():
                            small_model(folder)
                        simulation = Simulation(TASKS[name], str(folder))
                    one: dict[str, Any] = (
                        {"share": simulation.share(simulation.base)}
                        if method == "before"
                        else simulation.tuned(method, users, epsilon, seed)
                    )
                    file.write_text(json.dumps({**one, "machine": machine()}))
                one = json.loads(file.read_text())
                shares.append(one["share"])
                known += [one["known"]] if "known" in one else []
                print(name, method, users, epsilon, seed, shares[-1], flush=True)
                if method == "before":
                    break
            row = f"feedback: {name}, {method}"
            if users:
                noise = "no noise" if epsilon == NO_NOISE else f"epsilon {epsilon:g}"
                row += f", {users} users, {noise}"
            by = COMMAND, one["machine"]
            if total := one.get("total"):
                most = f"at most {WINDOWS}"
                rows.append(Result(row + ": total", total, "epsilon", most, total <= WINDOWS, *by))
            rows.append(Result(row + ": liked", statistics.fmean(shares), "share", "", None, *by))
            if len(known) == len(shares):
                what = f"{row}: part of the tuned policy that the value knows"
                rows.append(Result(what, statistics.fmean(known), "1", "", None, *by))
            if len(shares) > 1:
                error = statistics.stdev(shares) / len(shares) ** 0.5
                rows.append(Result(row + ": standard error", error, "share", "", None, *by))
        means = {row.name.removeprefix(f"feedback: {name}, "): row.value for row in rows}
        start, case = means["before: liked"], "feedback, 1000 users, "
        of = [means.get(f"{case}{noise}: liked") for noise in ("epsilon 1", "no noise")]
        if None not in of:
            kept = (of[0] - start) / (of[1] - start)
            row = f"feedback: {name}, {case}epsilon 1: share of the gain without noise"
            rows.append(Result(row, kept, "1", "at least 0.8", kept >= 0.8, *by))
    write_results(OUT, rows)


if __name__ == "__main__":
    main()
