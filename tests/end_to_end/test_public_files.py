"""Which files a run folder may hold outside ``secret/``, for every stage: these and no other.

Everything outside ``secret/`` is covered by the stated guarantee and may be published. A file that
appears there is a release, so a new one needs a thought about what it was computed from, and an
entry here. That what these files hold is public or released is for ``test_leaks.py``.
"""

import re
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

import dprlhf
from dprlhf import DprlhfError
from dprlhf.recipe import STAGES
from dprlhf.runs.evidence import write_evidence
from dprlhf.runs.publish import merge
from dprlhf.runs.report import write_report
from helpers.stages import stage_of

ALWAYS = {
    "recipe.yaml": "every setting, written before the first round",
    "privacy.json": "the guarantee: plan, assumptions, commitment to the key",
    "ledger.jsonl": "charges: rounds and the terms of the plan",
    "metrics.jsonl": "released values and public evaluations",
    "checkpoint/*": "parameters and optimizer state, computed from releases",
    "policy/*": "the adapter: the last released parameters, and its model card",
}
REINFORCEMENT = {
    "samples.json": "public prompts with responses of the base model and of the released policy",
    "public-samples.jsonl": "a few of these at each evaluation",
    "evaluation.json": "measures of responses to public prompts",
    "timing.json": "seconds of each phase on public prompts",
}
SUPERVISED = {
    "evaluation.json": "loss on public rows",
    "model/*": "the merged model: base model and released adapter",
}
PUBLIC = [f"the film was {word}" for word in ("good", "bad", "long", "short", "a", "b", "c")]
DAY = 86_400  # seconds


def unexpected(folder: Path, allowed: dict[str, str]) -> list[str]:
    """Return the files outside ``secret/`` that no pattern names."""
    patterns = [re.escape(name).replace(r"\*", r"[^/]+") for name in allowed]
    files = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    public = [name for name in files if not name.startswith("secret/")]
    return [name for name in public if not any(re.fullmatch(x, name) for x in patterns)]


def length(completions: list[str], **columns: Any) -> list[float]:
    print(completions)  # which is kept, in secret/
    return [len(text) / 10 for text in completions]


def reinforced(model: str, folder: Path, **changes: Any) -> Path:
    dprlhf.train(
        model=model,
        prompts=[{"prompt": f"user {i} says", "user": f"u{i // 2}"} for i in range(40)],
        data__user_column="user", data__max_prompts_per_user=2, data__max_prompt_tokens=16,
        reward=length, evaluation_prompts=PUBLIC, evaluation__every=1, rounds=2,
        rollout__max_new_tokens=4, quiet=True, output_dir=folder, **{"epsilon": 4.0, **changes},
    )  # fmt: skip
    return folder


def supervised(stage: str, model: str, folder: Path) -> Path:
    texts = {"completion": " aaaa"} if stage == "sft" else {"chosen": " aa", "rejected": " bbbb"}
    rows = [{"user": f"u{i}", "prompt": f"it {i}", **texts} for i in range(20)]
    data = {"path": "in-memory", "user_column": "user"}
    settings = stage_of(STAGES[stage], model, data=data, rounds=2, output_dir=str(folder))
    dprlhf.train_stage(settings, data=rows[2:], evaluation_data=rows[:2], quiet=True)
    return folder


@pytest.fixture(scope="module")
def folders(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of each stage."""
    place = tmp_path_factory.mktemp("runs")
    return {"rl": reinforced(model, place / "rl")} | {
        stage: supervised(stage, model, place / stage) for stage in ("sft", "reward")
    }


def test_a_reinforcement_run_writes_these_files_and_no_other(folders: dict[str, Path]) -> None:
    folder = folders["rl"]
    assert unexpected(folder, ALWAYS | REINFORCEMENT) == []
    assert {"samples.json", "timing.json"} <= {p.name for p in folder.iterdir()}


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_a_supervised_stage_writes_these_files_and_no_other(folders, stage):
    assert unexpected(folders[stage], ALWAYS | SUPERVISED) == []
    assert (folders[stage] / "evaluation.json").exists()


def not_public(folder: Path) -> list[str]:
    """Return what can be seen of a run folder and has a time of the clock: all but secret/'s own.

    A public time is the day before the run, and a checksum of the content as the time of day.
    """
    day = folder.joinpath("recipe.yaml").stat().st_mtime // DAY * DAY
    assert time.time() - 3 * DAY < day < time.time() - DAY
    wrong = []
    for path in (folder, *folder.rglob("*")):
        if path.parent == folder / "secret":
            continue
        expected = day
        if path.is_file():
            content = path.read_bytes()
            expected += zlib.crc32(content[: 1 << 22], len(content)) % DAY
        if path.stat().st_mtime != expected:
            wrong.append(path.relative_to(folder).as_posix())
    return wrong


@pytest.mark.parametrize("stage", ["rl", "sft", "reward"])
def test_the_times_of_files_are_public(folders: dict[str, Path], stage: str) -> None:
    assert not_public(folders[stage]) == []


def test_the_times_are_public_after_each_round_and_after_a_failure(model, tmp_path):
    seen: list[list[str]] = []

    def look(metrics: dict[str, Any]) -> None:
        seen.append(not_public(tmp_path / "run"))
        if metrics["round"] == 2:
            raise RuntimeError

    with pytest.raises(DprlhfError, match="RuntimeError during the run"):
        reinforced(model, tmp_path / "run", callbacks=[look])
    assert [*seen, not_public(tmp_path / "run")] == [[], [], []]
    assert unexpected(tmp_path / "run", ALWAYS | REINFORCEMENT) == []
    assert (tmp_path / "run/secret/error.txt").exists()  # a file there is no one's finding
    (tmp_path / "run/samples.json").write_text("[]")
    assert not_public(tmp_path / "run") == [".", "samples.json"]


OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": {"update": {"name": "ppo"}, "kl__beta": 0.1},
    "npg": {
        "update": {"name": "npg", "oracle": {"name": "sufficient-statistics"}},
        "optimizer__name": "sgd",
    },
    "subspace": {
        "privacy__participations": 2,
        "update__subspace": {"rank": 2, "prompts": 4},
        "evaluation__prompts": 2,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_adds_a_file(model: str, tmp_path: Path, name: str) -> None:
    folder = reinforced(model, tmp_path / "run", **OPTIONS[name])
    assert unexpected(folder, ALWAYS | REINFORCEMENT) == []
    assert not_public(folder) == []


@pytest.mark.slow
def test_what_is_made_of_a_run_later(folders: dict[str, Path], model: str, tmp_path: Path) -> None:
    """Resuming adds nothing; a report and evidence add themselves, and a merge goes elsewhere."""

    def stop(metrics: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reinforced(model, tmp_path / "run", callbacks=[stop])
    prompts = [{"prompt": f"user {i} says", "user": f"u{i // 2}"} for i in range(40)]
    dprlhf.resume(
        tmp_path / "run", prompts=prompts, reward=length, evaluation_prompts=PUBLIC, quiet=True
    )
    assert unexpected(tmp_path / "run", ALWAYS | REINFORCEMENT) == []
    assert not_public(tmp_path / "run") == []
    folder = shutil.copytree(folders["rl"], tmp_path / "copy")
    merge(folder, tmp_path / "merged")
    assert unexpected(folder, ALWAYS | REINFORCEMENT) == []
    write_report([folder])
    write_evidence(folder)
    later = {"report.html": "made of public files", "comply/*": "made of public files"}
    assert unexpected(folder, ALWAYS | REINFORCEMENT | later) == []
    assert {"report.html", "comply"} <= {p.name for p in folder.iterdir()}


def test_the_search_sees_another_file(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["rl"], tmp_path / "run")
    (folder / "identities.json").write_text("[]")
    (folder / "policy" / "deeper").mkdir()
    (folder / "policy" / "deeper" / "x.bin").write_bytes(b"")
    assert unexpected(folder, ALWAYS | REINFORCEMENT) == ["identities.json", "policy/deeper/x.bin"]
