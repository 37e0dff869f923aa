"""A Llama of four layers with its own tokenizer: small enough to be trained on a CPU in minutes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def tokenizer_of(texts: list[str], size: int, pre_tokenizer: Any) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of at most ``size`` tokens; token 0 ends a text."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizer
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<eos>", padding_side="left"
    )


class Fit:
    """A model under training with AdamW, whose step size warms up and falls along a cosine.

    Args:
        words: Number of tokens of the vocabulary.
        width: Hidden size.
        steps: Number of steps.
        warmup: Number of steps in which the step size rises.
        seed: Seed of the weights.
    """

    def __init__(self, words: int, width: int, *, steps: int, warmup: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=words,
                hidden_size=width,
                intermediate_size=3 * width,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=4,
                max_position_embeddings=128,
                tie_word_embeddings=True,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.1)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer,
            lambda s: min(1, s / warmup) * (0.05 + 0.95 * math.cos(math.pi / 2 * s / steps) ** 2),
        )

    def step(self, loss: torch.Tensor) -> None:
        """Take a step down the gradient of a loss."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        """Write the model and its tokenizer into ``folder``."""
        self.model.eval().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
