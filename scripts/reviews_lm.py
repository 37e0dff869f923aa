"""Train a small language model on public film reviews: a policy that a CPU tunes in seconds.

The Rotten Tomatoes sentences are public, so the model has never seen a private user. It writes
short review-like sentences, good and bad, which is all that a comparison of updates needs.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pandas as pd
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dprlhf.assets import path


def tokenizer_of(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=["<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<eos>", padding_side="left"
    )


def train(folder: Path, *, epochs: int, seed: int = 0) -> None:
    texts = [str(t) for t in pd.read_parquet(path("rotten-tomatoes") / "train.parquet")["text"]]
    tokenizer = tokenizer_of(texts, 4096)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    # Between sentences stands <eos>; the model reads a stream of them.
    stream = [0]
    for text in texts:
        stream += [*tokenizer(text)["input_ids"], 0]
    length, rows = 64, 32
    blocks = torch.tensor(stream[: len(stream) // length * length]).reshape(-1, length)
    steps = epochs * (len(blocks) // rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1, s / 50) * (0.05 + 0.95 * math.cos(math.pi / 2 * s / steps) ** 2)
    )
    order = torch.Generator().manual_seed(seed)
    batches = (
        b
        for _ in range(epochs)
        for b in torch.randperm(len(blocks), generator=order).split(rows)
        if len(b) == rows
    )
    with tqdm(total=steps, desc="reviews-lm", unit="step") as bar:
        for chosen in batches:
            loss = model(input_ids=blocks[chosen], labels=blocks[chosen]).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
            bar.update()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    train(arguments.folder, epochs=arguments.epochs)
