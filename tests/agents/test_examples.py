"""The worked examples: a calculator and a game, and the recipe of an agent on a tiny model."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

import dprlhf
from dprlhf.agents import Agent
from helpers import agents, tiny
from helpers.agents import written

ROOT = Path(__file__).parents[2]
MINE: dict[str, Any] = runpy.run_path(str(ROOT / "examples/my_agents.py"))


def test_the_calculator_and_the_game() -> None:
    assert MINE["calculate"](6, "*", 7) == 42.0
    game = MINE["NumberGame"]()
    assert "from 1 to 3" in game.reset(highest=3)
    answers = [game.guess(number) for number in (1, 2, 3)]
    assert "Right." in answers
    assert game.get_reward() == pytest.approx(1 / 3)
    shown = [tool.__name__ for tool in Agent([MINE["calculate"]], MINE["NumberGame"]).shown]
    assert shown == ["calculate", "guess"]


def save_model(folder: Path) -> Path:
    """Save a tiny Llama whose tokenizer has a token for each of a few calls."""
    tokenizer = tiny.tokenizer()
    calls = [written("calculate", left=a, sign="+", right=1) for a in range(5)]
    calls = [call.replace("'", '"') for call in calls]
    tokenizer.add_tokens([*calls, *(written("guess", number=n) for n in range(1, 6))])
    tokenizer.chat_template = agents.TEMPLATE
    model = tiny.model("llama")
    model.resize_token_embeddings(len(tokenizer))
    folder.mkdir()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_questions(path: Path, users: int) -> None:
    rows = [
        {
            "prompt": agents.asked(f"{path.stem[0]} {i} plus one"),
            "answer": f"#### {i + 1}",
            "user": f"{path.stem} {i}",
        }
        for i in range(users)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_the_recipe_of_an_agent_runs_on_a_tiny_model(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    write_questions(tmp_path / "questions.jsonl", 12)
    write_questions(tmp_path / "public.jsonl", 8)
    result = dprlhf.train(
        ROOT / "recipes/agent_gpu.yaml",
        overrides=[
            f"policy.model_name_or_path={save_model(tmp_path / 'model')}",
            f"data.path={tmp_path / 'questions.jsonl'}",
            f"evaluation.data.path={tmp_path / 'public.jsonl'}",
            "policy.dtype=float32", "data.max_prompt_tokens=60", "rounds=2",
            "rollout.max_new_tokens=40",
            "rollout.responses=2", "rollout.batch_size=8", "evaluation.prompts=4",
            "rollout.agent.environment=examples/my_agents.py:NumberGame",
        ],
        output_dir=tmp_path / "run",
        quiet=True,
    )  # fmt: skip
    assert 0 < result.plan.guarantee.epsilon <= 4
    assert result.after is not None
