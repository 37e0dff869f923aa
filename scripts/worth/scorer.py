"""Fit a head on the small model to public sentences: where a learnt reward starts.

    python scripts/worth/scorer.py runs/rivals/reviews-lm runs/rivals/reviews-scorer
    python scripts/worth/scorer.py runs/rivals/reviews-lm runs/rivals/word-scorer --to words

A text is some words in a row of a public sentence, as a short continuation is. The only output is
the log-odds of a good label. With ``--to words`` the model is fitted to the number of words of each
group of dprlhf.worth.taste, and its output is then a head of zeros: what it reads is known, and
what is liked is not.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from dprlhf.assets import path
from dprlhf.worth.taste import GROUPS, group_counts

STEPS, ROWS, LONGEST = 300, 64, 16


def fit(small: Path, folder: Path, to: str = "labels", steps: int = STEPS) -> float:
    """Fit the classifier, write it, and return how good it is on 512 sentences it did not see.

    Args:
        small: Folder of the small model.
        folder: Folder of the classifier.
        to: What it is fitted to, "labels" or "words".
        steps: Number of optimizer steps.

    Returns:
        The share of labels that are right; or the share of the variance of the counts explained.
    """
    tokenizer = AutoTokenizer.from_pretrained(small)
    tokenizer.padding_side = "right"
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        small, num_labels=GROUPS if to == "words" else 1
    )
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
        known = some["label"] if to == "labels" else [group_counts(text) for text in texts]
        wanted = torch.tensor(np.array(known), dtype=torch.float32).reshape(len(some), -1)
        return {name: tokens[name] for name in ("input_ids", "attention_mask")}, wanted

    loss = {
        "labels": torch.nn.functional.binary_cross_entropy_with_logits,
        "words": torch.nn.functional.mse_loss,
    }[to]

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1)
    for step in range(steps):
        inputs, wanted = batch(draw.choice(known, ROWS))
        loss(model(**inputs).logits, wanted).backward()
        optimizer.param_groups[0]["lr"] = 5e-4 * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        inputs, wanted = batch(held)
        found = model.eval()(**inputs).logits
        if to == "labels":
            good = float(((found > 0) == (wanted > 0.5)).float().mean())
        else:
            good = 1 - float((found - wanted).pow(2).sum() / wanted.var(0).sum() / len(wanted))
            model.score = torch.nn.Linear(model.config.hidden_size, 1, bias=False)
            torch.nn.init.zeros_(model.score.weight)
            model.config.num_labels = 1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return good


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("small", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--to", choices=["labels", "words"], default="labels")
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    good = fit(given.small, given.folder, given.to, given.steps)
    print(f"on public sentences that it did not see: {good:.3f}")
