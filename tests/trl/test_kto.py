"""``PrivateKTOTrainer``: TRL's signature and rows, and the recipe and run that it makes."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import EarlyStoppingCallback, TrainerCallback

from dprlhf.errors import DprlhfError
from dprlhf.trl import PrivateKTOConfig, PrivateKTOTrainer
from dprlhf.trl.mapping import feedback_recipe_of
from dprlhf.tuning.space import value_at
from helpers.stages import logs

LORA = LoraConfig(r=1, target_modules=["c_attn"], task_type="CAUSAL_LM")


def made(model: str, folder: Path, **changes: Any) -> PrivateKTOTrainer:
    given = {k: changes.pop(k) for k in list(changes) if k in ("eval_dataset", "callbacks")}
    settings = {"max_completion_length": 8, "max_steps": 4, "use_cpu": True, "report_to": []}
    config = PrivateKTOConfig(output_dir=str(folder), privacy_epsilon=8.0, **(settings | changes))
    rows = Dataset.from_list(logs(0, 60))
    return PrivateKTOTrainer(
        model, args=config, train_dataset=rows, peft_config=LORA, user_column="user", **given
    )


def test_the_arguments_are_those_of_trl() -> None:
    theirs, own = (
        list(inspect.signature(kind.__init__).parameters)
        for kind in (trl.KTOTrainer, PrivateKTOTrainer)
    )
    assert own[: len(theirs)] == theirs
    assert own[len(theirs) :] == ["user_column"]


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        ({}, "update.loss_type", "kto"),
        ({"loss_type": "apo_zero_unpaired"}, "update.loss_type", "apo_zero_unpaired"),
        ({"beta": 0.3}, "update.beta", 0.3),
        ({"privacy_value_rounds": 1}, "update.value_rounds", 1),
        ({"max_completion_length": 9}, "data.max_completion_tokens", 9),
        ({"max_steps": 6}, "rounds", 6),
    ],
)
def test_a_setting_changes_the_recipe(changes: dict[str, Any], key: str, expected: Any) -> None:
    config = PrivateKTOConfig(output_dir="x", privacy_epsilon=4.0, **changes)
    adapter = {"type": "lora", "target_modules": ["c_attn"]}
    found: Any = feedback_recipe_of(config, model="gpt2", adapter=adapter, users=400, public=0)
    assert value_at(found, key) == expected


def test_the_loss_of_init_brings_its_defaults_and_needs_public_rows() -> None:
    config = PrivateKTOConfig(output_dir="x", privacy_epsilon=4.0, loss_type="linear_reward")
    adapter = {"type": "lora", "target_modules": ["c_attn"]}
    given: dict[str, Any] = {"model": "gpt2", "adapter": adapter, "users": 400}
    recipe = feedback_recipe_of(config, public=192, **given)
    assert (recipe.rounds, recipe.update.subspace.target_kl) == (1, 5.0)
    assert recipe.optimizer.learning_rate == 8.0
    with pytest.raises(DprlhfError, match="linear_reward needs public prompts"):
        feedback_recipe_of(config, public=0, **given)


def test_a_subspace_on_a_command_line_is_json() -> None:
    words = ["--output_dir=x", "--privacy_epsilon=4", "--privacy_subspace", '{"rank": 4}']
    (made,) = trl.TrlParser(PrivateKTOConfig).parse_args_and_config(words)
    assert made.privacy_subspace == {"rank": 4}


def test_evaluations_need_public_rows_and_a_stop_needs_evaluations(model, tmp_path) -> None:
    with pytest.raises(DprlhfError, match=r"^eval_strategy='steps': give eval_dataset"):
        made(model, tmp_path / "a", eval_strategy="steps", eval_steps=1)
    for best in ({}, {"metric_for_best_model": "loss"}):
        waits = made(model, tmp_path / "a", callbacks=[EarlyStoppingCallback()], **best)
        with pytest.raises(DprlhfError, match="give it, such as 'loss', and eval_strategy='steps'"):
            waits.train()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", ["ref_model", "data_collator", "compute_metrics"])
def test_an_argument_that_cannot_be_private_says_why(name: str) -> None:
    with pytest.raises(DprlhfError, match=f"^{name}: "):
        PrivateKTOTrainer("x", **{name: object()})


class Stop(TrainerCallback):
    """Ends a run after its second round."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_training_stop = state.global_step == 2
        return control


def test_a_run_from_trls_rows_stops_goes_on_and_is_evaluated(model: str, tmp_path: Path) -> None:
    public = Dataset.from_list(logs(100, 6))
    given: dict[str, Any] = {
        "eval_dataset": public, "privacy_declared_public": True, "privacy_value_rounds": 1,
    }  # fmt: skip
    first = made(model, tmp_path / "run", callbacks=[Stop()], **given)
    first.train()
    assert first.state.global_step == 2
    second = made(model, tmp_path / "run", **given)
    output = second.train(resume_from_checkpoint=True)
    assert output.global_step == 4
    assert output.metrics["epsilon"] <= 8.0
    assert second.result.value["tuned"].low <= second.result.value["tuned"].high
    losses = [e["eval_loss"] for e in second.state.log_history if "eval_loss" in e]
    assert second.evaluate()["eval_loss"] == pytest.approx(losses[-1])
    assert any("value_tuned_low" in entry for entry in second.state.log_history)
    second.save_model(tmp_path / "kept")
    assert (tmp_path / "kept/adapter_model.safetensors").is_file()
    assert json.loads((tmp_path / "run/privacy.json").read_text())["private"]


def test_the_longest_prompt_follows_from_public_rows(model: str, tmp_path: Path) -> None:
    public = Dataset.from_list(logs(100, 6, prompt="p" * 20))
    assert made(model, tmp_path, eval_dataset=public).recipe.data.max_prompt_tokens == 32
    room = made(model, tmp_path).recipe.data.max_prompt_tokens
    assert room == min(512, made(model, tmp_path)._policy.room - 8)
    given: dict[str, Any] = {"eval_dataset": public, "privacy_max_prompt_tokens": 9}
    assert made(model, tmp_path, **given).recipe.data.max_prompt_tokens == 9


def test_users_rows_are_not_evaluated(model: str, tmp_path: Path) -> None:
    trainer = made(model, tmp_path / "run")
    with pytest.raises(DprlhfError, match="are users' rows, too"):
        trainer.evaluate(Dataset.from_list(logs(0, 4)))
    users = Dataset.from_list(logs(0, 8))
    rows = users.remove_columns("label")
    config = PrivateKTOConfig(output_dir=str(tmp_path / "x"), privacy_epsilon=8.0)
    for given in ({"train_dataset": rows}, {"train_dataset": users, "eval_dataset": rows}):
        with pytest.raises(DprlhfError, match=f"^{[*given][-1]}: there is no column 'label'"):
            PrivateKTOTrainer(model, args=config, peft_config=LORA, **given)
