"""The policy for others: uploaded with its card, or merged into the base model."""

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import dprlhf
from dprlhf.errors import DprlhfError
from dprlhf.policies.loading import make_policy
from dprlhf.recipe import Adapter, load_recipe
from dprlhf.runs.publish import files_to_push, merge, push
from helpers import runs, tiny
from helpers.policies import off_start


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("hub")
    model = str(tiny.save(base / "model", "llama"))
    runs.train(model, base / "run", rounds=1, epsilon=8.0, delta=1e-3, optimizer__learning_rate=0.1)
    return base / "run"


class FakeHub:
    """Stands in for HfApi and keeps what it is asked for."""

    calls: list[tuple[str, dict[str, Any]]]
    problem: Exception | None = None

    def __init__(self, token: str | None) -> None:
        assert token is None  # that of the login

    def create_repo(self, repo_id: str, **more: Any) -> None:
        if self.problem:
            raise self.problem
        self.calls.append(("create_repo", {"repo_id": repo_id, **more}))

    def upload_folder(self, **more: Any) -> None:
        self.calls.append(("upload_folder", more))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[FakeHub]:
    kind = type("Hub", (FakeHub,), {"calls": []})
    monkeypatch.setattr(huggingface_hub, "HfApi", kind)
    return kind


class TestPush:
    def test_policy_and_card_travel_and_nothing_else(self, finished, hub):
        (finished / "policy/link").symlink_to(finished / "secret/key")
        with pytest.raises(DprlhfError, match="link: a link"):
            push(finished, "me/mine")
        (finished / "policy/link").unlink()
        assert push(finished, "me/mine", private=True) == "https://huggingface.co/me/mine"
        (_, created), (_, uploaded) = hub.calls
        assert created == {"repo_id": "me/mine", "private": True, "exist_ok": True}
        assert uploaded["folder_path"] == finished / "policy"
        names = {file.name for file in uploaded["folder_path"].rglob("*")}
        assert {"README.md", "adapter_config.json", "adapter_model.safetensors"} <= names
        assert {name for name, _ in files_to_push(finished)} == names


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 30)[None]).logits  # type: ignore[no-any-return]


class TestMerge:
    def test_it_computes_what_the_adapter_computes(self, finished: Path, tmp_path: Path) -> None:
        out = merge(finished, tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(out).eval()
        base = AutoModelForCausalLM.from_pretrained(finished.parent / "model").eval()
        untuned = logits(base)
        tuned = logits(peft.PeftModel.from_pretrained(base, str(finished / "policy")).eval())
        assert (tuned - untuned).abs().max() > 1e-3
        torch.testing.assert_close(logits(merged), tuned, rtol=1e-4, atol=1e-5)
        assert not isinstance(merged, peft.PeftModel)
        card = huggingface_hub.ModelCard.load(out / "README.md")
        assert card.data.to_dict()["library_name"] == "transformers"
        assert "\nWhole weights with the adapter merged (a LoRA adapter (rank 4))" in card.text
        assert "## Privacy" in card.text

    def test_a_merge_that_leaves_something_out_is_refused(self, finished, tmp_path, monkeypatch):
        tuner = peft.tuners.tuners_utils.BaseTuner
        monkeypatch.setattr(tuner, "merge_and_unload", lambda self: self.unload())
        with pytest.raises(DprlhfError, match="computes something else"):
            merge(finished, tmp_path / "merged")
        assert not (tmp_path / "merged").exists()

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("adapter", "kind"),
        [("lora", "gpt2"), ("ffa-lora", "llama"), ("VERA", "llama"), ("LN_TUNING", "gpt2"),
         ("biases", "gpt2"), ("biases", "llama")],
    )  # fmt: skip
    def test_every_adapter_is_merged_or_refused(self, finished, tmp_path, adapter, kind):
        """Never a merged model that computes something else than the adapter."""
        run = tmp_path / "run"
        shutil.copytree(finished, run)
        model = tiny.save(tmp_path / "model", kind)
        target = {"gpt2": ["c_attn"], "llama": ["v_proj"]}[kind]
        values: dict[str, Any] = {"type": adapter, "target_modules": target}
        if "lora" not in adapter:
            fields: dict[str, Any] = {"peft_type": adapter, "target_modules": target}
            if adapter == "LN_TUNING":
                del fields["target_modules"]
            if adapter == "biases":
                fields |= {"peft_type": "LORA", "lora_bias": True}
            values = {"type": "peft", "peft": fields}
        spec = Adapter.model_validate(values)
        recipe = load_recipe(
            run / "recipe.yaml",
            [f"policy.model_name_or_path={model}", f"policy.adapter={json.dumps(values)}"],
        )
        (run / "recipe.yaml").write_text(dprlhf.recipe.dump_recipe(recipe))
        policy = off_start(make_policy(tiny.model(kind), tiny.tokenizer(), spec))
        card = (run / "policy/README.md").read_text()
        shutil.rmtree(run / "policy")
        policy.save(run / "policy")
        (run / "policy/README.md").write_text(card)
        if (adapter, kind) == ("biases", "llama"):  # there is no bias to merge it into
            with pytest.raises(DprlhfError, match=r"PeftModel\.from_pretrained"):
                merge(run, tmp_path / "merged")
            assert not (tmp_path / "merged").exists()
            return
        merged = AutoModelForCausalLM.from_pretrained(merge(run, tmp_path / "merged")).eval()
        torch.testing.assert_close(logits(merged), logits(policy.model), rtol=1e-3, atol=1e-3)
