"""One table of defaults: ``init`` and ``train``, ``train()`` and a TRL trainer make one run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from datasets import Dataset
from transformers import AutoConfig
from typer.testing import CliRunner

import dprlhf
from dprlhf.cli.app import app
from dprlhf.cli.init import new_recipe
from dprlhf.recipe import load_recipe
from dprlhf.recipe.loading import recipe_from
from dprlhf.training.defaults import with_defaults
from dprlhf.trl import PrivateKTOConfig, PrivateRLOOConfig, PrivateRLOOTrainer
from dprlhf.trl.mapping import feedback_recipe_of
from helpers import tiny
from helpers.runs import weights

REWARD = """
def reward(prompts, completions, **columns):
    return [4.0 * sum(c.islower() for c in text) / max(len(text), 1) for text in completions]
"""
OWN: dict[str, Any] = {
    "data": {"path"}, "evaluation": {"data": {"path"}}, "rewards": True, "output_dir": True,
    "tracking": True,
}  # fmt: skip
"""What says where rows and rewards come from, and not what is done with them."""


def resolved(folder: Path) -> dict[str, Any]:
    return load_recipe(folder / "recipe.yaml").model_dump(exclude=OWN)


@pytest.mark.slow
@pytest.mark.parametrize(("wide", "public"), [(True, 40), (False, 0)])
def test_three_ways_to_start_make_one_run(wide, public, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    smaller = {"WIDE": 1 if wide else 10**6, "FEWEST_WITH_DIRECTIONS": 2, "EVALUATED": 4}
    for name, value in smaller.items():
        monkeypatch.setattr(f"dprlhf.training.defaults.{name}", value)
    tiny.save(Path("model"))
    Path("given.py").write_text(REWARD)
    private = {"prompt": [f"user {i}" for i in range(30)], "who": [f"u{i // 2}" for i in range(30)]}
    Dataset.from_dict(private).to_csv("private.csv", index=False)
    evaluation = {"prompt": [f"public {i}" for i in range(public)]}
    Dataset.from_dict(evaluation).to_csv("public.csv", index=False)
    answers = {
        "--model": "model", "--prompts": "private.csv", "--user-column": "who",
        "--reward": "given.py:reward", "--public-prompts": "public.csv" if public else "",
        "--epsilon": "4",
    }  # fmt: skip
    done = CliRunner().invoke(app, ["init", *(x for pair in answers.items() for x in pair)])
    assert done.exit_code == 0, done.exception
    columns: dict[str, Any] = {}
    exec(REWARD, columns)
    reward = columns["reward"]
    # Short responses: what is compared is what follows from defaults and rows.
    with mock.patch("dprlhf.runs.folder.new_key", return_value=bytes(range(32))):
        dprlhf.train(
            "recipe.yaml", prompts=Dataset.from_dict(private), reward=reward,
            evaluation_prompts=Dataset.from_dict(evaluation) if public else None,
            overrides=["rollout.max_new_tokens=4"], output_dir="a",
        )  # fmt: skip
        dprlhf.train(
            model="model", prompts=Dataset.from_dict(private), reward=reward, epsilon=4,
            user_column="who", rollout__max_new_tokens=4, output_dir="b",
            evaluation_prompts=Dataset.from_dict(evaluation) if public else None,
        )  # fmt: skip
        PrivateRLOOTrainer(
            "model", reward,
            PrivateRLOOConfig(output_dir="c", privacy_epsilon=4.0, max_completion_length=4),
            Dataset.from_dict(private), Dataset.from_dict(evaluation) if public else None,
            user_column="who",
        ).train()  # fmt: skip
    one, two, three = (resolved(Path(name)) for name in "abc")
    assert one == two == three
    assert (one["update"]["subspace"] is not None) == wide
    first, *others = (weights(Path(name)) for name in "abc")
    assert any(w.any() for name, w in first.items() if "lora_B" in name)
    differing = [[name for name, w in first.items() if not torch.equal(w, o[name])] for o in others]
    assert differing == [[], []]


@pytest.mark.parametrize(
    "given", [{"optimizer": {"learning_rate": 1.0}}, {"update": {"subspace": None}}]
)
def test_what_is_given_stays(given: dict[str, Any]) -> None:
    values = {"evaluation": {"data": {"path": "public"}}, "policy": {"adapter": {"layers": [0]}}}
    made = with_defaults({**values, **given, "rounds": 7}, users=9, public=400, model="nowhere")
    assert made["rounds"] == 7
    assert made["policy"]["adapter"] == {"layers": [0]}
    assert made["update"].get("subspace") is None
    assert made.get("optimizer") == given.get("optimizer")
    free = with_defaults(values, users=9, public=400, model="nowhere")
    assert free["update"]["subspace"] == {"rank": 16, "target_kl": 20.0, "prompts": 64}
    logged = with_defaults({**values, "stage": "feedback"}, users=9, public=400, model="nowhere")
    assert logged["update"]["loss_type"] == "linear_reward"
    assert logged["update"]["subspace"] == {"rank": 16, "target_kl": 5.0, "prompts": 64}
    assert logged["rounds"] == 1
    pairs = {**values, "stage": "feedback", "update": {"loss_type": "kto"}}
    kto = with_defaults(pairs, users=9, public=400, model="nowhere")
    assert kto["update"]["subspace"] == {"rank": 16, "target_kl": 20.0}  # no row is sampled
    assert free["optimizer"]["name"] == "normalized-sgd"
    lengths = [made["optimizer"]["learning_rate"] for made in (free, logged, kto)]
    assert lengths == [8.0, 8.0, 2.0]  # natural steps are longer
    few = [with_defaults(v, users=300, public=400, model="nowhere") for v in (values, {})]
    assert [made["rounds"] for made in few] == [8, 4]  # with directions, and without public rows
    assert with_defaults({"rounds": 0}, users=9, public=None, model="nowhere")["rounds"] == 0


def test_a_stage_of_init_and_a_trl_trainer_differ_in_their_loss_alone() -> None:
    """Steps, rounds and directions follow from it."""
    text = new_recipe(
        model="gpt2", prompts="in-memory", user_column="user", public_prompts="in-memory",
        epsilon=4.0, stage="feedback", users=300, public=400,
    )  # fmt: skip
    one: Any = recipe_from(yaml.safe_load(text), (), source="init")
    config = PrivateKTOConfig(output_dir="x", privacy_epsilon=4.0, privacy_value_rounds=1)
    two = feedback_recipe_of(config, model="gpt2", adapter=None, users=300, public=400)
    assert (one.update.loss_type, two.update.loss_type) == ("linear_reward", "kto")
    assert one.evaluation == two.evaluation
    assert one.update.subspace.rank == two.update.subspace.rank == 16
    assert one.policy.adapter == two.policy.adapter
    assert one.policy.adapter.init == "public-activations"


def test_a_reward_model_has_its_own_steps_and_no_directions() -> None:
    values = {"stage": "reward", "evaluation": {"data": {"path": "public"}}}
    made = with_defaults(values, users=300, public=400, model="nowhere")
    assert made["optimizer"] == {"learning_rate": 0.003}
    assert "subspace" not in made["update"]
    assert "init" not in made["policy"]["adapter"]


def test_every_type_of_model_has_defaults() -> None:
    """A state-space model has no heads, and a model of bytes no number of layers."""
    values = {"evaluation": {"data": {"path": "public"}}}
    for kind in ("gpt2", "mamba", "falcon_mamba", "rwkv", "xlstm", "gemma3", "blt", "musicgen"):
        of_kind = SimpleNamespace(config=AutoConfig.for_model(kind))
        made = with_defaults(values, users=300, public=400, model=of_kind)
        assert made["update"]["subspace"]["rank"] == 16, kind
        assert made["policy"]["adapter"]["layers"], kind
