"""Measure how well a policy's states tell what a task asks it to read, before anything is tuned.

    python scripts/worth/readable.py --model small      # a minute of one core
    python scripts/worth/readable.py --model smollm2    # some minutes

Reinforcement learning can only teach a policy to treat prompts differently where its hidden states
differ. For each layer a logistic regression is fitted to the state at the last token of a prompt,
on labelled public rows, and tested on others (five folds). Chance is one half. A policy that was
given the rule and read it from one layer could earn at most 2 p − 1 of what the task offers, where
p is the share that the best layer tells right; a run sees rewards in place of labels, and earns
less. The best of all layers is stated, which flatters the policy.

Writes docs/results/worth.json.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from dprlhf.assets import resolve
from dprlhf.data.public import public_users
from dprlhf.recipe import load_recipe
from dprlhf.runs.measurements import Result, command, write_results
from noise.many_runs import RESULTS, ROOT, small_policy

Array = NDArray[np.float64]
FOLDS, PENALTY, ROWS_AT_ONCE = 5, 10.0, 32


@dataclass(frozen=True)
class Task:
    """A task whose rewards depend on something that the prompt tells.

    Attributes:
        recipe: Name of its recipe; the public rows are those of the evaluation.
        column: Column of the rows with what is to be read: positive, or not.
        what: The column in words.
    """

    recipe: str
    column: str
    what: str


TASKS = {
    "house-style": Task("house_style", "cluster", "the cluster"),
    "reading": Task("reading", "wants", "the author's rating"),
}


def states(model: Any, prompts: list[list[int]]) -> Array:
    """Return the hidden states at the last tokens of the prompts, ``[layers, prompts, d]``.

    Prompts of one length go through the model together, so that nothing is padded.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    found: dict[int, Array] = {}
    for length in np.unique(lengths):
        places = np.flatnonzero(lengths == length)
        for some in np.array_split(places, -(-len(places) // ROWS_AT_ONCE)):
            with torch.no_grad():
                out = model(torch.tensor([prompts[i] for i in some]), output_hidden_states=True)
            layers = torch.stack([layer[:, -1] for layer in out.hidden_states])
            found |= zip(some.tolist(), layers.transpose(0, 1).double().numpy(), strict=True)
    return np.stack([found[place] for place in range(len(prompts))], axis=1)


def told_right(features: Array, right: NDArray[np.bool_], seed: int = 0) -> float:
    """Return the share of rows that a logistic regression tells right, by cross-validation.

    Args:
        features: ``[rows, d]``; they are standardised.
        right: What is to be told, ``[rows]``.
        seed: Draws the folds.
    """
    fold = np.random.default_rng(seed).permutation(len(right)) % FOLDS
    scaled = (features - features.mean(0)) / (features.std(0) + 1e-6)
    hits = 0
    for number in range(FOLDS):
        test = fold == number
        weights = _fitted(scaled[~test], right[~test])
        guesses = np.c_[scaled[test], np.ones(test.sum())] @ weights > 0
        hits += int((guesses == right[test]).sum())
    return hits / len(right)


def _fitted(features: Array, right: NDArray[np.bool_]) -> Array:
    """Return the weights of a logistic regression with an L2 penalty, the intercept at the end."""
    x = torch.from_numpy(np.c_[features, np.ones(len(features))])
    y = torch.from_numpy(right.astype(np.float64))
    weights = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        misfit = torch.nn.functional.binary_cross_entropy_with_logits(x @ weights, y)
        value = misfit + PENALTY * weights[:-1].square().sum() / len(x)
        value.backward()
        return value

    optimizer.step(loss)
    return weights.detach().numpy()


def main(arguments: argparse.Namespace) -> None:
    """Measure one model on the tasks, and write the results."""
    if arguments.model == "small":
        small_policy(arguments.policy)
        place = str(arguments.policy)
    else:
        place = str(resolve("asset:smollm2-135m"))
    tokenizer = AutoTokenizer.from_pretrained(place)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    rows = []
    for name in arguments.tasks:
        task = TASKS[name]
        recipe = load_recipe(ROOT / "recipes" / f"{task.recipe}.yaml")
        assert recipe.evaluation is not None
        users = public_users(recipe, None)
        assert users is not None
        public = users.select(np.arange(users.count))
        longest = recipe.evaluation.data.max_prompt_tokens
        prompts = [tokenizer(prompt)["input_ids"][-longest:] for prompt in public.prompts]
        right = np.array(public.columns[task.column]) > 0
        shares = [told_right(layer, right) for layer in states(model, prompts)]
        best = float(max(shares))
        label = f"readable ({arguments.model}): {name}, {task.what}"
        found = {
            "share told right by the best layer": best,
            "share told right by the last layer": float(shares[-1]),
            "standard error of a share": float(np.sqrt(best * (1 - best) / len(right))),
            "largest share of the gain from one layer": 2 * best - 1,
        }
        print(label, [round(share, 3) for share in shares])
        rows += [
            Result(f"{label}: {key}", value, "1", command=command()) for key, value in found.items()
        ]
        rows.append(Result(f"{label}: public rows", len(right), "rows", command=command()))
    write_results(arguments.results, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=["small", "smollm2"], default="small")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--policy", type=Path, default=Path("runs") / "reviews-lm")
    parser.add_argument("--results", type=Path, default=RESULTS / "worth.json")
    main(parser.parse_args())
