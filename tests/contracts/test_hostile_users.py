"""Nothing that a user's rows hold ends a run, changes who is counted or acts on another user."""

import csv
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dprlhf
from dprlhf import recipe
from dprlhf.boundary import BoundedSum, Released, open_private
from dprlhf.data.loading import load_rows
from dprlhf.data.users import Prompts, Users
from dprlhf.privacy.gate import Gate
from helpers import agents, hostile
from helpers.marks import slow
from helpers.runs import ADAPTER, charged
from helpers.stages import stage_of

LONGEST = 24


def rows_of(count, columns, *, blank):
    """Return rows as JSON: of every eleven users the first is as others are, the rest hostile.

    Args:
        count: Number of rows, each of a user of its own.
        columns: By its name, what makes a hostile value, and the JSON text of a usual one.
        blank: Whether the hostile users bring nothing, as the null user of zero-out adjacency.
    """
    rng, rows = random.Random(7), []
    for number in range(count):
        made = {name: make(rng) for name, (make, _) in columns.items()}
        if number % 11 == 0:
            made = {
                name: usual.replace("NUMBER", str(number)) for name, (_, usual) in columns.items()
            }
        elif blank:
            made = dict.fromkeys(columns, "null")
        values = "".join(f", {json.dumps(name)}: {made[name]}" for name in columns)
        rows.append(f'{{"user": "u{number}"{values}}}')
    return rows


def users_of(file: Path, lines: list[str] | None = None, **settings: Any) -> Users:
    if lines is not None:
        file.write_text("\n".join(lines))
    spec = recipe.Data(path=str(file), user_column="user", max_prompt_tokens=LONGEST, **settings)
    return Users(load_rows(spec), spec)


def usual(found: Prompts) -> list[tuple[Any, ...]]:
    """Return all that is read of the users who are as others are."""
    rows = [i for i, user in enumerate(found.users.tolist()) if user % 11 == 0]
    some = found.take(rows)
    columns = [some.columns[name] for name in sorted(some.columns)]
    return list(zip(some.users.tolist(), some.slots.tolist(), some.prompts, *columns, strict=True))


ASKED = '[{"role": "user", "content": "NUMBER and 1?"}]'


@pytest.mark.parametrize("asked", [ASKED, '"NUMBER and 1?"'], ids=["conversations", "texts"])
def test_hostile_users_are_alone_in_it(asked: str, tmp_path: Path) -> None:
    policy = agents.policy_of(torch.float32)
    columns = {"prompt": (hostile.prompt, asked), "answer": (hostile.value, "NUMBER")}
    count = 220
    users, blank = (
        users_of(tmp_path / f"{blank}.jsonl", rows_of(count, columns, blank=blank))
        for blank in (False, True)
    )
    assert users.count == blank.count == count
    told: list[str] = []
    users.tell = told.append

    def read(some: Users) -> Prompts:
        return some.readable(
            np.arange(count), lambda prompts: policy.encode(prompts.prompts, LONGEST)
        )

    whole, without = read(users), read(blank)
    assert usual(whole) == usual(without)
    assert len(without) == count // 11 + (count % 11 > 0)
    assert all(len(ids) <= LONGEST for ids in policy.encode(whole.prompts, LONGEST))
    assert len(told) == count - len(whole) > count // 4
    assert not any(hostile.CANARY in line for line in told)
    for act in (users.digest, users.identities, lambda: users.traces(["user"])):
        open_private(act())
    open_private(users.left_out(lambda prompts: [False] * len(prompts)))


def test_a_table_has_the_rows_that_were_written(tmp_path: Path) -> None:
    rng = random.Random(3)
    texts = [hostile.text(rng).encode("utf-8", "replace").decode() for _ in range(500)]
    for name, dialect in (("a.csv", csv.excel), ("a.tsv", csv.excel_tab)):
        with open(tmp_path / name, "w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, dialect)
            table.writerows([["user", "prompt"], *([f"u{i}", t] for i, t in enumerate(texts))])
        read = users_of(tmp_path / name).select(np.arange(500))
        assert read.prompts == texts
    with open(tmp_path / "one.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["prompt"], *([t] for t in texts)])
    assert len(load_rows(recipe.Data(path=str(tmp_path / "one.csv")))) == 500


def public_files(folder: Path) -> bytes:
    return b"".join(
        path.read_bytes() + str(path).encode()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "secret" not in path.relative_to(folder).parts
    )


def scored(prompts: list[Any], completions: list[Any], answer: list[Any], **_: Any) -> list[float]:
    """Print what there is, and raise for what is no number."""
    print(prompts, answer)
    both = zip(answer, completions, strict=True)
    return [math.sin(float(value) + len(str(text))) for value, text in both]


RL = {"prompt": (hostile.prompt, ASKED), "answer": (hostile.value, "1")}
TEXT = (hostile.prompt, '" aa NUMBER"')
STAGES: dict[str, dict[str, Any]] = {
    "pg": RL,
    "rebel": RL,
    "ppo": RL,
    "agent": RL,
    "sft": {"prompt": TEXT, "completion": TEXT},
    "reward": {"prompt": TEXT, "chosen": TEXT, "rejected": TEXT},
    "dpo": {"prompt": TEXT, "chosen": TEXT, "rejected": TEXT},
    "feedback": {"prompt": TEXT, "completion": TEXT, "label": (hostile.value, "true")},
}
STAGES["linear reward"] = STAGES["feedback"]


def a_run(stage: str, model: str, data: Path, folder: Path) -> None:
    common: dict[str, Any] = {
        "data": {"path": str(data), "user_column": "user"}, "privacy": {"epsilon": 8.0},
        "rounds": 3, "optimizer": {"learning_rate": 0.05}, "update": {"batch_size": 8},
        "output_dir": str(folder),
    }  # fmt: skip
    if STAGES[stage] is RL:
        acting = {"tools": [agents.add]} if stage == "agent" else {}
        rollout = {"max_new_tokens": 12, "responses": 2, "batch_size": 8}
        rollout |= {"max_new_tokens": 40, "responses": 4} if acting else {}
        update = {"name": "pg" if stage == "agent" else stage, "batch_size": 8}
        common["data"] |= {"max_prompt_tokens": 40}
        dprlhf.train(
            policy={"model_name_or_path": model, "adapter": ADAPTER}, reward=scored, quiet=True,
            rollout=rollout, **{**common, "update": update}, **acting,
        )  # fmt: skip
        return
    common["update"] |= {"value_rounds": 1} if stage == "feedback" else {}
    if stage == "linear reward":
        stage, public = "feedback", data.with_name("public.jsonl")
        row = {"prompt": "is it ", "completion": " aa", "label": True}
        public.write_text("\n".join(json.dumps({**row, "prompt": f"is {n} "}) for n in range(12)))
        common["update"] |= {"loss_type": "linear_reward", "subspace": {"rank": 4, "prompts": 8}}
        common |= {"rounds": 1, "evaluation": {"data": {"path": str(public)}, "prompts": 2}}
    dprlhf.train_stage(stage_of(recipe.STAGES[stage], model, **common), quiet=True)


@pytest.mark.parametrize("stage", [name if name == "pg" else slow(name) for name in STAGES])
def test_a_run_with_hostile_users(stage, tmp_path, monkeypatch, capfd):
    """The sum of a round moves by at most S for each of them.

    Every release is replaced by the same values, so that both runs stay at the same policy.
    """
    model = agents.save(tmp_path / "model")
    monkeypatch.setattr("dprlhf.runs.folder.new_key", lambda: bytes(range(32)))
    sums: list[tuple[int, float, torch.Tensor]] = []

    def release(gate: Gate, t: int, bounded: BoundedSum) -> Released[torch.Tensor]:
        gate._charge_of(t)
        sums.append((t, bounded.clip_norm, bounded.total.clone()))
        generator = torch.Generator().manual_seed(len(sums))
        made = torch.randn(len(bounded.total), generator=generator, dtype=torch.float64)
        return Released(0.01 * made.to(bounded.total), t)

    monkeypatch.setattr(Gate, "release", release)
    seen = []
    for blank in (False, True):
        sums = []
        data = tmp_path / f"{blank}.jsonl"
        data.write_text("\n".join(rows_of(44, STAGES[stage], blank=blank)))
        a_run(stage, model, data, tmp_path / f"run-{blank}")
        rounds = [1] if stage == "linear reward" else [1, 2, 3]
        assert charged(tmp_path / f"run-{blank}") == rounds
        card = json.loads((tmp_path / f"run-{blank}/privacy.json").read_text())
        lines = (tmp_path / f"run-{blank}/secret/telemetry-0.jsonl").read_text().splitlines()
        told = [json.loads(line) for line in lines]
        seen.append((card["users"], sums, [t["users"] - t["users_not_readable"] for t in told]))
    (users, whole, read), (others, without, own) = seen
    assert users == others == 44
    assert len(whole) == len(without)
    assert sum(read) > sum(own) > 0
    for (t, clip_norm, total), (_, _, blanked) in zip(whole, without, strict=True):
        apart = float((total - blanked).norm())
        assert apart <= (read[t - 1] - own[t - 1]) * clip_norm * (1 + 1e-9)
    assert any(bool(total.any()) for _, _, total in without)
    assert hostile.CANARY.encode() not in public_files(tmp_path / "run-False")
    shown = capfd.readouterr()
    assert hostile.CANARY not in shown.out + shown.err
    assert "cannot be read" in (tmp_path / "run-False/secret/operator.txt").read_text()
