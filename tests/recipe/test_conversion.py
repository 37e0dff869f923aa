"""Files of other programs as recipes: each setting is mapped, has no effect, or is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dprlhf.cli.app import app
from dprlhf.errors import DprlhfError
from dprlhf.privacy.plan import make_plan
from dprlhf.recipe import DPORecipe, Recipe, RewardRecipe, SFTRecipe, load_any_recipe
from dprlhf.recipe.conversion import Converted, axolotl, convert, llama_factory

# Written for this test, in the style of each program's examples.
FACTORY: dict[str, Any] = {
    "model_name_or_path": "org/model",
    "trust_remote_code": False,
    "stage": "dpo",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 4,
    "lora_target": "q_proj,v_proj",
    "pref_beta": 0.2,
    "pref_loss": "ipo",
    "dataset": "pairs",
    "template": None,
    "max_samples": 900,
    "overwrite_cache": True,
    "preprocessing_num_workers": 16,
    "output_dir": "saves/dpo",
    "logging_steps": 10,
    "per_device_train_batch_size": 5,
    "gradient_accumulation_steps": 10,
    "learning_rate": 5e-6,
    "num_train_epochs": 2.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "ddp_timeout": 180000000,
}
AXOLOTL: dict[str, Any] = {
    "base_model": "org/model",
    "load_in_4bit": False,
    "rl": "grpo",
    "trl": {
        "beta": 0.01,
        "max_completion_length": 48,
        "num_generations": 4,
        "temperature": 0.9,
        "reward_funcs": ["my_rewards.score", "pack.more.length"],
        "reward_weights": [1.0, 0.5],
        "use_vllm": True,
        "vllm_server_port": 8000,
    },
    "datasets": [{"path": "org/questions", "split": "train", "type": "my_rewards.transform"}],
    "adapter": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "lora_target_linear": True,
    "sequence_len": 1024,
    "micro_batch_size": 8,
    "gradient_accumulation_steps": 25,
    "num_epochs": 1,
    "optimizer": "adamw_torch",
    "learning_rate": 0.0002,
    "lr_scheduler": "constant",
    "warmup_steps": 5,
    "bf16": "auto",
    "wandb_project": None,
    "output_dir": "./out",
}


LENGTHS = ("data.max_prompt_tokens=96", "data.max_completion_tokens=96")


def of(values: dict[str, Any], tmp_path: Path, *overrides: str, **options: Any) -> Converted:
    """Convert a file; one that names no length gets one for the prompt and one for the completion.

    Without that it is refused, which test_lengths_that_a_file_leaves_out has.
    """
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    pairs = values.get("stage", "sft") in ("sft", "pt", "dpo") and values.get("rl") != "grpo"
    lengths = LENGTHS if pairs and not values.keys() & {"cutoff_len", "reward_model"} else ()
    return convert(file, (*lengths, *overrides), **{"epsilon": 4.0, "users": 1000, **options})


def listed(tmp_path: Path, **entry: Any) -> dict[str, Any]:
    """Return FACTORY with a data set that is found in its list."""
    (tmp_path / "dataset_info.json").write_text(json.dumps({"pairs": entry}))
    return FACTORY | {"dataset_dir": str(tmp_path)}


PAIRS = {"prompt": "question", "chosen": "chosen", "rejected": "rejected"}
"""The columns of a list's entry for pairs; those that it does not name, LLaMA-Factory has not."""


def test_a_file_for_dpo_of_llama_factory(tmp_path: Path) -> None:
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    values = listed(tmp_path, file_name="pairs.json", ranking=True, columns=columns)
    made = of(values, tmp_path)
    assert made.left == []
    recipe = made.recipe
    assert isinstance(recipe, DPORecipe)
    assert recipe.policy.model_name_or_path == "org/model"
    assert recipe.policy.dtype == "bfloat16"
    adapter = recipe.policy.adapter
    # Its alpha is twice the rank where the file has none.
    assert (adapter.type, adapter.rank, adapter.alpha) == ("lora", 4, 8.0)
    assert adapter.target_modules == ["q_proj", "v_proj"]
    assert (recipe.update.beta, recipe.update.loss_type) == (0.2, "ipo")
    assert recipe.data.path == str(tmp_path / "pairs.json")
    assert recipe.data.limit == 900
    assert (recipe.data.prompt_column, recipe.data.chosen_column) == ("question", "good")
    assert recipe.data.rejected_column == "bad"
    # 1,000 users, 50 in a step, two passes.
    assert (recipe.rounds, recipe.privacy.participations) == (40, 2)
    assert (recipe.optimizer.learning_rate, recipe.optimizer.schedule) == (5e-6, "cosine")
    assert (recipe.optimizer.warmup, recipe.seed, recipe.privacy.epsilon) == (0.1, 42, 4.0)
    assert recipe.output_dir == "saves/dpo"


def test_a_file_for_grpo_of_axolotl(tmp_path: Path) -> None:
    made = of(AXOLOTL, tmp_path)
    assert [finding.name for finding in made.left] == ["datasets"]  # a type that rewrites rows
    assert made.recipe is None
    recipe = of(AXOLOTL, tmp_path, "data.prompt_column=question").recipe
    assert isinstance(recipe, Recipe)
    assert recipe.update.name == "grpo"
    assert [(r.function, r.weight) for r in recipe.rewards] == [
        ("my_rewards:score", 1.0),
        ("pack.more:length", 0.5),
    ]
    rollout = recipe.rollout
    assert (rollout.responses, rollout.max_new_tokens, rollout.temperature) == (4, 48, 0.9)
    assert recipe.kl.beta == 0.01
    assert (recipe.data.path, recipe.data.prompt_column) == ("org/questions", "question")
    adapter = recipe.policy.adapter
    assert (adapter.rank, adapter.alpha, adapter.target_modules) == (8, 16.0, "all-linear")
    # A batch of 200 responses, four to a prompt: 50 users in a round.
    assert (recipe.rounds, recipe.privacy.participations) == (20, 1)
    assert recipe.optimizer.warmup == 0.25


@pytest.mark.parametrize("values", [FACTORY, AXOLOTL], ids=["llama-factory", "axolotl"])
def test_every_setting_is_accounted_for(values: dict[str, Any], tmp_path: Path) -> None:
    tables = axolotl if "base_model" in values else llama_factory
    made = of(values | {"made_up": 1, "lora_alhpa": 3}, tmp_path)
    given = axolotl.flat(values) if tables is axolotl else values
    names = [finding.name for finding in made.findings]
    assert len(names) == len(set(names))
    assert {*given, "made_up", "lora_alhpa"} <= set(names)
    left = {finding.name: finding.about for finding in made.left}
    assert left["made_up"].startswith("not known here")
    assert "did you mean 'lora_alpha'" in left["lora_alhpa"]
    assert all(finding.about for finding in made.findings)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"lora_dropout": 0.05}, "lora_dropout"),
        ({"quantization_bit": 3}, "quantization_bit"),
        ({"quantization_method": "gptq"}, "quantization_method"),
        ({"template": "llama3"}, "template"),
        ({"template": "default"}, "template"),  # it writes Human: and Assistant:
        ({"val_size": 0.1}, "val_size"),
        ({"packing": True}, "packing"),
        ({"pref_loss": "orpo"}, "pref_loss"),
        ({"pref_ftx": 1.0}, "pref_ftx"),
        ({"finetuning_type": "full"}, "finetuning_type"),
        ({"num_train_epochs": 0.5}, "num_train_epochs"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type"),
        ({"fp16": True}, "fp16"),
        ({"report_to": "swanlab"}, "report_to"),
    ],
    ids=str,
)
def test_what_has_no_counterpart_is_refused(
    changed: dict[str, Any], name: str, tmp_path: Path
) -> None:
    values = listed(tmp_path, file_name="pairs.json", columns=PAIRS)
    assert of(values, tmp_path).left == []
    left = [finding.name for finding in of(values | changed, tmp_path).left]
    assert name in left
    without = [n for n in left if n in changed]
    recipe = of(values | changed, tmp_path, "rounds=10", without=without).recipe
    assert recipe is not None
    assert recipe.rounds == 10


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, "two columns, instruction and input"),  # as without the key columns
        ({"columns": PAIRS | {"query": "more"}}, "two columns, question and more"),
        ({"columns": {"prompt": "question"}}, "name no chosen, rejected"),
        ({"columns": PAIRS, "folder": "x"}, "folder"),
        ({"columns": PAIRS | {"system": "s", "history": "h"}}, "system, history"),
        ({"columns": PAIRS | {"tools": "t"}}, "tools"),
        ({"columns": PAIRS, "made_up": 1}, "made_up"),
        ({"columns": PAIRS, "formatting": "sharegpt"}, "conversations in one column"),
    ],
    ids=str,
)
def test_an_entry_that_changes_the_rows_is_refused(
    entry: dict[str, Any], message: str, tmp_path: Path
) -> None:
    values = listed(tmp_path, file_name="pairs.json", **entry)
    (left,) = of(values, tmp_path).left
    assert left.name == "dataset"
    assert message in left.about
    assert of(values, tmp_path, "data.path=joined.jsonl").left == []


def test_an_entry_says_which_rows(tmp_path: Path) -> None:
    entry = {"hf_hub_url": "org/rows", "split": "test", "revision": "v2", "num_samples": 70}
    values = listed(tmp_path, **entry, subset="part", ranking=True, columns=PAIRS)
    recipe = of(values, tmp_path).recipe
    assert isinstance(recipe, DPORecipe)
    data = recipe.data
    assert (data.path, data.name, data.split, data.revision) == ("org/rows", "part", "test", "v2")
    assert data.limit == 70  # not the 900 of max_samples
    recipe = of(values | {"max_samples": 60}, tmp_path).recipe
    assert isinstance(recipe, DPORecipe)
    assert recipe.data.limit == 60


def test_a_refusal_is_answered_by_the_keys_that_it_names(tmp_path: Path) -> None:
    values = listed(tmp_path, file_name="pairs.json", columns=PAIRS) | {"cutoff_len": 2048}
    one, both = ["data.max_prompt_tokens=512"], ["data.max_completion_tokens=512"]
    assert [f.name for f in of(values, tmp_path, *one).left] == ["cutoff_len"]
    recipe = of(values, tmp_path, *one, *both).recipe
    assert isinstance(recipe, DPORecipe)
    assert recipe.data.max_completion_tokens == 512


def test_rounds_need_the_number_of_users_or_the_steps(tmp_path: Path) -> None:
    values = listed(tmp_path, file_name="pairs.json", columns=PAIRS)
    left = {finding.name for finding in of(values, tmp_path, users=None).left}
    assert "num_train_epochs" in left
    assert of(values, tmp_path, "rounds=7", users=None).recipe.rounds == 7  # type: ignore[union-attr]
    recipe = of(values | {"max_steps": 30}, tmp_path, users=None).recipe
    assert recipe is not None
    assert (recipe.rounds, recipe.privacy.participations) == (30, 1)


def test_lengths_that_a_file_leaves_out_are_those_of_its_program(tmp_path: Path) -> None:
    """A recipe's own limits, 64 tokens each, would cut rows that the program keeps."""
    values = listed(tmp_path, file_name="pairs.json", columns=PAIRS)
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(values))
    left = convert(file, [], epsilon=4.0, users=1000).left
    assert [(f.name, "(its default)" in f.about) for f in left] == [("cutoff_len", True)]
    made = convert(file, LENGTHS, epsilon=4.0, users=1000)
    assert (made.left, made.recipe.data.max_prompt_tokens) == ([], 96)  # type: ignore[union-attr]
    kinds = {
        "adapter": "lora",
        "base_model": "m",
        "datasets": [{"path": "p", "type": "completion"}],
    }
    file.write_text(yaml.safe_dump(kinds))
    assert "sequence_len" in {f.name for f in convert(file, [], epsilon=4.0, users=1000).left}


@pytest.mark.parametrize("passes", [1, 3, 5])
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("users", [7, 1000])
def test_a_run_accepts_the_rounds(users: int, batch: int, passes: int, tmp_path: Path) -> None:
    values = listed(tmp_path, file_name="pairs.json", columns=PAIRS)
    steps = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 1}
    made = of(values | steps | {"num_train_epochs": passes}, tmp_path, users=users).recipe
    assert made is not None
    kept, rounds = made.privacy.participations, made.rounds
    plan = make_plan(users=users, rounds=rounds, participations=kept, epsilon=math.inf, delta=1e-5)
    assert (kept, rounds % passes) == (passes, 0)
    # As many users in a round as the file has in a step, unless they are too few.
    if rounds > passes:
        assert plan.expected_batch_size == pytest.approx(max(batch, passes), rel=0.5)


def test_more_steps_than_users_are_refused(tmp_path: Path) -> None:
    values = listed(tmp_path, file_name="pairs.json", columns=PAIRS)
    left = of(values | {"max_steps": 2000}, tmp_path).left
    assert {f.about for f in left} == {"1000 users cannot fill 2000 rounds"}
    assert of(values | {"max_steps": 1000}, tmp_path).left == []
    few = of(values | {"num_train_epochs": 3}, tmp_path, users=2).left
    assert {f.about for f in few} == {"2 users cannot fill 3 rounds"}


def test_the_other_stages(tmp_path: Path) -> None:
    columns = PAIRS | {"prompt": "text", "response": "output"}
    (tmp_path / "dataset_info.json").write_text(
        json.dumps({"texts": {"file_name": "texts.jsonl", "columns": columns}})
    )
    common = {
        "model_name_or_path": "m", "dataset": "texts", "dataset_dir": str(tmp_path), "bf16": True,
        "learning_rate": 1e-4, "temperature": 0.9,
    }  # fmt: skip
    pretrained = of(common | {"stage": "pt"}, tmp_path).recipe
    assert isinstance(pretrained, SFTRecipe)
    assert pretrained.data.completion_column is None
    tuned = of(common | {"stage": "sft"}, tmp_path).recipe
    assert isinstance(tuned, SFTRecipe)
    assert tuned.data.completion_column == "output"
    reward = of(common | {"stage": "rm", "cutoff_len": 256}, tmp_path).recipe
    assert isinstance(reward, RewardRecipe)
    assert (reward.model.dtype, reward.data.max_tokens) == ("float32", 256)
    ppo = common | {"stage": "ppo", "reward_model": "saves/rm", "ppo_epochs": 1, "top_p": 0.9}
    assert [finding.name for finding in of(ppo, tmp_path).left] == ["reward_model"]
    recipe = of(ppo, tmp_path, "rewards=[{classifier: mine}]").recipe
    assert isinstance(recipe, Recipe)
    assert (recipe.update.name, recipe.rollout.top_p, recipe.rollout.temperature) == (
        "ppo", 0.9, 0.9,
    )  # fmt: skip
    pairs = {
        "base_model": "m", "adapter": "lora", "lora_r": 2, "lora_alpha": 2, "rl": "dpo",
        "rl_beta": 0.3, "learning_rate": 1e-5, "lora_target_modules": ["q_proj"],
        "datasets": [{"path": "p.jsonl", "type": {"field_prompt": "ask", "field_chosen": "up",
                      "field_rejected": "down", "prompt_format": "{prompt}"}}],
    }  # fmt: skip
    dpo = of(pairs, tmp_path).recipe
    assert isinstance(dpo, DPORecipe)
    assert (dpo.data.prompt_column, dpo.data.rejected_column) == ("ask", "down")
    assert dpo.update.beta == 0.3
    pairs["datasets"][0]["type"]["prompt_format"] = "Q: {prompt}"  # type: ignore[index]
    assert [finding.name for finding in of(pairs, tmp_path).left] == ["datasets"]


def test_a_quantized_base_model(tmp_path: Path) -> None:
    values = listed(tmp_path, file_name="pairs.json", columns=PAIRS)
    for changed, kind in (
        ({"quantization_bit": 4}, "nf4-double"),
        ({"quantization_bit": 4, "double_quantization": False}, "nf4"),
        ({"quantization_bit": 8, "gradient_checkpointing": True}, "int8"),
    ):
        recipe = of(values | changed, tmp_path).recipe
        assert isinstance(recipe, DPORecipe)
        assert recipe.policy.quantization == kind
        assert recipe.policy.gradient_checkpointing == ("gradient_checkpointing" in changed)
    changed = {"adapter": "qlora", "load_in_4bit": True}
    qlora = of(AXOLOTL | changed, tmp_path, "data.prompt_column=question").recipe
    assert isinstance(qlora, Recipe)
    assert (qlora.policy.adapter.type, qlora.policy.quantization) == ("lora", "nf4-double")
    dora = of(AXOLOTL | {"peft_use_dora": True}, tmp_path, "data.prompt_column=question").recipe
    assert isinstance(dora, Recipe)
    assert dora.policy.adapter.use_dora


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_name_or_path": "m", "stage": "kto"}, "'kto' has no private counterpart"),
        ({"base_model": "m", "adapter": "lora", "rl": "orpo"}, "'orpo' has no private"),
        ({"base_model": "m", "rl": "dpo"}, "all weights would be trained"),
        ({"model": "m"}, "neither a training file of LLaMA-Factory"),
    ],
    ids=str,
)
def test_a_file_without_a_counterpart(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DprlhfError, match=message) as caught:
        of(values, tmp_path)
    assert "\n" not in str(caught.value)


def test_the_tables_name_keys_that_recipes_have(tmp_path: Path) -> None:
    """Each rule that maps puts a key of some stage's recipe; a misspelt one would never apply."""
    from dprlhf.recipe.conversion.rules import Draft

    samples = (1, 0.5, "lora", True, "cosine", "sigmoid", "sgd", "auto", "grpo", "wandb", ["q"])
    for tables in (llama_factory, axolotl):
        for name, rule in tables.FIELDS.items():
            kinds = set()
            for stage in ("rl", "sft", "dpo", "reward"):
                for value in samples:
                    draft = Draft({}, stage, 100, {"rounds": 10})
                    try:
                        found = rule(name, value, draft)
                    except (TypeError, ValueError):  # no value of this setting
                        continue
                    kinds.add("stage" if "nothing of the kind" in found.about else found.kind)
            assert kinds != {"stage"}, name


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(yaml.safe_dump(AXOLOTL, sort_keys=False))
    runner = CliRunner()
    command = ["convert", "theirs.yaml", "--epsilon", "4", "--users", "1000"]
    refused = runner.invoke(app, [*command, "--out", "ours.yaml"])
    assert "no counterpart for datasets" in str(refused.exception)
    assert not Path("ours.yaml").exists()
    made = runner.invoke(app, [*command, "data.prompt_column=question", "--out", "ours.yaml"])
    assert made.exit_code == 0, made.output
    assert "answered" in made.stderr
    assert "rollout.max_new_tokens" in made.stderr
    assert Path("ours.yaml").read_text().startswith("# From theirs.yaml of axolotl")
    assert load_any_recipe("ours.yaml").rounds == 20
    again = runner.invoke(app, [*command, "data.prompt_column=question", "--out", "ours.yaml"])
    assert "ours.yaml: exists" in str(again.exception)


def test_the_command_says_where_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(yaml.safe_dump(AXOLOTL, sort_keys=False))
    command = ["convert", "theirs.yaml", "--epsilon", "4", "--users", "1000"]
    command += ["data.prompt_column=question", "--out", "nodir/ours.yaml"]
    made = CliRunner().invoke(app, command)
    assert isinstance(made.exception, DprlhfError)
    assert "nodir/ours.yaml: could not be written" in str(made.exception)
