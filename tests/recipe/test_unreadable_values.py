"""Values that cannot be read, in recipes and in files of other programs: one line names each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dprlhf.errors import DprlhfError
from dprlhf.recipe import DPORecipe, load_any_recipe
from dprlhf.recipe.conversion import Converted, axolotl, convert, llama_factory

FACTORY: dict[str, Any] = {
    "model_name_or_path": "org/model",
    "stage": "dpo",
    "dataset": "pairs",
    "learning_rate": 1e-5,
    "num_train_epochs": 1,
}
LENGTHS = ("data.max_prompt_tokens=96", "data.max_completion_tokens=96")
AXOLOTL: dict[str, Any] = {
    "base_model": "org/model",
    "rl": "grpo",
    "trl": {"reward_funcs": ["mine.score"]},
    "datasets": [{"path": "org/questions"}],
    "adapter": "lora",
    "lora_r": 8,
    "micro_batch_size": 8,
    "learning_rate": 1e-5,
}


def of(values: dict[Any, Any], tmp_path: Path, *overrides: str) -> Converted:
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    overrides = ("data.path=p.jsonl", "data.prompt_column=q", *overrides)
    return convert(file, overrides, epsilon=4.0, users=1000)


@pytest.mark.slow
@pytest.mark.parametrize("value", ["auto", None, [3], {"a": 1}, -2, True, float("nan")], ids=str)
@pytest.mark.parametrize("values", [FACTORY, AXOLOTL], ids=["llama-factory", "axolotl"])
def test_no_value_ends_in_a_traceback(value: Any, values: dict[str, Any], tmp_path: Path) -> None:
    """Each setting that is known may have any value: it is read, or refused in one line."""
    tables = axolotl if values is AXOLOTL else llama_factory
    errors = []
    for name in sorted({*values, *tables.FIELDS, *tables.READ, "reward_model"}):
        inner = name.removeprefix("trl.")
        changed = {"trl": values["trl"] | {inner: value}} if inner != name else {name: value}
        try:
            of(values | changed, tmp_path)
        except DprlhfError as error:
            errors.append(str(error))
    assert not [error for error in errors if "\n" in error]


@pytest.mark.parametrize(
    ("changed", "name", "said"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size", "0 cannot be read"),
        ({"micro_batch_size": 2.5}, "micro_batch_size", "2.5 cannot be read"),
        ({"micro_batch_size": None}, "micro_batch_size", "an empty value cannot be read"),
        ({"gradient_accumulation_steps": "auto"}, "gradient_accumulation_steps", "'auto' cannot"),
        ({"max_steps": "soon"}, "max_steps", "'soon' cannot be read"),
        ({"warmup_steps": "10"}, "warmup_steps", "'10' cannot be read"),
        ({"learning_rate": "auto"}, "learning_rate", "'auto' cannot be read"),
        ({"lora_target_linear": ["q"]}, "lora_target_linear", "['q'] cannot be read"),
        ({"datasets": [{"ds_type": "json"}]}, "datasets", "[{'ds_type': 'json'}] cannot be read"),
        ({"trl": {"num_generations": "all"}}, "trl.num_generations", "'all' cannot be read"),
        ({"trl": {"reward_weights": "auto"}}, "trl.reward_weights", "'auto' cannot be read"),
        ({"trl": True}, "trl", "True cannot be read"),
        ({7: 1}, "7", "not known here"),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_read_is_named(
    changed: dict[Any, Any], name: str, said: str, tmp_path: Path
) -> None:
    left = {finding.name: finding.about for finding in of(AXOLOTL | changed, tmp_path).left}
    assert list(left) == [name]
    assert said in left[name]


@pytest.mark.parametrize("changed", [{"rl": ["dpo"]}, {"rl": {"name": "dpo"}}], ids=str)
def test_a_stage_that_is_no_word(changed: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DprlhfError, match=r"'dpo'.* has no private counterpart"):
        of(AXOLOTL | changed, tmp_path)
    with pytest.raises(DprlhfError, match=r"'dpo'.* has no private counterpart"):
        of(FACTORY | {"stage": changed["rl"]}, tmp_path)


@pytest.mark.parametrize(
    "listing",
    [[], {}, 3, {"pairs": "pairs.json"}, {"pairs": None}, {"pairs": {"columns": None}}],
    ids=str,
)
def test_a_list_of_data_sets_that_cannot_be_read(listing: Any, tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps(listing))
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(FACTORY | {"dataset_dir": str(tmp_path)}))
    (left,) = convert(tmp_path / "theirs.yaml", LENGTHS, epsilon=4.0, users=1000).left
    assert left.name == "dataset"
    assert "dataset_info.json" in left.about


def test_numbers_may_be_written_as_texts(tmp_path: Path) -> None:
    recipe = of(FACTORY | {"max_steps": "1e3", "lora_rank": "2"}, tmp_path, *LENGTHS).recipe
    assert isinstance(recipe, DPORecipe)
    assert (recipe.rounds, recipe.policy.adapter.rank) == (1000, 2)


UNREADABLE = ["2024-99-99", "!!int x", "!!int ''", "!!bool maybe", "!!timestamp x", "0x_", "[a"]
"""Values that YAML's own types refuse, each with an error of its own."""


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_yaml_cannot_read(text: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    for content, overrides in ((f"rounds: {text}", []), ("rounds: 3", [f"data.revision={text}"])):
        file.write_text(content)
        with pytest.raises(DprlhfError, match="not valid YAML") as caught:
            load_any_recipe(file, overrides)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[a]", "{a: b}", "2024-01-01"])
def test_a_stage_of_a_recipe_that_is_no_word(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("rounds: 3")
    with pytest.raises(DprlhfError, match="stage: it is one of") as caught:
        load_any_recipe(tmp_path / "recipe.yaml", [f"stage={text}"])
    assert "\n" not in str(caught.value)
