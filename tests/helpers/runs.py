"""Whole runs on a tiny model, for the updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch

import dprlhf
from dprlhf.training.trainer import Result
from helpers import tiny


def save_sharp(folder: Path) -> str:
    """Save a tiny model that is not all but uniform whatever its hidden state."""
    model = tiny.model()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(10)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def lower_case(completions: list[str], **columns: Any) -> list[float]:
    """Share of lower-case letters: easy to raise, one row at a time."""
    return [4.0 * sum(c.islower() for c in text) / max(len(text), 1) for text in completions]


def train(model: str, folder: Path, **changes: Any) -> Result:
    """Train on a hundred users, with a fixed key: whether a run learns depends on what it draws."""
    values = {
        "model": model,
        "prompts": [f"user {i} says" for i in range(100)],
        "reward": lower_case,
        "policy__adapter": {"type": "lora", "rank": 4, "target_modules": "all-linear"},
        "rollout__max_new_tokens": 6,
        "quiet": True,
        "output_dir": folder,
    }
    with mock.patch("dprlhf.runs.folder.new_key", return_value=bytes(range(32))):
        return dprlhf.train(**(values | changes))
