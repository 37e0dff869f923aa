"""Objects of transformers and PEFT as arguments of ``dprlhf.train``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest

import dprlhf
from dprlhf import DprlhfError
from dprlhf.recipe import IN_MEMORY, load_recipe
from helpers import tiny

CAUSAL = peft.LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=True)


def length(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def train(tmp_path: Path, **settings: Any) -> Any:
    flat: dict[str, Any] = {
        "prompts": [f"user {i}" for i in range(12)], "reward": length, "epsilon": 8.0,
        "delta": 1e-3, "rounds": 2, "max_completion_length": 2, "output_dir": tmp_path / "run",
        "quiet": True,
    }  # fmt: skip
    return dprlhf.train(**flat | settings)


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_model_a_tokenizer_and_a_peft_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["c_proj"])
    objects = {"processing_class": tiny.tokenizer(), "peft_config": config}
    with monkeypatch.context() as patch:
        patch.setattr("dprlhf.training.trainer._report", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, model=tiny.model(), **objects)
    kept = load_recipe(tmp_path / "run" / "recipe.yaml").policy
    assert (kept.model_name_or_path, kept.adapter.rank) == (IN_MEMORY, 3)
    again = {"prompts": [f"user {i}" for i in range(12)], "reward": length, "quiet": True}
    with pytest.raises(DprlhfError, match="model was given in Python"):
        dprlhf.resume(tmp_path / "run", **again)
    result = dprlhf.resume(
        tmp_path / "run", model=tiny.model(), processing_class=tiny.tokenizer(), **again
    )
    assert result.policy.model.peft_config["default"].r == 3
    stored = json.loads((tmp_path / "run" / "policy" / "adapter_config.json").read_text())
    assert (stored["r"], stored["lora_alpha"], stored["target_modules"]) == (3, 6.0, ["c_proj"])


def test_what_cannot_be_taken_says_what_to_do(tmp_path: Path) -> None:
    folder = str(tiny.save(tmp_path / "model"))
    with pytest.raises(DprlhfError, match="a model that is named brings its tokenizer"):
        train(tmp_path, model=folder, processing_class=tiny.tokenizer())
    adapted = peft.get_peft_model(tiny.model(), CAUSAL)
    with pytest.raises(DprlhfError, match=r"has an adapter already: load the base"):
        train(tmp_path, model=adapted, processing_class=tiny.tokenizer())
    with pytest.raises(DprlhfError, match=r"argument 'peft_config' has no effect with"):
        dprlhf.train("recipe.yaml", peft_config=peft.LoraConfig())
    with pytest.raises(DprlhfError, match=r"rank_pattern"):
        train(tmp_path, model=folder, peft_config=peft.LoraConfig(rank_pattern={"c_attn": 2}))
    assert not (tmp_path / "run").exists()
