"""Tiny models and tokenizers, made in memory, with the real classes and file formats."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    BertTokenizerFast,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

Kind = Literal["gpt2", "llama"]

SMALL = {
    "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "n_embd": 32, "n_layer": 2,
    "n_head": 4, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 0, "sliding_window": None,
}  # fmt: skip
"""Settings that make any of the models tiny; each configuration takes those that it knows."""


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with 256 byte tokens and an end-of-sequence token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<eos>", *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<eos>", padding_side="left"
    )


def model(kind: Kind = "gpt2", seed: int = 0, layers: int = 2) -> PreTrainedModel:
    """A random causal LM of a few layers over the byte vocabulary."""
    torch.manual_seed(seed)
    if kind == "gpt2":
        built: PreTrainedModel = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=257, n_positions=128, n_embd=32, n_layer=layers, n_head=4,
                bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )
        )  # fmt: skip
    else:
        built = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
                bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
    return built.eval()


def of_type(model_type: str, **settings: Any) -> PreTrainedModel:
    """A model of any type in float64, far from uniform: a wrong neighbour is seen."""
    known = AutoConfig.for_model(model_type)
    chosen = {name: value for name, value in SMALL.items() if hasattr(known, name)}
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**chosen, **settings})
    )
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.double()


def save_bert(
    folder: Path, words: Iterable[str] = (), kind: Any = BertModel, scale: float = 1.0
) -> str:
    """Save a random BERT and a tokenizer of these words, or of small letters, pieces and spaces."""
    letters = [*"abcdefghijklmnopqrstuvwxyz"]
    known = list(words) or [*letters, " ", *(f"##{letter}" for letter in letters)]
    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *known]
    BertTokenizerFast(vocab={word: i for i, word in enumerate(known)}).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(known), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    made = kind(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(scale)
    made.save_pretrained(folder)
    return str(folder)


def save(folder: Path, kind: Kind = "gpt2", seed: int = 0) -> Path:
    """Save model and tokenizer as ``from_pretrained`` expects them."""
    folder.mkdir(parents=True, exist_ok=True)
    model(kind, seed).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
