"""Fit a head on the small model to the labels of public sentences: where a learnt reward starts.

    python scripts/worth/scorer.py runs/rivals/reviews-lm runs/rivals/reviews-scorer

A text is some words in a row of a public sentence, as a short continuation is. The only output is
the log-odds of a good label.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from dprlhf.assets import path

STEPS, ROWS, LONGEST = 300, 64, 16


def fit(small: Path, folder: Path, steps: int = STEPS) -> float:
    """Fit the classifier, write it, and return its accuracy on 512 sentences it did not see."""
    tokenizer = AutoTokenizer.from_pretrained(small)
    tokenizer.padding_side = "right"
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(small, num_labels=1)
    model.config.pad_token_id = tokenizer.pad_token_id
    table = pd.read_parquet(path("rotten-tomatoes") / "train.parquet")
    draw = np.random.default_rng(0)
    order = draw.permutation(len(table))
    held, known = order[:512], order[512:]

    def batch(rows: np.ndarray) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        some = table.iloc[rows]
        texts = []
        for words in some["text"].str.split():
            start = draw.integers(0, max(1, len(words) - LONGEST + 1))
            texts.append(" ".join(words[start : start + LONGEST]))
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=32, return_tensors="pt")
        labels = torch.tensor(some["label"].to_numpy(), dtype=torch.float32)
        return {name: tokens[name] for name in ("input_ids", "attention_mask")}, labels

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1)
    for step in range(steps):
        inputs, labels = batch(draw.choice(known, ROWS))
        scores = model(**inputs).logits[:, 0]
        torch.nn.functional.binary_cross_entropy_with_logits(scores, labels).backward()
        optimizer.param_groups[0]["lr"] = 5e-4 * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with torch.no_grad():
        inputs, labels = batch(held)
        return float(((model(**inputs).logits[:, 0] > 0) == (labels > 0.5)).float().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("small", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    print(f"accuracy on public sentences: {fit(arguments.small, arguments.folder):.3f}")
