"""Objects of transformers and PEFT as arguments of ``dprlhf.train``."""

import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest

import dprlhf
from dprlhf import DprlhfError, recipe
from dprlhf.agents import load_sampler
from dprlhf.recipe import IN_MEMORY, dump_recipe, load_recipe, make_recipe
from helpers import tiny
from helpers.recipes import recipe_settings

CAUSAL = peft.LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=True)


def length(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def train(tmp_path: Path, **settings: Any) -> Any:
    flat: dict[str, Any] = {
        "prompts": [f"user {i}" for i in range(12)], "reward": length, "epsilon": 8.0,
        "delta": 1e-3, "rounds": 2, "max_completion_length": 2, "output_dir": tmp_path / "run",
        "quiet": True,
    }  # fmt: skip
    return dprlhf.train(**flat | settings)


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_model_a_tokenizer_and_a_peft_config(tmp_path, monkeypatch):
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["c_proj"])
    objects = {"processing_class": tiny.tokenizer(), "peft_config": config}
    with monkeypatch.context() as patch:
        patch.setattr("dprlhf.training.trainer._report", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, model=tiny.model(), **objects)
    kept = load_recipe(tmp_path / "run" / "recipe.yaml").policy
    assert (kept.model_name_or_path, kept.adapter.rank) == (IN_MEMORY, 3)
    again = {"prompts": [f"user {i}" for i in range(12)], "reward": length, "quiet": True}
    with pytest.raises(DprlhfError, match="model was given in Python"):
        dprlhf.resume(tmp_path / "run", **again)
    result = dprlhf.resume(
        tmp_path / "run", model=tiny.model(), processing_class=tiny.tokenizer(), **again
    )
    assert result.policy.model.peft_config["default"].r == 3
    stored = json.loads((tmp_path / "run" / "policy" / "adapter_config.json").read_text())
    assert (stored["r"], stored["lora_alpha"], stored["target_modules"]) == (3, 6.0, ["c_proj"])


def test_what_cannot_be_taken_says_what_to_do(tmp_path: Path) -> None:
    folder = str(tiny.save(tmp_path / "model"))
    with pytest.raises(DprlhfError, match="a model that is named brings its tokenizer"):
        train(tmp_path, model=folder, processing_class=tiny.tokenizer())
    adapted = peft.get_peft_model(tiny.model(), CAUSAL)
    with pytest.raises(DprlhfError, match=r"has an adapter already: load the base"):
        train(tmp_path, model=adapted, processing_class=tiny.tokenizer())
    with pytest.raises(DprlhfError, match=r"argument 'peft_config' has no effect with"):
        dprlhf.train("recipe.yaml", peft_config=peft.LoraConfig())
    with pytest.raises(DprlhfError, match=r"PREFIX_TUNING is not trained"):
        train(tmp_path, model=folder, peft_config=peft.PrefixTuningConfig(num_virtual_tokens=2))
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_keeps_the_model_and_the_agent_that_its_recipe_names(tmp_path: Path) -> None:
    """Its privacy card speaks of them; an object in their place may have been fitted on anybody."""
    folder = tmp_path / "run"
    folder.mkdir()
    agent = {"tools": ["math:sqrt"]}
    made = make_recipe(recipe_settings(rollout={"agent": agent}))
    (folder / "recipe.yaml").write_text(dump_recipe(made))
    with pytest.raises(DprlhfError, match=r"^model: this run's model is 'model', which is loaded"):
        dprlhf.resume(folder, model=tiny.model(), processing_class=tiny.tokenizer())
    with pytest.raises(DprlhfError, match=r"^tools: this run has what its recipe names: pass none"):
        load_sampler(recipe.Agent(**agent), tools=[math.sqrt])
    with pytest.raises(DprlhfError, match=r"^environment_factory: this run has what its recipe"):
        load_sampler(recipe.Agent(environment="a:b"), environment_factory=dict)


@pytest.mark.slow
def test_a_resumed_run_does_not_publish_users_under_an_old_declaration(tmp_path: Path) -> None:
    model, users = str(tiny.save(tmp_path / "model")), [f"user {i}" for i in range(12)]
    declared = {"evaluation__declared_public": True, "evaluation_prompts": ["a guest", "another"]}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, model=model, callbacks=[interrupted], **declared)
    again: dict[str, Any] = {"prompts": users, "reward": length, "quiet": True}
    with pytest.raises(DprlhfError, match=r"declared_public was said of other rows"):
        dprlhf.resume(tmp_path / "run", evaluation_prompts=users[:3], **again)
    for file in (tmp_path / "run").rglob("*sample*"):
        assert "user 0" not in file.read_text()
    dprlhf.resume(tmp_path / "run", evaluation_prompts=declared["evaluation_prompts"], **again)


def test_a_refused_model_stays_without_an_adapter(tmp_path: Path) -> None:
    """So that the call may be mended, and made again with the same object."""
    model = tiny.model()
    names = [name for name, _ in model.named_parameters()]
    given = {"model": model, "processing_class": tiny.tokenizer()}
    users = [f"user {i}" for i in range(12)]
    for changes, said in (
        ({"prompts": []}, "empty"),
        ({"evaluation_prompts": users[:2]}, "users' rows, too"),
        (
            {"policy__adapter": {"type": "peft", "peft": {"peft_type": "PREFIX_TUNING"}}},
            "stand before a prompt",
        ),
        ({"max_completion_length": 4000}, "positions of in-memory"),
    ):
        with pytest.raises(DprlhfError, match=said):
            train(tmp_path, **given, **changes)
        assert [name for name, p in model.named_parameters() if p.requires_grad] == names
    assert train(tmp_path, **given).policy.model.peft_config


@pytest.mark.slow
def test_a_refused_model_does_not_continue_a_run_either(tmp_path, monkeypatch):
    model, again = tiny.model(), {"processing_class": tiny.tokenizer(), "quiet": True}
    with monkeypatch.context() as patch:
        patch.setattr("dprlhf.training.trainer._report", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, model=tiny.model(), processing_class=tiny.tokenizer())
    users = [f"user {i}" for i in range(12)]
    for prompts, works in ((users[:-1], False), (users, True)):
        resumed: dict[str, Any] = {"model": model, "prompts": prompts, "reward": length, **again}
        if works:
            assert dprlhf.resume(tmp_path / "run", **resumed).policy
        else:
            with pytest.raises(DprlhfError):
                dprlhf.resume(tmp_path / "run", **resumed)


@pytest.mark.filterwarnings("ignore")  # of Opacus, about hooks
def test_a_model_that_opacus_wrapped_is_taken(tmp_path: Path) -> None:
    from opacus import GradSampleModule

    inside = tiny.model()
    wrapped = GradSampleModule(inside, strict=False)
    result = train(tmp_path, model=wrapped, processing_class=tiny.tokenizer(), rounds=1)
    assert result.policy.network is inside
    assert not any(hasattr(p, "grad_sample") for p in inside.parameters())


@pytest.mark.parametrize("name", dprlhf.__all__)
def test_every_public_name_is_where_the_package_looks_for_it(name: str) -> None:
    assert getattr(dprlhf, name).__module__.startswith("dprlhf.")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = dprlhf.no_such_name
