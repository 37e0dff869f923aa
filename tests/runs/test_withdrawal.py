"""``dprlhf erase``: a withdrawn user has no part in later rounds, and nobody else is moved."""

import hmac
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from typer.testing import CliRunner

import dprlhf
from dprlhf import DprlhfError
from dprlhf.boundary import open_private
from dprlhf.budget import Book
from dprlhf.cli.app import app
from dprlhf.data.users import Users
from dprlhf.privacy.ledger import Ledger, opened_terms
from dprlhf.privacy.partition import allocate
from dprlhf.privacy.plan import make_plan
from dprlhf.recipe import Data
from dprlhf.runs.earlier import records_of, risk_of
from dprlhf.runs.withdrawal import STATEMENTS, erase
from helpers.runs import lower_case, run_settings, weights

KEY = bytes(range(32))
ROUNDS, STOPPED = 4, 2


def stop(metrics: dict[str, Any]) -> None:
    if metrics["round"] == STOPPED:
        raise KeyboardInterrupt


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dprlhf.runs.folder.new_key", lambda: KEY)


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def settings(model: str, folder: Path, rows: list[dict[str, Any]], **changes: Any) -> Any:
    common = run_settings(model, rounds=ROUNDS, data__max_prompt_tokens=16)
    del common["prompts"]
    path = str(written(folder, rows))
    return {**common, "data__path": path, "output_dir": folder / "run", **changes}


def stopped(arguments: dict[str, Any]) -> Path:
    with pytest.raises(KeyboardInterrupt):
        dprlhf.train(**arguments, callbacks=[stop])
    return Path(arguments["output_dir"])


def in_the_last_round(users: int) -> list[int]:
    plan = make_plan(users=users, rounds=ROUNDS, delta=1e-5, epsilon=8.0)
    return open_private(allocate(plan, KEY)).round(ROUNDS).tolist()


def rows_of(users: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{u} asks {n}", "who": f"person {u}"} for n in (1, 2) for u in range(users)]


def equal(one: Path, other: Path) -> bool:
    pairs = zip(weights(one).values(), weights(other).values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def files(run: Path) -> dict[str, bytes]:
    """The files of a run that are not secret, with what is in them."""
    places = [p for p in sorted(run.rglob("*")) if p.is_file() and "secret" not in p.parts]
    return {str(p.relative_to(run)): p.read_bytes() for p in places}


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "deleted"), [("who", True), (None, False)])
def test_others_are_the_same_to_the_bit(model, key, tmp_path, unit, deleted):
    """A run whose users withdraw equals one in which they were blank from the beginning."""
    rows = rows_of(36)
    users = in_the_last_round(36 if unit else 72)
    gone = [n in users for n in range(len(rows))]
    names = [str(user + 1) for user in users]
    if unit:
        names = [f"person {user}" for user in users]
        gone = [row["who"] in names for row in rows]
    common = {"data__user_column": unit, "data__max_prompts_per_user": 2 if unit else 1}
    run = stopped(settings(model, tmp_path, rows, **common))
    before = files(run)
    erase(run, names)
    assert files(run) == before
    if deleted:
        written(tmp_path, [row for row, is_gone in zip(rows, gone, strict=True) if not is_gone])
    dprlhf.resume(run, reward=lower_case, quiet=True)
    blank = [row | {"prompt": None} if at else row for row, at in zip(rows, gone, strict=True)]
    for name, others in (("blank", blank), ("whole", rows)):
        folder = tmp_path / name
        stopped(settings(model, tmp_path, others, **common, output_dir=folder))
        dprlhf.resume(folder, reward=lower_case, quiet=True)
    assert equal(run, tmp_path / "blank")
    assert not equal(run, tmp_path / "whole")
    assert files(run).keys() == files(tmp_path / "whole").keys()
    metrics = [(at / "metrics.jsonl").read_text() for at in (run, tmp_path / "blank")]
    assert metrics[0] == metrics[1]


@pytest.mark.slow
def test_a_person_of_a_pair_takes_its_rows_along(model, key, tmp_path):
    """Neither the other person nor whom that one shared rows with is moved to another user."""
    talks = [{"a": f"p{i}", "b": f"p{i + 1}", "prompt": f"{i} asks {n}"}
             for i in range(60) for n in (1, 2)]  # fmt: skip
    common = {"data__user_column": ["b", "a"], "data__max_prompts_per_user": 2}
    users = Users(Dataset.from_list(talks), Data(path="in-memory", user_column=["a", "b"]))
    gone = users.select(np.array(in_the_last_round(users.count)))
    assert 60 > users.count > len(gone.prompts) / 2 > 0
    run = stopped(settings(model, tmp_path, talks, **common))
    names = gone.columns["b"]
    assert erase(run, names)["people"] == len(gone.prompts) / 2
    left = [row for row in talks if not {row["a"], row["b"]} & {*names}]
    written(tmp_path, left)
    dprlhf.resume(run, reward=lower_case, quiet=True)
    blank = [row if row in left else row | {"prompt": None} for row in talks]
    for name, rows in (("blank", blank), ("whole", talks)):
        stopped(settings(model, tmp_path, rows, **common, output_dir=tmp_path / name))
        dprlhf.resume(tmp_path / name, reward=lower_case, quiet=True)
    assert equal(run, tmp_path / "blank")
    assert not equal(run, tmp_path / "whole")
    card = json.loads((run / "privacy.json").read_text())
    assert card["users"] == users.count
    assert card["unit"] == (
        "user = one person; each row belongs to all whom 'a' and 'b' name, and each person is in"
        " the rows of one such group, which are clipped together, at most 2 prompts"
    )
    assert f"the number of groups, {users.count}" in card["assumed_public"]
    assert any("who shares rows with whom ('a' and 'b')" in one for one in card["assumed_public"])


@pytest.mark.slow
def test_several_withdraw_and_a_statement_says_what_is_left(model, key, tmp_path):
    rows = rows_of(36)
    run = stopped(settings(model, tmp_path, rows, data__user_column="who"))
    words = ["erase", str(run), "--user", "person 3", "--user", " person 5"]
    assert CliRunner().invoke(app, words).exit_code == 0
    written(tmp_path, [row for row in rows if row["who"] != "person 3"])
    with pytest.raises(DprlhfError, match="not the ones that this run started with"):
        erase(run, ["person 7"])  # of two who had gone, one is there again
    written(tmp_path, [row for row in rows if row["who"] not in ("person 3", "person 5")])
    said = erase(run, ["person 7"])
    assert (said["people"], said["released"], said["rounds"]) == (3, STOPPED, ROUNDS)
    assert said["risk"]["best_guess"] == risk_of(records_of(run), people=3).best_guess
    body = {name: value for name, value in said.items() if name != "hmac_sha256"}
    text = json.dumps(body, sort_keys=True).encode()
    assert said["hmac_sha256"] == hmac.new(KEY, text, "sha256").hexdigest()
    statements = (run / "secret/withdrawals.jsonl").read_text().splitlines()
    assert [json.loads(one)["people"] for one in statements] == [2, 3]
    for name in ("withdrawals.jsonl", "withdrawn.json"):
        assert (run / "secret" / name).stat().st_mode & 0o077 == 0
    shutil.copytree(run, tmp_path / "copy")
    left = [row for row in rows if row["who"] not in ("person 3", "person 5", "person 7")]
    for place, kept in ((run, rows), (tmp_path / "copy", left)):
        written(tmp_path, kept)
        dprlhf.resume(place, reward=lower_case, quiet=True)
    assert equal(run, tmp_path / "copy")


@pytest.mark.slow
def test_the_budget_book_keeps_those_who_withdrew(model, key, tmp_path, monkeypatch):
    book, rows = str(tmp_path / "book.db"), rows_of(36)
    monkeypatch.setenv("DPRLHF_BOOK", book)
    Book.create(book, "people", epsilon=20.0, delta=1e-4, unit="who")
    run = stopped(settings(model, tmp_path, rows, data__user_column="who"))
    before = CliRunner().invoke(app, ["budget", "show"]).output
    assert "36 users" in before
    erase(run, ["person 3"])
    written(tmp_path, [row for row in rows if row["who"] != "person 3"])
    dprlhf.resume(run, reward=lower_case, quiet=True)
    assert CliRunner().invoke(app, ["budget", "show"]).output == before


@pytest.mark.slow
def test_what_cannot_be_erased(model: str, key: None, tmp_path: Path) -> None:
    rows = rows_of(4)
    run = stopped(settings(model, tmp_path, rows, data__user_column="who"))
    for users, message in (
        (["person 9"], "there is no user in the column 'who' 'person 9'"),
        ([f"person {u}" for u in range(4)], "no user would be left"),
    ):
        with pytest.raises(DprlhfError, match=message):
            erase(run, users)
    ledger = Ledger(run / "ledger.jsonl", opened_terms(run / "ledger.jsonl"))
    with pytest.raises(DprlhfError, match="another process is using this run"):
        erase(run, ["person 1"])
    ledger.close()
    written(tmp_path, rows[::-1])
    with pytest.raises(DprlhfError, match="not the ones that this run started with"):
        erase(run, ["person 1"])
    with pytest.raises(DprlhfError, match="not a run folder"):
        erase(tmp_path, ["person 1"])
    assert not (run / "secret/withdrawn.json").exists()


@pytest.mark.slow
def test_a_withdrawal_that_a_crash_cut_short_is_mended(model, key, tmp_path):
    run = stopped(settings(model, tmp_path, rows_of(8), data__user_column="who"))
    digest = run / "secret/data-digest"
    before = digest.read_text()
    (run / "secret" / STATEMENTS).mkdir()
    with pytest.raises(DprlhfError, match=r'not be written .*; they have withdrawn, .*"hmac_'):
        erase(run, ["person 3"])
    after = digest.read_text()
    digest.write_text(before)
    with pytest.raises(DprlhfError, match="not the ones that this run started with"):
        dprlhf.resume(run, reward=lower_case, quiet=True)
    with pytest.raises(DprlhfError, match="there is no user"):
        erase(run, ["person 3"])
    assert digest.read_text() == after
    dprlhf.resume(run, reward=lower_case, quiet=True)


def test_users_without_rows_count_and_keep_the_others_in_place() -> None:
    names = ["a", "b", "a", "c", "b", "d"]
    rows = Dataset.from_dict({"prompt": [f"{n} {i}" for i, n in enumerate(names)], "who": names})
    users = Users(rows, Data(path="in-memory", user_column="who", max_prompts_per_user=2))
    assert open_private(users.numbers_of(["c", "a"])) == [2, 0]
    left = users.without([1]).without([3])
    assert left.count == users.count == 4
    for number, texts in enumerate((["a 0", "a 2"], [], ["c 3"], [])):
        assert left.select(np.array([number])).prompts == texts
    assert open_private(left.digest()) == open_private(users.without([3, 1]).digest())
    gap = Users(rows.select([0, 2, 3]), users._spec).with_gaps([1, 3])
    assert gap.select(np.arange(4)).prompts == left.select(np.arange(4)).prompts
