"""Rewards, datasets, chat templates and callbacks as TRL's users have them, in whole runs."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoTokenizer, TrainerCallback

import dprlhf
from dprlhf import DprlhfError
from dprlhf.data.loading import load_rows
from dprlhf.data.users import Users
from dprlhf.recipe import Data
from helpers import tiny

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROWS = [
    {"prompt": [{"role": "user", "content": f"question {i}"}], "who": f"p{i // 2}"}
    for i in range(12)
]
TEXTS = [{"prompt": f"question {i}", "who": f"p{i // 2}"} for i in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tiny.save(tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def settings(model: str, folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": model,
        "epsilon": 8.0,
        "rounds": 2,
        "data__user_column": "who",
        "data__max_prompts_per_user": 2,
        "policy__adapter": {"type": "lora", "target_modules": ["c_attn"]},
        "rollout__max_new_tokens": 6,
        "output_dir": folder / "run",
        "quiet": True,
        **changes,
    }


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def csv(folder: Path) -> Any:
    datasets.Dataset.from_list(TEXTS).to_csv(folder / "rows.csv")
    return str(folder / "rows.csv")


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("begin", state.max_steps, kwargs))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        assert not kwargs  # no model, no batch, no data loader
        self.seen.append(("log", state.global_step, logs))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("end", len(state.log_history), args.output_dir))


def test_callbacks_of_transformers_see_what_is_published(model: str, tmp_path: Path) -> None:
    recorder, plain = Recorder(), []
    dprlhf.train(
        **settings(model, tmp_path),
        prompts=ROWS,
        reward=lambda completions: [0.5] * len(completions),
        callbacks=[recorder, plain.append],
    )
    written = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert recorder.seen == [
        ("begin", 2, {}),
        ("log", 1, written[0]),
        ("log", 2, written[1]),
        ("end", 2, str(tmp_path / "run")),
    ]
    assert plain == written


def test_a_log_is_not_told_which_rows(tmp_path: Path) -> None:
    """Which users' rows are odd, and how many, is for the operator; a log is passed on."""
    (tmp_path / "b.jsonl").write_text('{"prompt": "a"}\n[1]\n[2]\n')
    (tmp_path / "a.csv").write_text("prompt,who\na,x\nb,\nc,y\nd,\n")
    data = Data(path=str(tmp_path / "a.csv"), user_column="who")
    for refused in (
        lambda: load_rows(Data(path=str(tmp_path / "b.jsonl"))),
        lambda: Users(load_rows(data), data),
    ):
        with pytest.raises(DprlhfError, match=r"some (rows|lines) \(on a terminal") as caught:
            refused()
        text = str(caught.value).replace(str(tmp_path), "")
        assert not any(letter.isdecimal() for letter in text), text
