"""The private trainers run as ``dprlhf.train`` runs, and behave as TRL's do."""

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import peft
import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2ForSequenceClassification,
    TrainerCallback,
)

import dprlhf
from dprlhf.errors import DprlhfError
from dprlhf.privacy.file_times import public_time
from dprlhf.recipe import make_recipe
from dprlhf.runs.folder import RunFolder
from dprlhf.runs.publish import merge
from dprlhf.training.processes import Processes
from dprlhf.trl import PrivateGRPOConfig, PrivateGRPOTrainer
from dprlhf.trl.arguments import continued
from dprlhf.trl.evaluation import as_evaluation, as_logs
from helpers import agents, tiny
from helpers.recipes import recipe_settings
from helpers.runs import lower_case, save_sharp, weights

PROMPTS = [{"prompt": f"user {i} says"} for i in range(60)]
PUBLIC = [{"prompt": f"nobody {i} asks"} for i in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_sharp(tmp_path_factory.mktemp("model"))


def lora(**changes: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 2, "target_modules": ["c_attn"], **changes})


def settings(folder: Path, cls: Any = PrivateGRPOConfig, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "output_dir": str(folder), "privacy_epsilon": 8.0, "max_steps": 3, "num_generations": 2,
        "per_device_train_batch_size": 4, "max_completion_length": 6, "learning_rate": 0.05,
        "privacy_max_prompt_tokens": 32, "disable_tqdm": True,
    }  # fmt: skip
    return cls(**(values | changes))


def trainer(model: Any, folder: Path, **changes: Any) -> PrivateGRPOTrainer:
    given: dict[str, Any] = {"reward_funcs": lower_case, "train_dataset": PROMPTS}
    given["peft_config"] = changes.pop("peft_config", lora())
    for name in ("reward_funcs", "train_dataset", "eval_dataset", "processing_class", "callbacks",
                 "reward_processing_classes", "user_column", "compute_metrics", "tools",
                 "rollout_func", "environment_factory"):  # fmt: skip
        if name in changes:
            given[name] = changes.pop(name)
    return PrivateGRPOTrainer(model, args=settings(folder, **changes), **given)


def same_weights(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dprlhf.runs.folder.new_key", lambda: bytes(range(32)))


def test_a_trainer_is_the_run_of_its_recipe(model: str, tmp_path: Path, one_key: None) -> None:
    made = trainer(model, tmp_path / "a", eval_dataset=PUBLIC)
    out = made.train()
    result = dprlhf.train(
        made.recipe, prompts=PROMPTS, reward=lower_case, evaluation_prompts=PUBLIC,
        output_dir=tmp_path / "b", quiet=True,
    )  # fmt: skip
    assert same_weights(tmp_path / "a", tmp_path / "b")
    cards = [json.loads((tmp_path / run / "privacy.json").read_text()) for run in "ab"]
    for card in cards:
        assert card.pop("earlier_runs").startswith(
            "none declared"
        )  # the second is beside the first
    assert cards[0] == cards[1] == {k: v for k, v in made.privacy.items() if k != "earlier_runs"}
    assert out.global_step == 3
    assert math.isnan(out.training_loss)
    assert out.metrics["eval_reward"] == result.after.mean
    assert 0 < out.metrics["epsilon"] <= 8


class Stop(TrainerCallback):  # type: ignore[misc]
    """Interrupts a run, or asks it to stop, after a round."""

    def __init__(self, after: int, *, politely: bool = False) -> None:
        self.after, self.politely = after, politely
        self.seen: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        assert kwargs["model"] is not None
        if state.global_step == self.after:
            if not self.politely:
                raise KeyboardInterrupt
            control.should_training_stop = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append("reward" if "grad_norm" in logs else "eval")


@pytest.mark.slow
def test_an_interrupted_run_continues_to_the_same_weights(model, tmp_path, one_key):
    trainer(model, tmp_path / "a").train()
    broken = trainer(model, tmp_path / "b", callbacks=[Stop(2)])
    with pytest.raises(KeyboardInterrupt, match="continue with"):
        broken.train()
    with pytest.raises(DprlhfError, match="Make a new trainer"):
        broken.train(resume_from_checkpoint=True)
    with pytest.raises(DprlhfError, match="optimizer"):
        trainer(model, tmp_path / "b", learning_rate=0.1).train(resume_from_checkpoint=True)
    ledger = (tmp_path / "b" / "ledger.jsonl").read_text()
    with pytest.raises(DprlhfError, match=r"train\(resume_from_checkpoint=True\)"):
        trainer(model, tmp_path / "b").train()
    made = trainer(model, tmp_path / "b")
    out = made.train(resume_from_checkpoint=str(tmp_path / "b/checkpoint"))
    assert same_weights(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / "ledger.jsonl").read_text().startswith(ledger)
    assert (out.global_step, out.metrics["epsilon"] <= 8) == (3, True)
    with pytest.raises(DprlhfError, match="this trainer has trained"):
        made.train()
    again = trainer(model, tmp_path / "b").train(resume_from_checkpoint=str(tmp_path / "b"))
    assert again.global_step == 3
    with pytest.raises(DprlhfError, match="there is a run already"):
        trainer(model, tmp_path / "b").train()


def test_a_callback_stops_a_run_that_can_be_saved_and_continued(model: str, tmp_path: Path) -> None:
    stop = Stop(1, politely=True)
    stopped = trainer(model, tmp_path / "a", callbacks=[stop])
    assert stopped.train().global_step == 1
    assert stop.seen == ["reward", "reward"]
    assert [entry["step"] for entry in stopped.state.log_history] == [1, 1]
    stopped.save_model(tmp_path / "saved")
    assert (tmp_path / "saved/adapter_model.safetensors").is_file()
    again = trainer(model, tmp_path / "a")
    assert again.train(resume_from_checkpoint=True).global_step == 3


EVERY_ROUND = {"eval_dataset": PUBLIC, "eval_strategy": "steps", "eval_steps": 1}


def test_the_events_that_callbacks_hear_of(model: str, tmp_path: Path) -> None:
    heard: list[str] = []
    all_ = TrainerCallback()
    for event in [name for name in dir(TrainerCallback) if name.startswith("on_")]:
        setattr(all_, event, lambda *given, event=event, **values: heard.append(event[3:]))
    made = trainer(model, tmp_path / "a", callbacks=[all_], max_steps=2, **EVERY_ROUND)
    made.train()
    made.evaluate()
    begin, evaluated = ["step_begin", "step_end", "log"], ["log", "evaluate"]
    assert heard == [
        "init_end", "train_begin", *begin, *evaluated, *begin, "log", "train_end", *evaluated,
    ]  # fmt: skip


def test_several_public_datasets_are_evaluated_one_by_one(model: str, tmp_path: Path) -> None:
    given = {"one": PUBLIC[:2], "other": [{**row, "more": 1} for row in PUBLIC[2:]]}
    made = trainer(model, tmp_path / "a", eval_dataset=given, privacy_declared_public=True)
    assert made.eval_dataset is given
    assert made.train_dataset is PROMPTS
    assert len(made._public) == len(PUBLIC)
    both = made.evaluate()
    assert {name.split("_")[1] for name in both} == {"one", "other"}
    assert both["eval_one_reward"] == made.evaluate("one")["eval_reward"]
    assert both == made.evaluate(given)
    assert trainer(model, tmp_path / "a").eval_dataset is None
    unlike = {"one": PUBLIC, "other": [{"prompt": [{"role": "user", "content": "x"}]}]}
    refused = ({"one": PUBLIC, "users": PROMPTS}, "is the train"), (unlike, "differ"), ({}, "empty")
    for wrong, said in refused:
        with pytest.raises(DprlhfError, match=f"^eval_dataset.*{said}"):
            trainer(model, tmp_path / "a", eval_dataset=wrong)


class Watch(TrainerCallback):
    """Puts a hook into the model, as ``wandb.watch`` does."""

    def __init__(self, event: str, put: str) -> None:
        self.put = put
        setattr(self, event, self._watch)

    def _watch(self, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
        weight = next(p for p in model.parameters() if p.requires_grad)
        getattr(weight if self.put == "register_hook" else model, self.put)(lambda *values: None)


@pytest.mark.parametrize(
    ("event", "put"),
    [("on_train_begin", "register_hook"), ("on_step_end", "register_forward_hook")],
)
def test_a_callback_may_not_look_into_the_model(model, tmp_path, event, put):
    made = trainer(model, tmp_path / "a", callbacks=[Watch(event, put)])
    with pytest.raises(DprlhfError, match="callbacks: Watch: there is a hook in"):
        made.train()
    assert len(made.state.log_history) == 0


def test_hooks_that_came_after_the_trainer_was_made_are_refused(model: str, tmp_path: Path) -> None:
    seen: list[Any] = []
    made = trainer(model, tmp_path / "a")
    hook = made.model.register_forward_hook(lambda module, args, out: seen.append(args))
    with pytest.raises(DprlhfError, match="the model: there is a hook in the whole model"):
        made.train()
    assert not seen
    assert not (tmp_path / "a").exists()
    hook.remove()
    made.train()  # nothing has moved yet


def test_a_callback_that_lacks_its_metric_is_refused_before_there_is_a_folder(model, tmp_path):
    class Wrong(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *given: Any, **values: Any) -> None:
            raise AssertionError("user 7 says")  # it may have read the rows: not for a log

    with pytest.raises(DprlhfError, match="AssertionError during the run; its text") as hidden:
        trainer(model, tmp_path / "a", callbacks=[Wrong()]).train()
    assert "user 7" not in str(hidden.value)
    for best in ({}, {"metric_for_best_model": "reward", "eval_dataset": PUBLIC}):
        waits = trainer(model, tmp_path / "b", callbacks=[EarlyStoppingCallback()], **best)
        with pytest.raises(DprlhfError, match="EarlyStoppingCallback watches metric_for_best"):
            waits.train()
    assert not (tmp_path / "b").exists()


def test_no_rows_are_no_missing_column(model: str, tmp_path: Path) -> None:
    for name in ("train_dataset", "eval_dataset"):
        for rows, said in (([], "no rows"), ([{"text": "x"}], "no column 'prompt'")):
            with pytest.raises(DprlhfError, match=f"^{name}.*{said}"):
                trainer(model, tmp_path / "a", **{name: Dataset.from_list(rows)})


def test_a_model_that_is_frozen_in_part_is_not_trained_whole(model: str, tmp_path: Path) -> None:
    given = AutoModelForCausalLM.from_pretrained(model)
    for parameter in given.transformer.wte.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(DprlhfError, match="of its parameters are frozen"):
        trainer(given, tmp_path / "a", peft_config={"type": "full"})


@pytest.mark.slow
def test_the_log_has_released_and_public_values_under_trls_names(model, tmp_path):
    made = trainer(
        model, tmp_path / "a", eval_dataset=PUBLIC, eval_strategy="steps", eval_steps=1,
        lr_scheduler_type="linear",
    )  # fmt: skip
    made.train()
    history = made.state.log_history
    steps = [(entry["step"], "eval_reward" in entry) for entry in history]
    assert steps == [
        (0, True),
        (1, False),
        (1, True),
        (2, False),
        (2, True),
        (3, False),
        (3, True),
        (3, False),
    ]
    rounds = [entry for entry in history if "grad_norm" in entry and "train_loss" not in entry]
    metrics = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    for entry, line in zip(rounds, metrics, strict=True):
        assert entry["grad_norm"] == line["released_gradient_norm"]
        assert entry.get("reward") == line["private_reward_noised"]
        assert entry.get("rewards/lower_case/mean") == line["private_reward_noised"]
        assert not entry.keys() & {"loss", "reward_std", "entropy", "completions/mean_length"}
    assert [entry["learning_rate"] for entry in rounds] == pytest.approx([0.05, 0.1 / 3, 0.05 / 3])
    assert rounds[-1]["epoch"] == 1.0
    last = [entry["eval_reward"] for entry in history if "eval_reward" in entry][-1]
    assert made.evaluate()["eval_reward"] == last


def test_a_public_metric_of_ones_own_is_in_every_evaluation_of_the_run(model, tmp_path):
    """As in transformers, also in those that a training makes; and in the run's files."""

    def longest(prediction: Any) -> dict[str, Any]:
        assert len(prediction.inputs) == len(prediction.label_ids) == len(PUBLIC)
        most = np.float32(max(map(len, prediction.predictions)))
        return {"eval_longest": most, "none": math.inf}

    made = trainer(
        model, tmp_path / "a", eval_dataset=PUBLIC, compute_metrics=longest, max_steps=2,
        eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    assert made.train().metrics["eval_longest"] > 0
    told = {entry["step"]: entry["eval_longest"] for entry in made.state.log_history
            if "eval_reward" in entry}  # fmt: skip
    assert sorted(told) == [0, 1, 2]
    lines = (tmp_path / "a/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["public_longest"] == told[1]
    assert made.evaluate(metric_key_prefix="test")["test_longest"] == told[2]
    evaluated = (tmp_path / "a/evaluation.json").read_text()
    assert json.loads(evaluated)["after"]["none"]["mean"] is None  # JSON has no infinity
    with pytest.raises(DprlhfError, match=r"are users' rows, too.*privacy_declared_public=True"):
        made.evaluate(PROMPTS[:3])


def test_users_prompts_are_not_public_whatever_is_declared(model: str, tmp_path: Path) -> None:
    """A declaration is for public texts that a user has, too, and not for the users' dataset."""
    declared: dict[str, Any] = {"privacy_declared_public": True}
    with pytest.raises(DprlhfError, match=r"^eval_dataset is the train_dataset"):
        trainer(model, tmp_path / "a", eval_dataset=PROMPTS, **declared)
    copied = trainer(model, tmp_path / "a", eval_dataset=list(PROMPTS), **declared)
    with pytest.raises(DprlhfError, match=r"^evaluation\.data: these are the users' rows"):
        copied.train()
    assert not (tmp_path / "a").exists()
    with pytest.raises(DprlhfError, match=r"^eval_dataset is the train_dataset"):
        copied.evaluate(PROMPTS)
    for undeclared in (Dataset.from_list(PROMPTS), PROMPTS[:3]):
        with pytest.raises(
            DprlhfError, match=r"^evaluation\.data: some of its rows are users' row"
        ):
            copied.evaluate(undeclared)
    declared_of = trainer(model, tmp_path / "b", eval_dataset=PROMPTS[:3], **declared)
    assert declared_of.evaluate()["eval_reward"] > -1


@pytest.mark.slow
def test_what_is_saved_loads_as_trls(model: str, tmp_path: Path) -> None:
    made = trainer(model, tmp_path / "a", privacy_lora_fa=True)
    with pytest.raises(DprlhfError, match=r"before train\(\)"):
        made.save_model()
    made.train()
    made.save_model()
    made.save_model(tmp_path / "saved")
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        expected = made.model(tokens).logits
        for place in (tmp_path / "a", tmp_path / "saved", tmp_path / "a/policy"):
            loaded = peft.AutoPeftModelForCausalLM.from_pretrained(place)
            assert torch.allclose(loaded(tokens).logits, expected, atol=1e-5)
            assert AutoTokenizer.from_pretrained(place).padding_side == "left"
            assert json.loads((place / "dprlhf_privacy.json").read_text())["runs"]
    for file in (tmp_path / "a").iterdir():
        assert file.stat().st_mtime == public_time(file, tmp_path / "a")


@pytest.mark.slow
def test_all_weights_are_trained_where_the_config_says_so(model, tmp_path, one_key):
    made = trainer(model, tmp_path / "a", peft_config={"type": "full"}, learning_rate=1e-3)
    before = {n: p.detach().clone() for n, p in made.model.named_parameters()}
    made.train()
    assert made.privacy["dimension"] == sum(p.numel() for p in before.values())
    moved = [n for n, p in made.model.named_parameters() if not torch.equal(p, before[n])]
    assert moved == list(before)
    made.save_model(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, made.model.get_parameter(name))
    merged = AutoModelForCausalLM.from_pretrained(merge(tmp_path / "a", tmp_path / "merged"))
    assert torch.equal(merged.get_input_embeddings().weight, loaded.get_input_embeddings().weight)
    assert "library_name: transformers" in (tmp_path / "saved/README.md").read_text()
    broken = trainer(
        model, tmp_path / "b", peft_config={"type": "full"}, learning_rate=1e-3, callbacks=[Stop(1)]
    )
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    again = trainer(model, tmp_path / "b", peft_config={"type": "full"}, learning_rate=1e-3)
    again.train(resume_from_checkpoint=True)
    assert same_weights(tmp_path / "a", tmp_path / "b")


@pytest.mark.slow
def test_a_model_that_a_private_run_left_must_be_counted(model: str, tmp_path: Path) -> None:
    first = trainer(model, tmp_path / "a", peft_config={"type": "full"})
    first.train()
    tokenizer = AutoTokenizer.from_pretrained(model)

    def left(place: str) -> Any:
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "a/policy")
        found.config._name_or_path = place  # the record in its config is enough
        return found

    for place in (str(tmp_path / "a/policy"), ""):
        with pytest.raises(DprlhfError, match="name that run"):
            trainer(left(place), tmp_path / "b", processing_class=tokenizer).train()
    previous = [str(tmp_path / "a")]
    second = trainer(
        left(""), tmp_path / "c", processing_class=tokenizer, privacy_previous=previous
    )
    second.train()
    assert second.privacy["total"]["epsilon"] > first.privacy["epsilon"]


def classifier(folder: Path) -> GPT2ForSequenceClassification:
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=257, n_positions=128, n_embd=16, n_layer=1, n_head=2, num_labels=1,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2ForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return model


@pytest.mark.slow
def test_rewards_by_name_object_and_callable_add_up_with_their_weights(model, tmp_path, one_key):
    judge = classifier(tmp_path / "judge")
    weights_ = [0.5, 2.0, 1.0]
    mixed: list[Any] = [str(tmp_path / "judge"), judge, lower_case]
    tokenizers = [None, tiny.tokenizer(), None]
    made = trainer(
        model, tmp_path / "a", reward_funcs=mixed, reward_processing_classes=tokenizers,
        reward_weights=weights_, eval_dataset=PUBLIC,
    )  # fmt: skip
    assert [r.weight for r in made.recipe.rewards] == weights_
    assert made.recipe.rewards[0].classifier == str(tmp_path / "judge")
    alone = [
        trainer(model, tmp_path / str(i), reward_funcs=one, eval_dataset=PUBLIC,
                reward_processing_classes=tokenizers[i]).evaluate()["eval_reward"]
        for i, one in enumerate(mixed)
    ]  # fmt: skip
    assert alone[0] == pytest.approx(alone[1], abs=1e-6)
    total = sum(w * value for w, value in zip(weights_, alone, strict=True))
    assert made.evaluate()["eval_reward"] == pytest.approx(total, abs=1e-5)
    made.train()
    assert "rewards/lower_case/mean" not in made.state.log_history[-3]


def test_users_are_those_of_the_column(model: str, tmp_path: Path) -> None:
    rows = [{**row, "who": i // 2} for i, row in enumerate(PROMPTS)]
    made = trainer(model, tmp_path / "a", train_dataset=Dataset.from_list(rows), user_column="who")
    assert made.recipe.data.user_column == "who"
    made.train()
    assert made.privacy["users"] == 30
    with pytest.raises(DprlhfError, match="user_column='who'"):
        trainer(model, tmp_path / "b", user_column="who", privacy_unit="prompt")
    talks = Dataset.from_list([{**row, "to": 100 + i // 4} for i, row in enumerate(rows)])
    both = trainer(model, tmp_path / "c", train_dataset=talks, user_column=["who", "to"])
    assert both.recipe.data.user_column == ["to", "who"]
    both.train()
    assert both.privacy["users"] == 15


def adapted(model: str, config: Any, move: float = 0.0) -> Any:
    made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    for name, parameter in made.named_parameters():
        parameter.data += move * (".lora_B." in name)
    return made


def test_a_lora_that_is_still_to_be_trained_is_taken_as_its_config(model, tmp_path, one_key):
    tokenizer = AutoTokenizer.from_pretrained(model)
    ready = adapted(model, lora(fan_in_fan_out=True))
    for name, given in (("a", {}), ("b", {"peft_config": None})):
        base = AutoModelForCausalLM.from_pretrained(model) if name == "a" else ready
        trainer(base, tmp_path / name, processing_class=tokenizer, max_steps=1, **given).train()
    assert same_weights(tmp_path / "a", tmp_path / "b")
    moved = adapted(model, lora(fan_in_fan_out=True), move=0.1)
    with pytest.raises(DprlhfError, match="before it has been trained"):
        trainer(moved, tmp_path / "c", processing_class=tokenizer, peft_config=None)


def test_only_the_main_process_pushes(model: str, tmp_path: Path) -> None:
    """Scripts call ``push_to_hub`` on all processes, as with TRL; two uploads would collide."""
    made = trainer(model, tmp_path / "a", push_to_hub=True, hub_model_id="me/mine")
    other = mock.patch.object(Processes, "main", property(lambda self: False))
    with mock.patch("dprlhf.trl.trainer.push", return_value="https://hub/me/mine") as push:
        made.train()
        assert push.call_count == 1
        with other:
            assert made.push_to_hub() is None
        assert push.call_count == 1
        assert made.push_to_hub() == "https://hub/me/mine"


def test_a_trainer_continues_no_run_of_another_folder(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").write_text("")
    with pytest.raises(DprlhfError, match="continues in its own folder"):
        continued(make_recipe(recipe_settings()), RunFolder(tmp_path / "a"), tmp_path / "b")


METRICS = {
    "round": 3, "private_reward_noised": 0.0, "private_reward_noise_std": None,
    "released_gradient_norm": 2.0, "public_kl": 0.5, "public_reward": 1.5, "public_longest": None,
    "learning_rate": 0.1,
}  # fmt: skip


def test_logs_of_a_round_are_released_and_those_of_an_evaluation_public() -> None:
    logs = as_logs(METRICS, {"reward": "rewards/length/mean", "valid_share": "valid"})
    assert logs == {
        "reward": 0.0, "rewards/length/mean": 0.0, "grad_norm": 2.0, "learning_rate": 0.1,
    }  # fmt: skip
    assert as_evaluation(METRICS) == {"eval_kl": 0.5, "eval_reward": 1.5}
    assert as_evaluation(METRICS, "test") == {"test_kl": 0.5, "test_reward": 1.5}


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
        model=agents.save(tmp_path / "model"), reward_funcs=called, args=args,
        train_dataset=[{"prompt": agents.asked(f"{i} and 1?")} for i in range(12)],
        eval_dataset=[{"prompt": agents.asked(f"public {i}")} for i in range(3)],
        peft_config=peft.LoraConfig(r=2, target_modules=["c_attn"]), **agent,
    )  # fmt: skip
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
