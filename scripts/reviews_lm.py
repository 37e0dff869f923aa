"""Train a small language model on public film reviews: a policy that a CPU tunes in seconds.

The Rotten Tomatoes sentences are public, so the model has never seen a private user. It writes
short review-like sentences, good and bad, which is all that a comparison of updates needs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import torch
from tokenizers import pre_tokenizers
from tqdm import tqdm

from dprlhf.assets import path
from small_llama import Fit, tokenizer_of


def train(folder: Path, *, epochs: int, seed: int = 0) -> None:
    texts = [str(t) for t in pd.read_parquet(path("rotten-tomatoes") / "train.parquet")["text"]]
    tokenizer = tokenizer_of(texts, 4096, pre_tokenizers.ByteLevel(add_prefix_space=True))
    # Between sentences stands <eos>; the model reads a stream of them.
    stream = [0]
    for text in texts:
        stream += [*tokenizer(text)["input_ids"], 0]
    length, rows = 64, 32
    blocks = torch.tensor(stream[: len(stream) // length * length]).reshape(-1, length)
    steps = epochs * (len(blocks) // rows)
    fit = Fit(len(tokenizer), 128, steps=steps, warmup=50, seed=seed)
    order = torch.Generator().manual_seed(seed)
    batches = (
        b
        for _ in range(epochs)
        for b in torch.randperm(len(blocks), generator=order).split(rows)
        if len(b) == rows
    )
    with tqdm(total=steps, desc="reviews-lm", unit="step") as bar:
        for chosen in batches:
            loss = fit.model(input_ids=blocks[chosen], labels=blocks[chosen]).loss
            fit.step(loss)
            bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
            bar.update()
    fit.save(folder, tokenizer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    train(arguments.folder, epochs=arguments.epochs)
