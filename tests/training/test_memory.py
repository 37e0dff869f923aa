"""What a run takes of a device's memory, counted without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dprlhf import recipe
from dprlhf.cli.app import app
from dprlhf.policies.loading import load_policy
from dprlhf.training.memory import PASSES, USED, Memory, memory_of
from helpers import tiny
from helpers.recipes import least

PROMPT, RESPONSE = 40, 16


def settings(folder: Path, kind: Any = "llama", **policy: Any) -> recipe.Recipe:
    return least(
        policy={"model_name_or_path": str(tiny.save(folder, kind)), **policy},
        data={"path": "prompts.jsonl", "max_prompt_tokens": PROMPT},
        rollout={"max_new_tokens": RESPONSE},
    )


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_row_keeps_what_autograd_keeps_on_a_device(tmp_path: Path, kind: Any) -> None:
    made = settings(tmp_path, kind, dtype="float32")
    policy = load_policy(made.policy)
    together = policy.shared_rows(made.rollout.responses, PROMPT, RESPONSE)
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    tokens = torch.ones(together, PROMPT + RESPONSE, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.response_logprobs(tokens, torch.ones_like(tokens), RESPONSE, together)
    weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    true = sum(storage.nbytes() for place, storage in kept.items() if place not in weights)
    estimate = memory_of(made).updated_response * together / PASSES
    assert estimate == pytest.approx(true, rel=0.15)


def test_weights_are_those_of_the_model_and_the_recipe(tmp_path: Path) -> None:
    policy = load_policy(settings(tmp_path, dtype="bfloat16").policy)
    frozen = [p for p in policy.model.parameters() if not p.requires_grad]
    half = memory_of(settings(tmp_path, dtype="bfloat16"))
    assert half.weights == sum(p.numel() * p.itemsize for p in frozen)
    assert half.trained == (4 + 8 + 8) * policy.dimension  # Adam
    quantised = memory_of(settings(tmp_path, dtype="bfloat16", quantization="nf4"))
    assert quantised.weights < half.weights
    assert quantised.trained == half.trained
    full = memory_of(settings(tmp_path, adapter={"type": "full"}))
    assert (full.weights, full.trained) == (0, 24 * full.dimension)


def test_checkpointing_keeps_less(tmp_path: Path) -> None:
    plain = memory_of(settings(tmp_path)).updated_response
    assert memory_of(settings(tmp_path, gradient_checkpointing=True)).updated_response < plain


def test_the_largest_power_of_two_that_fits() -> None:
    memory = Memory(10, 100, 50, 30, sampled_response=7, updated_response=20)
    exactly = (100 + 50 + 30 + 4 * 20) / USED
    assert memory.fitting(exactly)["update.batch_size"] == 4
    assert memory.fitting(exactly - 1)["update.batch_size"] == 2
    assert memory.fitting(exactly)["rollout.batch_size"] == 8
    assert set(memory.fitting(100).values()) == {0}


def test_the_command_shows_it(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(settings(tmp_path / "model").model_dump(mode="json")))
    shown = CliRunner().invoke(app, ["plan", str(file), "--hardware", "2", "--json"])
    assert json.loads(shown.stdout)["fitting"]["update.batch_size"] >= 1
    both = CliRunner().invoke(app, ["plan", str(file), "--hardware", "2", "--rounds", "4"])
    assert "plan: --rounds has no effect beside --hardware" in str(both.exception)
    nothing = CliRunner().invoke(app, ["plan", "--users", "9", "--epsilon", "1", "--hardware", "2"])
    assert nothing.exit_code != 0
