"""What a program gives in memory in place of what a recipe names."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

import dprlhf
from dprlhf import DprlhfError
from dprlhf.data.in_memory import InMemoryInputs, recipe_of
from dprlhf.recipe import IN_MEMORY, Recipe, load_recipe, make_recipe
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


NONE = InMemoryInputs(None, None, None)


class TestTrlsNames:
    FLAT: ClassVar[dict[str, Any]] = {"model": "m", "epsilon": 4.0, "delta": 1e-5, "rounds": 2}

    def made(self, **flat: Any) -> Recipe:
        return recipe_of(None, [], self.FLAT | flat, InMemoryInputs(["a", "b"], length, None))

    def test_they_are_the_same_settings_as_the_keys(self) -> None:
        by_key = self.made(
            rollout__responses=4, rollout__max_new_tokens=9, kl__beta=0.1, rollout__top_k=20,
            rollout__stop=["END"], rollout__mask_truncated=True, policy__adapter__rank=3,
        )  # fmt: skip
        by_trl = self.made(
            num_generations=4, max_completion_length=9, beta=0.1, mask_truncated_completions=True,
            generation_kwargs={"top_k": 20, "stop_strings": ["END"]}, lora_r=3,
        )  # fmt: skip
        assert by_trl == by_key
        assert by_trl.privacy.epsilon == 4.0  # TRL's epsilon is a clip range


class TestTheRecipeSaysWhatWasUsed:
    def test_each_part_that_is_given_and_no_other(self, file: Path) -> None:
        named = load_recipe(file)
        assert recipe_of(file, [], {}, NONE) == named
        own = recipe_of(file, [], {}, InMemoryInputs(["a", "b"], None, None))
        assert (own.data.path, own.data.limit) == (IN_MEMORY, None)
        assert own.rewards == named.rewards
        own = recipe_of(named, [], {}, InMemoryInputs(None, [length, vowels], None))
        assert [r.function for r in own.rewards] == [IN_MEMORY, IN_MEMORY]
        assert own.data == named.data
        own = recipe_of(named, [], {}, InMemoryInputs(None, [(length, 0.5), "org/toxicity"], None))
        assert [(r.name, r.weight) for r in own.rewards] == [(IN_MEMORY, 0.5), ("org/toxicity", 1)]

    def test_public_prompts_are_evaluated_without_a_section_for_them(self, values):
        values["data"] |= {"prompt_words": 3, "user_column": "name"}
        recipe = make_recipe(values, source="test")
        assert recipe.evaluation is None
        evaluation = recipe_of(recipe, [], {}, InMemoryInputs(None, None, PUBLIC)).evaluation
        assert evaluation.data.path == IN_MEMORY
        public = evaluation.data.like(recipe.data)
        assert (public.prompt_words, public.user_column) == (3, None)
        values["evaluation"] = {"data": {"path": "other.csv"}, "prompts": 4}
        kept = recipe_of(Recipe.model_validate(values), [], {}, InMemoryInputs(None, None, PUBLIC))
        assert kept.evaluation.prompts == 4

    @pytest.mark.slow
    def test_a_resumed_run_asks_for_the_same_again(self, file, tmp_path, monkeypatch):
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
