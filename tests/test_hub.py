"""What the loaders are told: the revision of what comes from the hub, and the attention."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import transformers
from huggingface_hub.utils import get_session
from pydantic import ValidationError

from dprlhf import recipe
from dprlhf.data.loading import load_rows
from dprlhf.errors import DprlhfError
from dprlhf.policies.classifier import load_reward_model
from dprlhf.policies.loading import load_policy
from dprlhf.recipe import Data, Policy
from dprlhf.rewards import load_reward
from helpers import tiny

COMMIT = "0" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand in for the hub: `org/model` has the tiny model's files; note who asks for what."""
    folder = tiny.save(tmp_path / "held")
    asked: list[Any] = []

    def from_hub(kind: Any) -> Callable[..., Any]:
        load = kind.from_pretrained

        def from_pretrained(name: Any, *, revision: str = "main", **others: Any) -> Any:
            asked.append((kind.__name__, name, revision))
            return load(folder if name == "org/model" else name, **others)

        return from_pretrained

    for kind in (
        transformers.AutoTokenizer,
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForSequenceClassification,
    ):
        monkeypatch.setattr(kind, "from_pretrained", from_hub(kind))

    def load_dataset(path: str, name: Any, *, split: str, revision: str | None) -> Any:
        asked.append(("load_dataset", path, revision))
        return datasets.Dataset.from_dict({"prompt": ["a", "b"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("dprlhf.hub._hub_answers", lambda: True)
    return asked


def test_a_missing_folder_is_named_at_once_without_a_connection(monkeypatch, tmp_path):
    """The hub's own client would try for half a minute."""
    client = type(get_session())
    library = importlib.import_module(client.__module__.partition(".")[0])

    def no_route(*_: Any, **__: Any) -> Any:
        raise library.ConnectError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(client, "head", no_route)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: 1 / 0)
    for name, said in (("models/tuned", "no such folder"), ("models/of/mine", "no model on the")):
        with pytest.raises(DprlhfError, match=said):
            load_policy(Policy(model_name_or_path=name))
    with pytest.raises(DprlhfError, match="data 'mine/rows': there is no such file or folder"):
        load_rows(Data(path="mine/rows"))
    monkeypatch.setattr(client, "head", lambda *_, **__: None)
    with pytest.raises(ZeroDivisionError):
        load_policy(Policy(model_name_or_path="models/tuned"))


@pytest.mark.parametrize("revision", [None, COMMIT])
def test_a_policy(hub: list[Any], tmp_path: Path, revision: str | None) -> None:
    policy = load_policy(Policy(model_name_or_path="org/model", revision=revision))
    assert {(name, found) for _, name, found in hub} == {("org/model", revision or "main")}
    assert len(hub) == 2
    policy.save(tmp_path / "policy")
    saved = json.loads((tmp_path / "policy/adapter_config.json").read_text())
    assert saved["revision"] == revision


@pytest.mark.parametrize("revision", [None, COMMIT])
def test_data(hub: list[Any], revision: str | None) -> None:
    assert len(load_rows(Data(path="org/prompts" + (f"@{revision}" if revision else "")))) == 2
    assert hub == [("load_dataset", "org/prompts", revision)]


def test_only_what_is_on_the_hub_has_a_revision(tmp_path: Path) -> None:
    folder = str(tmp_path)
    (tmp_path / "train.csv").write_text("prompt\na\n")
    loads: list[tuple[str, Callable[[], Any]]] = [
        ("policy.revision", lambda: load_policy(Policy(model_name_or_path=folder, revision="v1"))),
        (
            "model.revision",
            lambda: load_reward_model(Policy(model_name_or_path=folder, revision="v1"), None),
        ),
        (f"'{folder}@v1'", lambda: load_rows(Data(path=f"{folder}@v1"))),
        (f"'{folder}@v1'", lambda: load_reward(recipe.Reward(classifier=f"{folder}@v1"))),
    ]
    for key, load in loads:
        with pytest.raises(DprlhfError, match=rf"^{key}: .* is on this machine"):
            load()


def test_the_attention_that_is_asked_for(tmp_path: Path) -> None:
    folder = str(tiny.save(tmp_path / "model", "llama"))
    spec = Policy(model_name_or_path=folder, attn_implementation="eager")
    for model in (load_policy(spec).model, load_reward_model(spec, None).model):
        assert model.config._attn_implementation == "eager"


def test_attention_that_packs_rows_into_one_is_refused() -> None:
    """A user's rounding would depend on who else is in the micro-batch."""
    with pytest.raises(ValidationError, match="'sdpa' or 'eager'"):
        Policy.model_validate(
            {"model_name_or_path": "m", "attn_implementation": "flash_attention_2"}
        )
