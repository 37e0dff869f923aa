"""The recipes of verifiable rewards, shrunk to a tiny model with a few questions of its own."""

import json
from pathlib import Path

import pytest

import dprlhf
from dprlhf.recipe.trl_names import overrides_of
from helpers import tiny

RECIPES = Path(__file__).parents[2] / "recipes"


def write_questions(path: Path, *, users: int, first: int = 0) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{first + i} plus one?"}],
            "answer": f"add them\n#### {first + i + 1}",
            "user": f"{path.stem} {i // 2}",
        }
        for i in range(2 * users)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


TINY = (
    "policy.dtype=float32", "data.max_prompt_tokens=48",
    "rollout.batch_size=32", "rounds=2", "evaluation.prompts=8", "evaluation.every=null",
)  # fmt: skip


@pytest.mark.slow
def test_grpo_of_a_gpu_runs_on_a_tiny_model_with_the_flags_of_trl(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model", "llama")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(model)
    write_questions(tmp_path / "questions.jsonl", users=24)
    write_questions(tmp_path / "public.jsonl", users=40, first=500)
    flags = ["--model_name_or_path", str(model), "--num_generations=4"]
    flags += ["--max_completion_length", "6", "--per_device_train_batch_size=8", "--beta=0.01"]
    result = dprlhf.train(
        RECIPES / "grpo_gpu.yaml",
        overrides=[
            *overrides_of(flags),
            f"data.path={tmp_path / 'questions.jsonl'}",
            f"evaluation.data.path={tmp_path / 'public.jsonl'}",
            *TINY,
        ],
        output_dir=tmp_path / "run",
        quiet=True,
    )
    taken = dprlhf.load_recipe(tmp_path / "run" / "recipe.yaml")
    assert (taken.rollout.responses, taken.kl.beta) == (4, 0.01)
    assert result.plan.users == 24
    assert 0 < result.plan.guarantee.epsilon <= 4
    assert result.after is not None
