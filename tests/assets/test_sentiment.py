import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from dprlhf.assets import sentiment
from helpers import tiny

pytestmark = pytest.mark.slow

GOOD, BAD = ("superb", "moving"), ("dull", "awful")
FILLER = ("the", "film", "is", "a", "story", "of", "two", "men", "and", "their", "car")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny.save_bert(tmp_path_factory.mktemp("encoder"), (*FILLER, *GOOD, *BAD)))


def sentences(count: int, seed: int) -> pd.DataFrame:
    """Neutral words with one telling word at a random place."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count)
    texts = []
    for label in labels:
        words = list(rng.choice(FILLER, rng.integers(3, 20)))
        words.insert(int(rng.integers(len(words))), str(rng.choice((BAD, GOOD)[label])))
        texts.append(" ".join(words))
    return pd.DataFrame({"text": texts, "label": labels})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    sentences(600, 1).to_parquet(folder / "train.parquet", index=False)
    sentences(200, 2).to_parquet(folder / "test.parquet", index=False)
    return folder


def train(encoder: Path, data: Path, out: Path, seed: int = 0, epochs: int = 6) -> float:
    return sentiment.train_sentiment(
        encoder, data, out, seed=seed, epochs=epochs, learning_rate=3e-3, quiet=True
    )


@pytest.fixture(scope="module")
def trained(encoder: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    assert train(encoder, data, out) > 0.9
    return out


def test_the_saved_folder_is_a_standard_classifier(trained: Path, data: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(trained)
    tokenizer = AutoTokenizer.from_pretrained(trained)
    assert model.config.id2label == {0: "NEGATIVE", 1: "POSITIVE"}
    assert model.config.label2id == {"NEGATIVE": 0, "POSITIVE": 1}
    # The accuracy again, one sentence at a time and without padding.
    test = pd.read_parquet(data / "test.parquet")
    with torch.no_grad():
        logits = [model(**tokenizer(t, return_tensors="pt")).logits[0] for t in test["text"]]
    scores = torch.stack(logits).diff(dim=1)[:, 0]
    accuracy = float(np.mean((scores > 0).numpy() == (test["label"] == 1).to_numpy()))
    metrics = json.loads((trained / "metrics.json").read_text())
    assert metrics["accuracy"] == pytest.approx(accuracy, abs=1e-9)
    assert metrics["logit_difference_quantiles"]["0.5"] == pytest.approx(
        float(scores.quantile(0.5)), abs=2e-3
    )
    found = sentiment.logit_difference(model, tokenizer, test["text"].tolist())
    torch.testing.assert_close(found, scores, rtol=0, atol=1e-4)
