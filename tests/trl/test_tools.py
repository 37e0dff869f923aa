"""The private trainers take TRL's tools and environments."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest

from dprlhf.trl import PrivateGRPOConfig, PrivateGRPOTrainer
from helpers import agents


def called(completions: list[Any], **columns: Any) -> list[float]:
    return [float(any(m["role"] == "tool" for m in messages)) for messages in completions]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "rewards"),
    [
        ({"tools": [agents.add]}, ["called"]),
        ({"environment_factory": agents.Guessing}, ["called", "Guessing"]),
    ],
    ids=["tools", "environment"],
)
def test_a_trainer_with_an_agent(agent: dict[str, Any], rewards: list[str], tmp_path: Path) -> None:
    args = PrivateGRPOConfig(
        output_dir=str(tmp_path / "run"), privacy_epsilon=8.0, max_steps=2, num_generations=2,
        per_device_train_batch_size=8, max_completion_length=48, max_tool_calling_iterations=2,
        privacy_max_prompt_tokens=48, disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = PrivateGRPOTrainer(
        model=agents.save(tmp_path / "model"),
        reward_funcs=called,
        args=args,
        train_dataset=[{"prompt": agents.asked(f"{i} and 1?")} for i in range(12)],
        eval_dataset=[{"prompt": agents.asked(f"public {i}")} for i in range(3)],
        peft_config=peft.LoraConfig(r=2, target_modules=["c_attn"]),
        **agent,
    )
    assert trainer.reward_func_names == rewards
    assert trainer.reward_weights.tolist() == [1.0] * len(rewards)
    assert trainer.reward_funcs[0] is called
    if len(rewards) > 1:
        scores = trainer.reward_funcs[1](environments=[agents.Guessing(), agents.Adding()])
        assert [score is None for score in scores] == [False, True]
    assert trainer.recipe.rollout.agent.max_tool_calling_iterations == 2
    before = trainer.evaluate()
    trainer.train()
    assert set(before) <= set(trainer.evaluate())
    samples = json.loads((tmp_path / "run" / "samples.json").read_text())
    assert len(samples) == 3
