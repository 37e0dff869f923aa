"""A reward model whose base lacks a layer besides the head: what is published is what was trained.

A checkpoint of a masked language model has no pooler, and loading gives it random weights.
"""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertForMaskedLM

import dprlhf
from dprlhf import recipe
from dprlhf.errors import DprlhfError
from dprlhf.policies.classifier import load_classifier, load_reward_model
from dprlhf.runs.publish import merge
from dprlhf.training.supervised import StageResult
from helpers import tiny
from helpers.stages import stage_of

TARGETS: list[Any] = [["query", "value"], "all-linear"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    return Path(tiny.save_bert(folder, kind=BertForMaskedLM, scale=5.0))


def spec_of(base: Path, targets: Any) -> recipe.Policy:
    adapter = {"type": "lora", "rank": 2, "target_modules": targets}
    return recipe.Policy.model_validate({"model_name_or_path": str(base), "adapter": adapter})


def trained(base: Path, folder: Path, targets: Any) -> StageResult:
    data = {"path": "in-memory", "user_column": "user", "max_tokens": 8, "label_column": "label"}
    made = stage_of(
        recipe.RewardRecipe, policy=spec_of(base, targets).model_dump(), data=data, rounds=2,
        labels=["bad", "good"], privacy={"epsilon": float("inf")}, output_dir=str(folder),
        optimizer={"learning_rate": 0.1},
    )  # fmt: skip
    rows = [
        {"user": f"u{i}", "prompt": "ab" if i % 2 else "zy", "label": ("bad", "good")[i % 2]}
        for i in range(12)
    ]
    return dprlhf.train_stage(made, data=rows, quiet=True)  # type: ignore[return-value]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=torch.arange(5, 13)[None]).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("targets", TARGETS, ids=["named", "all"])
def test_what_is_published_is_what_was_trained(base: Path, tmp_path: Path, targets: Any) -> None:
    done = trained(base, tmp_path / "run", targets)
    wanted = logits(done.policy.model)
    merge(tmp_path / "run", tmp_path / "again")
    for whole in (tmp_path / "run/model", tmp_path / "again"):
        model = AutoModelForSequenceClassification.from_pretrained(whole).eval()
        torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-5)
    # Somebody else, with PEFT alone, whose base has other random weights.
    torch.manual_seed(77)
    theirs = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    alone = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "run/policy")).eval()
    torch.testing.assert_close(logits(alone), wanted, rtol=1e-4, atol=1e-5)


def test_the_weights_follow_from_the_seed_and_move_no_other_generator(base: Path) -> None:
    spec = spec_of(base, TARGETS[0])
    before = torch.get_rng_state()
    (one, new), (other, _) = (load_classifier(spec, ["a", "b"], seed=3) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert new == ["bert.pooler.dense", "classifier"]
    assert all(torch.equal(v, other.state_dict()[k]) for k, v in one.state_dict().items())
    different, _ = load_classifier(spec, ["a", "b"], seed=4)
    weight = "bert.pooler.dense.weight"
    assert not torch.equal(one.state_dict()[weight], different.state_dict()[weight])


def test_such_a_layer_is_not_trained(base: Path) -> None:
    policy = load_reward_model(spec_of(base, "all-linear"), ["a", "b"])
    assert not [name for name in policy.parameters if "pooler" in name]
    with policy.base():
        pass  # PEFT makes all of an adapter trainable as it switches it on again
    assert not [n for n, p in policy.model.named_parameters() if p.requires_grad and "pooler" in n]


def test_an_adapter_of_nothing_else_is_refused(base: Path) -> None:
    with pytest.raises(DprlhfError, match=r"no weights for .*bert\.pooler\.dense.*name others"):
        load_reward_model(spec_of(base, ["pooler.dense"]), ["a", "b"])
