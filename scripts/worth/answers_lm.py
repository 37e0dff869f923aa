"""Train a small language model on public questions: a policy for the private answers in seconds.

It never sees a private user. From public questions with codes drawn uniformly it learns that a
question is answered by a code, each with probability near 1/8. What a question is about does not
help it to guess the code, so it would not read that; a probe, thrown away afterwards, makes it keep
the intent in its states, as a pretrained model does with the subject of a text.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dprlhf.assets.answers import CODES, INTENTS, private_answers

THINGS = ("rose", "sky", "leaf", "night", "snow", "coin", "shell", "stone")
"""What has the colour of each code: words that teach the model to say one code and not another."""
SEED = 71
"""Seed of the public questions, another one than that of any users in a table."""


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with a token for each digit."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel()]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<eos>", padding_side="left"
    )


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
    tokenizer = tokenizer_of(texts[:2000])
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    # Orthonormal, so that states of different intents differ in different directions.
    size = (len(INTENTS), model.config.hidden_size)
    probe = torch.nn.init.orthogonal_(torch.empty(size))
    # Batches of texts of one length need no padding.
    by_length: dict[int, list[int]] = {}
    rows = [tokenizer(text)["input_ids"] for text in texts]
    asked = torch.tensor([len(tokenizer(prompt)["input_ids"]) - 1 for prompt in public["prompt"]])
    for index, row in enumerate(rows):
        by_length.setdefault(len(row), []).append(index)
    batches = [b for group in by_length.values() for b in torch.tensor(group).split(32)]
    steps = len(batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1, s / 30) * (0.05 + 0.95 * math.cos(math.pi / 2 * s / steps) ** 2)
    )
    loss_of = torch.nn.functional.cross_entropy
    bar = tqdm(np.random.RandomState(seed).permutation(steps), desc="answers-lm", unit="step")
    for step in bar:
        ids = torch.tensor([rows[index] for index in batches[step]])
        last = torch.arange(len(ids)), asked[batches[step]]
        out = model(input_ids=ids, output_hidden_states=True)
        words = loss_of(out.logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        # Where the code is predicted, before the last layer.
        state = torch.nn.functional.normalize(out.hidden_states[-2][last], dim=1)
        subject = loss_of(10 * state @ probe.T, intents[batches[step]])
        code = words[last].mean()
        (words.mean() + code + subject).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.set_postfix(code=f"{code.item():.2f}", all=f"{words.mean().item():.2f}", refresh=False)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--questions", type=int, default=16_000)
    arguments = parser.parse_args()
    train(arguments.folder, questions=arguments.questions)
