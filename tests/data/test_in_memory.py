"""What a program gives in memory in place of what a recipe names."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import yaml

import dprlhf
from dprlhf import DprlhfError
from dprlhf.data.given_rewards import rewards_of
from dprlhf.data.in_memory import InMemoryInputs, recipe_of
from dprlhf.data.reward_arguments import given_rewards
from dprlhf.recipe import IN_MEMORY, Recipe, Reward, load_recipe, make_recipe
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
        "rewards": [{"function": f"{__name__}:length"}], "rollout": {"max_new_tokens": 3},
        "privacy": {"epsilon": 8.0, "delta": 1e-4}, "rounds": 2,
    }  # fmt: skip


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


MODEL = SimpleNamespace(config=SimpleNamespace(), forward=print)


@pytest.mark.parametrize(
    ("reward", "weights", "expected"),
    [
        (length, None, [(IN_MEMORY, 1.0)]),
        ([length, vowels], None, [(IN_MEMORY, 1.0), (IN_MEMORY, 1.0)]),
        ((length, vowels), None, [(IN_MEMORY, 1.0), (IN_MEMORY, 1.0)]),
        ((length, 0.5), None, [(IN_MEMORY, 0.5)]),
        ([(length, 0.5), vowels], None, [(IN_MEMORY, 0.5), (IN_MEMORY, 1.0)]),
        ([length, vowels], [2, -1], [(IN_MEMORY, 2.0), (IN_MEMORY, -1.0)]),
        ("org/model", None, [("org/model", 1.0)]),
        ([("asset:sentiment", 3)], None, [("asset:sentiment", 3.0)]),
        ("pkg.mod:f", [0.25], [("pkg.mod:f", 0.25)]),
        (Reward(classifier="p", weight=0.5), None, [("p", 0.5)]),
        ((Reward(classifier="p", weight=0.5), 4), None, [("p", 4.0)]),
        (MODEL, [0.5], [(IN_MEMORY, 0.5)]),
    ],
)
def test_each_form_has_its_settings(reward: Any, weights: Any, expected: Any) -> None:
    found = given_rewards(reward, weights)
    assert [(one.settings.name, one.settings.weight) for one in found] == expected


def test_a_model_keeps_its_tokenizer() -> None:
    plain, model = given_rewards([length, MODEL], tokenizers=[None, str.split])
    assert (plain.given, plain.tokenizer) == (length, None)
    assert (model.given, model.tokenizer) == (MODEL, str.split)
    assert plain.settings == Reward(function=IN_MEMORY)  # as earlier runs have it


def test_a_resumed_run_weighs_its_rewards_as_before() -> None:
    specs = [Reward(function=IN_MEMORY, weight=0.5), Reward(classifier="org/model")]
    first, second = rewards_of(specs, given_rewards([length, "org/model"]))
    assert (first.settings.weight, first.given) == (0.5, length)
    assert (second.settings, second.given) == (specs[1], None)
    assert [one.settings for one in rewards_of(specs[1:], None)] == specs[1:]
    for reward, text in (
        (None, "give it again to resume"),
        (length, "has 2 rewards, not 1"),
        ([length, "org/other"], r"rewards.1 of this run is 'org/model', not 'org/other'"),
        ([(length, 2), "org/model"], r"rewards.0 of this run has weight 0.5, not 2"),
    ):
        with pytest.raises(DprlhfError, match=text):
            rewards_of(specs, None if reward is None else given_rewards(reward))


def test_a_resumed_run_gets_no_further_reward() -> None:
    """Its card says what the first one was fitted on, and nothing of the second."""
    leaky = Reward(function="rewards.py:length", weight=2.0)
    for more in ((vowels, 2), "org/model", leaky):
        with pytest.raises(DprlhfError, match="has 1 rewards, not 2"):
            rewards_of([Reward(function=IN_MEMORY)], given_rewards([length, more]))


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ("times_column", "gender"), ("label", "positive"), ("text", "completion"),
        ("weight", 2.0),
    ],
)  # fmt: skip
def test_a_resumed_run_keeps_what_its_card_and_rounds_go_by(changed: str, value: Any) -> None:
    named: dict[str, Any] = {"function": "rewards.py:length"}
    if changed in ("label", "text"):
        named = {"classifier": "org/model"}
    was, now = Reward(**named), Reward(**named, **{changed: value})
    with pytest.raises(DprlhfError, match=f"rewards.0 of this run has {changed} .*, not "):
        rewards_of([was], given_rewards(now))
    assert rewards_of([now], given_rewards(now))[0].settings == now
    assert rewards_of([now], given_rewards(was))[0].settings == now  # left at its default
