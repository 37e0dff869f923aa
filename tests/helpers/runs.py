"""Whole runs on a tiny model: settings, a reward, and what a run leaves in its folder."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

import dprlhf
from dprlhf.privacy.ledger import read_ledger
from dprlhf.training.reinforcement import Result
from helpers import tiny

ADAPTER = {"type": "lora", "rank": 2, "target_modules": ["c_attn"]}


def lower_case(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Share of lower-case letters among the characters: easy to raise, one row at a time."""
    return [4.0 * sum(c.islower() for c in text) / max(len(text), 1) for text in completions]


def save_sharp(folder: Path) -> str:
    """Save a tiny model that is not all but uniform whatever its hidden state."""
    model = tiny.model()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(10)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def longest(prompts: Any) -> dict[str, int]:
    """Return the longest prompt as a setting, 16 tokens if texts have no more bytes, else none.

    A run tries its largest shapes before it starts, by itself with prompts of 64 tokens: that takes
    longer than what many tests then do with it.
    """
    fit = isinstance(prompts, list) and all(
        text is None or (isinstance(text, str) and len(text.encode()) <= 16) for text in prompts
    )
    return {"data__max_prompt_tokens": 16} if fit else {}


RATE = "optimizer__learning_rate"


def _fixed(changes: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Return what the expected values of many tests rest on, unless a test says otherwise."""
    fixed = {
        "rollout__responses": 2, "rollout__batch_size": 128,
        **others,
    }  # fmt: skip
    for name, key in (("num_generations", "rollout__responses"), ("learning_rate", RATE)):
        if name in changes:
            fixed.pop(key, None)
    return {name: one for name, one in fixed.items() if name.partition("__")[0] not in changes}


def run_settings(model: str, **changes: Any) -> dict[str, Any]:
    """Return the arguments of ``dprlhf.train`` for five short rounds of 120 users."""
    prompts = changes.get("prompts", [f"user {i} says" for i in range(120)])
    return {
        "model": model, "prompts": prompts, **longest(prompts), "reward": lower_case,
        "epsilon": 8.0, "rounds": 5, "learning_rate": 0.05, "policy__adapter": ADAPTER,
        "rollout__max_new_tokens": 6, "quiet": True, **_fixed(changes), **changes,
    }  # fmt: skip


def train(model: str, folder: Path, **changes: Any) -> Result:
    """Train on a hundred users, with a fixed key: whether a run learns depends on what it draws."""
    prompts = changes.get("prompts", [f"user {i} says" for i in range(100)])
    values = {
        "model": model, "prompts": prompts, **longest(prompts), "reward": lower_case,
        "policy__adapter": {"type": "lora", "rank": 4, "target_modules": "all-linear"},
        "rollout__max_new_tokens": 6, "quiet": True, "output_dir": folder,
        **_fixed(changes, optimizer__learning_rate=1e-3),
    }  # fmt: skip
    with mock.patch("dprlhf.runs.folder.new_key", return_value=bytes(range(32))):
        return dprlhf.train(**(values | changes))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoint" / "policy.safetensors")


def charged(folder: Path) -> list[int]:
    return [e.body["round"] for e in read_ledger(folder / "ledger.jsonl") if e.kind == "charge"]
