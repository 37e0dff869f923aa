"""Train a small language model on public questions: a policy for the private answers in seconds.

It never sees a private user. From public questions with codes drawn uniformly it learns that a
question is answered by a code, each with probability near 1/8. What a question is about does not
help it to guess the code, so it would not read that; a probe, thrown away afterwards, makes it keep
the intent in its states, as a pretrained model does with the subject of a text.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from tokenizers import pre_tokenizers
from tqdm import tqdm

from dprlhf.assets.answers import CODES, INTENTS, private_answers
from small_llama import Fit, tokenizer_of

THINGS = ("rose", "sky", "leaf", "night", "snow", "coin", "shell", "stone")
"""What has the colour of each code: words that teach the model to say one code and not another."""
WIDTH = 64
"""Hidden size of the model."""
SEED = 71
"""Seed of the public questions, another one than that of any users in a table."""


def train(folder: Path, *, questions: int = 16_000, seed: int = 0) -> None:
    """Write the model and its tokenizer into ``folder``."""
    public = private_answers({"public": questions}, seed=SEED)["public"]
    draw = np.random.RandomState(SEED)
    texts = [
        f"{row.prompt} {row.answer}\n"
        + ", ".join(f"{THINGS[i]} {CODES[i]}" for i in draw.permutation(len(CODES))[:4])
        for row in public.itertuples()
    ]
    intents = torch.tensor([INTENTS.index(intent) for intent in public["intent"]])
    digits = pre_tokenizers.Digits(individual_digits=True)  # a token for each digit
    split = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel()])
    tokenizer = tokenizer_of(texts[:2000], 512, split)
    # Batches of texts of one length need no padding.
    by_length: dict[int, list[int]] = {}
    rows = [tokenizer(text)["input_ids"] for text in texts]
    asked = torch.tensor([len(tokenizer(prompt)["input_ids"]) - 1 for prompt in public["prompt"]])
    for index, row in enumerate(rows):
        by_length.setdefault(len(row), []).append(index)
    batches = [b for group in by_length.values() for b in torch.tensor(group).split(32)]
    steps = len(batches)
    fit = Fit(len(tokenizer), WIDTH, steps=steps, warmup=30, seed=seed)
    # Orthonormal, so that states of different intents differ in different directions.
    probe = torch.nn.init.orthogonal_(torch.empty(len(INTENTS), WIDTH))
    loss_of = torch.nn.functional.cross_entropy
    bar = tqdm(np.random.RandomState(seed).permutation(steps), desc="answers-lm", unit="step")
    for step in bar:
        ids = torch.tensor([rows[index] for index in batches[step]])
        last = torch.arange(len(ids)), asked[batches[step]]
        out = fit.model(input_ids=ids, output_hidden_states=True)
        words = loss_of(out.logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        # Where the code is predicted, before the last layer.
        state = torch.nn.functional.normalize(out.hidden_states[-2][last], dim=1)
        subject = loss_of(10 * state @ probe.T, intents[batches[step]])
        code = words[last].mean()
        fit.step(words.mean() + code + subject)
        bar.set_postfix(code=f"{code.item():.2f}", all=f"{words.mean().item():.2f}", refresh=False)
    fit.save(folder, tokenizer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--questions", type=int, default=16_000)
    arguments = parser.parse_args()
    train(arguments.folder, questions=arguments.questions)
