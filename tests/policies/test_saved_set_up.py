"""What is saved beside the weights is as it was before the first round, whatever the rounds do."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import dprlhf
from dprlhf.errors import InterruptedRunError
from helpers import tiny
from helpers.marks import slow
from helpers.runs import ADAPTER, run_settings

PROMPTS = ["u" * (3 + i % 11) for i in range(40)]
FULL = {"type": "full"}


def as_set_up() -> PreTrainedTokenizerFast:
    """A tokenizer that a program has given a template, and another name for one of its tokens."""
    made = tiny.tokenizer()
    made.add_special_tokens({"unk_token": "a"})
    made.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return made


def padded(tokenizer: Any, texts: list[str]) -> Any:
    """Pad texts as a program may, by settings that tell the longest of them."""
    longest = max(map(len, texts))
    tokenizer.model_max_length = 1000 + longest
    tokenizer.chat_template = f"{longest}"
    return tokenizer(
        texts, return_tensors="pt", padding="max_length", truncation=True, max_length=longest
    )


def stop(metrics: dict[str, Any]) -> None:
    raise KeyboardInterrupt


def saved(folder: Path) -> dict[str, Any]:
    """Return what stands beside the weights, but for the privacy record of a run."""
    files = [*folder.glob("*config.json"), *folder.glob("tokenizer*"), *folder.glob("*.jinja")]
    read = {f.name: f.read_text("utf-8") for f in files if f.name != "adapter_config.json"}
    configs = {name: json.loads(text) for name, text in read.items() if name.endswith(".json")}
    configs.get("config.json", {}).pop("dprlhf_privacy", None)
    return {**read, **configs}


@pytest.mark.parametrize("adapter", [FULL, slow(ADAPTER)])
def test_what_private_calls_leave_in_tokenizer_and_configs_is_not_saved(adapter, tmp_path):
    tokenizer, place = as_set_up(), tmp_path / "before"
    tokenizer.save_pretrained(place)
    if adapter == FULL:
        tiny.model().save_pretrained(place)
    models: list[Any] = []

    def fresh() -> Any:
        models.append(tiny.model())
        return models[-1]

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        padded(tokenizer, [p + c for p, c in zip(prompts, completions, strict=True)])
        models[-1].config.task_specific_params = {"longest": max(map(len, prompts))}
        models[-1].generation_config.max_length = max(map(len, prompts)) + 4
        return [float(len(text) % 3) for text in completions]

    given: dict[str, Any] = {"reward": reward, "prompts": PROMPTS}
    common = run_settings(
        "", rounds=2, rollout__responses=2, policy__adapter=adapter, processing_class=tokenizer,
        **given,
    )  # fmt: skip
    tokenizer(PROMPTS, padding=True)  # a call before the run leaves its padding, too
    seen: list[dict[str, Any]] = []

    def save_as_well(metrics: dict[str, Any]) -> None:
        tokenizer.save_pretrained(tmp_path / f"{len(seen)}")
        seen.append(saved(tmp_path / f"{len(seen)}"))

    result = dprlhf.train(
        **{**common, "model": fresh(), "output_dir": tmp_path / "run"}, callbacks=[save_as_well]
    )
    of_tokenizer = {n: v for n, v in saved(place).items() if not n.endswith("config.json")}
    assert [{n: v for n, v in s.items() if n in of_tokenizer} for s in seen] == [of_tokenizer] * 2
    assert saved(result.folder.policy) == saved(place)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(saved(place))
    assert ("generation_config.json" in saved(place)) == (adapter == FULL)

    # The same tokenizer continues a run that was interrupted after private calls.
    broken_off = tmp_path / "stopped"
    with pytest.raises(InterruptedRunError):
        dprlhf.train(**{**common, "model": fresh(), "callbacks": [stop], "output_dir": broken_off})
    again = dprlhf.resume(
        broken_off, model=fresh(), processing_class=tokenizer, quiet=True, **given
    )
    assert saved(again.folder.policy) == saved(place)


def test_what_a_program_changes_after_the_run_is_saved(tmp_path: Path) -> None:
    policy = dprlhf.train(
        **run_settings(
            str(tiny.save(tmp_path / "model")), prompts=PROMPTS, rounds=1, output_dir=tmp_path / "a"
        )
    ).policy
    policy.tokenizer.chat_template = "{{ messages }}"
    policy.save(tmp_path / "later")
    assert AutoTokenizer.from_pretrained(tmp_path / "later").chat_template == "{{ messages }}"
