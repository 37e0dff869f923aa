"""What a program gives in memory in place of what a recipe names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import dprlhf
from dprlhf import DprlhfError
from dprlhf.api import train_stage
from dprlhf.data.in_memory import Sources, recipe_of
from dprlhf.recipe import IN_MEMORY, Recipe, SFTRecipe, load_recipe, make_recipe
from helpers import tiny

PUBLIC = [f"public {i}" for i in range(8)]


def length(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [len(text) / 10 for text in completions]


def vowels(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(sum(c in "aeiou" for c in text)) for text in completions]


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("prompt\n" + "\n".join(f"user {i}" for i in range(30)))
    return {
        "policy": {"model_name_or_path": str(tiny.save(tmp_path / "model"))},
        "data": {"path": str(prompts), "limit": 20},
        "rewards": [{"function": f"{__name__}:length"}],
        "rollout": {"max_new_tokens": 3},
        "privacy": {"epsilon": 8.0, "delta": 1e-4},
        "rounds": 2,
    }


@pytest.fixture
def file(values: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


NONE = Sources(None, None, None)


class TestNothingIsIgnored:
    def test_settings_beside_a_recipe(self, file: Path) -> None:
        with pytest.raises(DprlhfError, match=r"'epsilon' has no effect.*overrides="):
            recipe_of(file, [], {"epsilon": 1.0}, NONE)
        with pytest.raises(DprlhfError, match=r"'epsilon' has no effect.*in the Recipe"):
            recipe_of(load_recipe(file), [], {"epsilon": 1.0}, NONE)

    def test_overrides_without_a_file(self, values: dict[str, Any], file: Path) -> None:
        change = ["privacy.epsilon=1"]
        assert recipe_of(file, change, {}, NONE).privacy.epsilon == 1.0
        with pytest.raises(DprlhfError, match=r"'privacy.epsilon=1' has no effect.*in the recipe"):
            recipe_of(load_recipe(file), change, {}, NONE)
        with pytest.raises(DprlhfError, match=r"'privacy.epsilon=1' has no effect.*by name"):
            recipe_of(None, change, {"epsilon": 8.0}, NONE)
        stage = SFTRecipe.model_validate(
            {name: values[name] for name in ("policy", "data", "privacy", "rounds")}
        )
        with pytest.raises(DprlhfError, match="has no effect"):
            train_stage(stage, overrides=change)


class TestTheRecipeSaysWhatWasUsed:
    def test_each_part_that_is_given_and_no_other(self, file: Path) -> None:
        named = load_recipe(file)
        assert recipe_of(file, [], {}, NONE) == named
        own = recipe_of(file, [], {}, Sources(["a", "b"], None, None))
        assert (own.data.path, own.data.limit) == (IN_MEMORY, None)
        assert own.rewards == named.rewards
        own = recipe_of(named, [], {}, Sources(None, [length, vowels], None))
        assert [r.function for r in own.rewards] == [IN_MEMORY, IN_MEMORY]
        assert own.data == named.data
        own = recipe_of(named, [], {}, Sources(None, [(length, 0.5), "org/toxicity"], None))
        assert [(r.name, r.weight) for r in own.rewards] == [(IN_MEMORY, 0.5), ("org/toxicity", 1)]

    def test_public_prompts_are_evaluated_without_a_section_for_them(
        self, values: dict[str, Any]
    ) -> None:
        values["data"] |= {"prompt_words": 3, "user_column": "name"}
        recipe = make_recipe(values, source="test")
        assert recipe.evaluation is None
        evaluation = recipe_of(recipe, [], {}, Sources(None, None, PUBLIC)).evaluation
        assert evaluation is not None
        assert evaluation.data.path == IN_MEMORY
        assert evaluation.data.prompt_words == 3
        assert evaluation.data.user_column is None
        values["evaluation"] = {"data": values["data"] | {"path": "other.csv"}, "prompts": 4}
        kept = recipe_of(Recipe.model_validate(values), [], {}, Sources(None, None, PUBLIC))
        assert kept.evaluation is not None
        assert kept.evaluation.prompts == 4

    def test_a_resumed_run_asks_for_the_same_again(
        self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = tmp_path / "run"
        with monkeypatch.context() as patch:
            patch.setattr("dprlhf.training.trainer._report", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                dprlhf.train(
                    file, reward=vowels, evaluation_prompts=PUBLIC, output_dir=run, quiet=True
                )
        with pytest.raises(DprlhfError, match="give them again"):
            dprlhf.resume(run, reward=vowels, quiet=True)
        with pytest.raises(DprlhfError, match="give it again"):
            dprlhf.resume(run, evaluation_prompts=PUBLIC, quiet=True)
        result = dprlhf.resume(run, reward=vowels, evaluation_prompts=PUBLIC, quiet=True)
        assert result.after is not None
        assert IN_MEMORY in (run / "policy" / "README.md").read_text()


def _interrupted(*args: Any) -> None:
    raise KeyboardInterrupt
