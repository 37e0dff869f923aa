"""The sentiment reward model of the demo: a small BERT encoder fine-tuned on public sentences.

Label smoothing (Szegedy et al. 2016, arXiv 1512.00567, section 7) with weight 0.1 keeps the
difference of the logits, the reward, small and graded: ±ln(0.95 / 0.05) = ±2.94 at best.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dprlhf.hardware import native_dtype

LABELS = ("NEGATIVE", "POSITIVE")
MAX_TOKENS = 64
LABEL_SMOOTHING = 0.1


def train_sentiment(
    encoder: Path,
    data: Path,
    out: Path,
    *,
    seed: int = 0,
    epochs: int = 2,
    batch_size: int = 32,
    learning_rate: float = 2e-4,
    quiet: bool = False,
) -> float:
    """Fine-tune and save an encoder as a sentence classifier; return its test accuracy."""
    import pandas as pd
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        get_linear_schedule_with_warmup,
    )

    train, test = (pd.read_parquet(data / f"{half}.parquet") for half in ("train", "test"))
    tokenizer: Any = AutoTokenizer.from_pretrained(encoder)
    tokens = tokenizer(train["text"].tolist(), truncation=True, max_length=MAX_TOKENS)["input_ids"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shuffler = torch.Generator().manual_seed(seed)
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            encoder,
            num_labels=2,
            id2label=dict(enumerate(LABELS)),
            label2id={label: i for i, label in enumerate(LABELS)},
            dtype=torch.float32,
        )
        lengths = [len(t) for t in tokens]
        batches = (rows for _ in range(epochs) for rows in _batches(lengths, batch_size, shuffler))
        steps = epochs * -(-len(tokens) // batch_size)
        labels = torch.tensor(train["label"].tolist())
        trained = list(model.parameters())
        optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.01, fused=True)
        schedule: Any = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
        loss_function = torch.nn.CrossEntropyLoss(label_smoothing=LABEL_SMOOTHING)
        bf16 = native_dtype("cpu") == torch.bfloat16
        model.train()
        shown = float("nan")
        with tqdm(total=steps, desc="fitting the reward", unit="step", disable=quiet) as bar:
            for rows in batches:
                batch = tokenizer.pad({"input_ids": [tokens[i] for i in rows]}, return_tensors="pt")
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                    logits = model(**batch).logits
                loss = loss_function(logits.float(), labels[rows])
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                schedule.step()
                value = float(loss.detach())
                shown = value if shown != shown else 0.95 * shown + 0.05 * value
                bar.set_postfix(loss=f"{shown:.3f}", refresh=False)
                bar.update()
    metrics = _measure(model, tokenizer, test["text"].tolist(), test["label"].tolist())
    accuracy: float = metrics["accuracy"]
    metrics |= {"accuracy": round(accuracy, 4), "train_sentences": len(train)}
    metrics |= {"seed": seed, "epochs": epochs}
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    if not quiet:
        print(f"sentiment reward model: accuracy {accuracy:.3f} on {len(test)} held-out sentences")
    return accuracy


def _measure(model: Any, tokenizer: Any, texts: list[str], labels: list[int]) -> dict[str, Any]:
    """Return the accuracy on held-out sentences, and the quantiles of the logit difference."""
    import torch

    scores = logit_difference(model, tokenizer, texts)
    quantiles = [0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0]
    return {
        "accuracy": float(((scores > 0) == torch.tensor(labels).bool()).float().mean()),
        "test_sentences": len(texts),
        "logit_difference_quantiles": {
            f"{q:g}": round(float(torch.quantile(scores, q)), 3) for q in quantiles
        },
    }


def _batches(lengths: list[int], batch_size: int, shuffler: Any) -> list[list[int]]:
    """Cut a random order into batches of rows of similar length, themselves in random order."""
    # Sorted by length inside chunks of 32 batches only, so that batches differ between epochs.
    import torch

    order: list[int] = torch.randperm(len(lengths), generator=shuffler).tolist()
    chunk = 32 * batch_size
    order = [
        row
        for start in range(0, len(order), chunk)
        for row in sorted(order[start : start + chunk], key=lengths.__getitem__)
    ]
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=shuffler).tolist()]


def logit_difference(model: Any, tokenizer: Any, texts: list[str], batch_size: int = 64) -> Any:
    """Return logit(POSITIVE) − logit(NEGATIVE) of each text, cut to 64 tokens, ``[len(texts)]``."""
    import torch

    model.eval()
    by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    scores = torch.empty(len(texts))

    settings: Any = {"truncation": True, "max_length": MAX_TOKENS, "padding": True}
    for start in range(0, len(texts), batch_size):
        rows = by_length[start : start + batch_size]
        batch = tokenizer([texts[i] for i in rows], **settings, return_tensors="pt")
        with torch.no_grad():
            logits = model(**batch).logits
        scores[rows] = logits[:, 1] - logits[:, 0]
    return scores
