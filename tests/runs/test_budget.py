"""Whole runs under a budget book: the reservation comes first, once, and is never forgotten."""

import contextlib
import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import dprlhf
from dprlhf import DprlhfError, recipe
from dprlhf.audit.one_run import audit
from dprlhf.budget import Book, BrokenOffError
from dprlhf.cli.app import app
from dprlhf.data.given_rows import rows_from
from dprlhf.data.in_memory import InMemoryInputs
from dprlhf.data.users import Users
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import new_nonce, read_ledger
from dprlhf.recipe import make_recipe
from dprlhf.runs import budget
from dprlhf.runs.budget import NO_BOOK
from dprlhf.runs.earlier import Earlier, Record, cost_terms
from dprlhf.runs.folder import RunFolder
from dprlhf.training import build
from dprlhf.training.build import plan_of
from dprlhf.training.dry_run import dry_run
from helpers.recipes import recipe_settings
from helpers.runs import ADAPTER, lower_case
from helpers.stages import stage_of

USERS = 12
PASSWORD = "hunter2"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DPRLHF_BOOK", "book.db")


def settings(model: str, **changes: Any) -> dict[str, Any]:
    return {
        "model": model, "prompts": [f"user {i} says" for i in range(USERS)], "reward": lower_case,
        "privacy__noise_multiplier": 8.0, "privacy__partition": "fixed", "privacy__delta": 1e-5,
        "rounds": 2, "policy__adapter": ADAPTER, "rollout__max_new_tokens": 2,
        "rollout__responses": 2, "quiet": True, **changes,
    }  # fmt: skip


def train(model: str, folder: str, **changes: Any) -> None:
    dprlhf.train(**settings(model, **changes), output_dir=f"runs/{folder}")


def resume(folder: str, **changes: Any) -> None:
    prompts = changes.get("prompts", [f"user {i} says" for i in range(USERS)])
    told = changes.get("callbacks", [])
    dprlhf.resume(f"runs/{folder}", prompts=prompts, reward=lower_case, quiet=True, callbacks=told)


def values(model: str, **privacy: Any) -> dict[str, Any]:
    return {
        "policy": {"model_name_or_path": model, "adapter": ADAPTER}, "data": {"path": "in-memory"},
        "rewards": [{"function": "in-memory"}], "privacy": privacy, "rounds": 2,
    }  # fmt: skip


def make(epsilon: float = 2.0, path: str = "book.db") -> Book:
    return Book.create(path, "clinic", epsilon=epsilon, delta=1e-5, unit=None)


def entries(folder: str, kind: str) -> list[dict[str, Any]]:
    return [e.body for e in read_ledger(Path("runs", folder, "ledger.jsonl")) if e.kind == kind]


def reserved(book: Book) -> list[str]:
    return [row["name"] for row in book.read()["reservations"]]


@pytest.mark.slow
def test_each_person_of_a_pair_pays(model: str) -> None:
    """Whoever was with somebody else before pays for both runs, and so does each of those."""
    columns = ["--user-column", "b", "--user-column", "a"]
    made = ["budget", "create", "talks", "--epsilon", "50", "--delta", "1e-5", *columns]
    assert CliRunner().invoke(app, made).exit_code == 0
    book = Book("book.db")
    talks = [{"a": f"a{i}", "b": f"b{i}", "prompt": f"user {i} says"} for i in range(USERS)]
    others = [row | {"b": f"c{i}"} for i, row in enumerate(talks)]
    swapped = [row | {"a": row["b"], "b": row["a"]} for row in talks]
    file, lone = Path("talks.jsonl"), talks[0] | {"b": "somebody without a user"}
    file.write_text("".join(json.dumps(row) + "\n" for row in [*talks, lone]))
    given = recipe_settings(data={"path": str(file), "user_column": ["b", "a"]})
    budget.enrol(make_recipe(given, source="test"), "book.db", "talks.yaml", "talks")
    assert book.read()["users"] == 2 * USERS + 1
    for name, rows in (("one", talks), ("two", others), ("three", swapped)):
        train(model, name, prompts=rows, data__user_column=["a", "b"])
    sizes = [row["users"] for row in book.read()["reservations"] if row["name"]]
    assert sizes == [2 * USERS + 1, *[2 * USERS] * 3]
    assert book.read()["users"] == 3 * USERS + 1
    with pytest.raises(DprlhfError, match="budget for users by the column 'a,b', and this run"):
        train(model, "four", prompts=talks, data__user_column="a")


@pytest.mark.slow
def test_a_run_reserves_before_its_first_charge_and_the_second_is_refused(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    book = make(epsilon=0.6)
    held: list[list[str]] = []
    real = Gate.release

    def release(self: Gate, *given: Any) -> Any:
        held.append(reserved(book))
        return real(self, *given)

    monkeypatch.setattr(Gate, "release", release)
    train(model, "one")
    assert held == [["one"]] * 2
    kinds = [e.kind for e in read_ledger(Path("runs/one/ledger.jsonl"))]
    assert kinds[:3] == ["open", "book", "charge"]
    assert entries("one", "book") == [{"book": book.id, "reservation": 1, "counter": 2}]
    card = json.loads(Path("runs/one/privacy.json").read_text())
    assert card["book"] == {
        "book": book.id, "number": 1, "counter": 2, "dataset": "clinic", "epsilon": 0.6,
        "delta": 1e-5,
    }  # fmt: skip
    assert f"reservation 1 in book {book.id}" in Path("runs/one/policy/README.md").read_text()
    assert NO_BOOK not in capsys.readouterr().err
    secret = book.key.hex()
    hashes = [h.hex() for h in book.hashed(f"user {i} says" for i in range(USERS))]
    for path in Path("runs/one").rglob("*"):
        if path.is_file():
            assert not any(text in path.read_bytes().decode("latin1") for text in (secret, *hashes))

    for attempt in (
        lambda: train(model, "two"),
        lambda: dry_run(
            make_recipe(values(model, noise_multiplier=8.0, partition="fixed")),
            InMemoryInputs([f"user {i} says" for i in range(USERS)], lower_case, None),
        ),
    ):
        with pytest.raises(DprlhfError, match="refused: with this run a user would exceed"):
            attempt()
    assert not Path("runs/two").exists()
    assert reserved(book) == ["one"]
    resume("one")  # finished: it has its reservation


@pytest.mark.slow
def test_a_run_that_is_refused_late_leaves_no_folder(model, monkeypatch):
    """Another run can take what is left while this one loads its model."""
    book = make(epsilon=0.6)
    from dprlhf.training import build

    real, calls = build.reserve, []

    def reserve(*given: Any, commit: bool) -> Any:
        calls.append(commit)
        if commit:
            monkeypatch.setattr(build, "reserve", real)
            with monkeypatch.context() as other:  # in a process of its own
                other.setattr("dprlhf.training.build._RUNNING", threading.Lock())
                train(model, "other")
        return real(*given, commit=commit)

    monkeypatch.setattr(build, "reserve", reserve)
    with pytest.raises(DprlhfError, match="refused"):
        train(model, "late")
    assert calls == [False, True]
    assert not Path("runs/late").exists()
    assert reserved(book) == ["other"]


def test_a_crashed_run_keeps_its_reservation_and_resuming_pays_nothing(model, monkeypatch):
    book = make(epsilon=0.6)

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # between the reservation and the ledger
        patch.setattr("dprlhf.training.build.open_ledger", crash)
        with pytest.raises(KeyboardInterrupt):
            train(model, "one")
    assert reserved(book) == ["one"]
    assert not Path("runs/one/ledger.jsonl").exists()
    with pytest.raises(DprlhfError, match="refused"):
        train(model, "two")
    with monkeypatch.context() as patch:  # before the first charge
        patch.setattr(Gate, "release", crash)
        with pytest.raises(KeyboardInterrupt):
            resume("one")
    with pytest.raises(DprlhfError, match="another cost"):
        resume("one", prompts=[f"user {i} says" for i in range(1, USERS + 1)])
    resume("one")
    assert len(entries("one", "charge")) == 2
    assert reserved(book) == ["one"]
    shutil.rmtree("runs/one")
    with pytest.raises(DprlhfError, match="refused"):
        train(model, "two")


def test_a_book_that_cannot_be_used_stops_the_run_before_its_folder(model, monkeypatch):
    with pytest.raises(DprlhfError, match="no such file") as caught:
        train(model, "one")
    assert "\n" not in str(caught.value)
    make()
    Path("book.db").write_bytes(b"rubbish" * 1000)
    with pytest.raises(DprlhfError, match="damaged"):
        train(model, "one")
    Path("book.db").unlink()
    with pytest.raises(DprlhfError, match="its key is still there"):
        make()
    monkeypatch.setenv("DPRLHF_BOOK", "other.db")
    make(path="other.db")
    with pytest.raises(DprlhfError, match=r"without privacy .* would exceed any budget"):
        train(model, "one", privacy__noise_multiplier=0.0)
    with pytest.raises(DprlhfError, match="has no such data set"):
        train(model, "one", privacy__dataset="clinci")
    assert not Path("runs").exists()


def test_a_run_goes_on_with_its_own_book_only(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make()
    train(model, "one")
    monkeypatch.delenv("DPRLHF_BOOK")
    with pytest.raises(DprlhfError, match=r"reserved in budget book .* name"):
        resume("one")
    make(path="other.db")
    monkeypatch.setenv("DPRLHF_BOOK", "other.db")
    with pytest.raises(DprlhfError, match=r"reserved in budget book .* names book"):
        resume("one")


@pytest.mark.slow
def test_a_book_from_a_backup_is_noticed_by_the_runs_at_hand(model, monkeypatch):
    book = make(epsilon=8.0)
    train(model, "one")
    backup = Path("book.db").read_bytes()
    train(model, "two")
    resume("one")
    assert [e["counter"] for e in entries("one", "book")] == [2, 3]
    Path("book.db").write_bytes(backup)
    for attempt in (lambda: train(model, "three"), lambda: resume("two")):
        with pytest.raises(DprlhfError, match="restored from a backup"):
            attempt()
    shutil.rmtree("runs/two")
    with pytest.raises(DprlhfError, match="restored from a backup"):
        resume("one")  # its own ledger has the counter 3
    assert reserved(book) == ["one"]
    # Elsewhere only the runs that it names are at hand.
    elsewhere = {**settings(model), "output_dir": "elsewhere/three"}
    with pytest.raises(DprlhfError, match="restored from a backup"):
        dprlhf.train(**elsewhere, previous=[{"run": "runs/one"}])
    dprlhf.train(**elsewhere)


@pytest.mark.parametrize("when", ["resumed", "finished"])
def test_of_two_copies_of_a_run_the_book_lets_one_go_on(model, monkeypatch, when):
    """Where the other was resumed it may still run, or have been killed; else it has ended."""
    monkeypatch.setattr("dprlhf.privacy.ledger.new_nonce", new_nonce)
    book = make()

    def copied(metrics: dict[str, Any]) -> None:
        if metrics["round"] == 1:
            shutil.copytree("runs/one", "elsewhere/one")
            if when == "resumed":
                raise KeyboardInterrupt

    def refused(metrics: dict[str, Any] | None = None) -> None:
        # The other copy runs in a process of its own, where nothing else runs.
        with monkeypatch.context() as other:
            other.setattr("dprlhf.training.build._RUNNING", threading.Lock())
            with pytest.raises(DprlhfError, match="gone on from another copy of its folder"):
                resume("../elsewhere/one")

    with contextlib.suppress(KeyboardInterrupt, DprlhfError):
        train(model, "one", callbacks=[copied])
    if when == "resumed":
        resume("one", callbacks=[refused])
    refused()
    charged = [entries(folder, "charge") for folder in ("one", "../elsewhere/one")]
    assert list(map(len, charged)) == [2, 1]
    resume("one")
    assert reserved(book) == ["one"]
    assert book.read()["datasets"][0]["runs"] == 1


@pytest.mark.slow
def test_previous_runs_are_counted_once(model: str) -> None:
    train(model, "old", privacy__book="none")
    book = make(epsilon=8.0)
    train(model, "one", previous=[{"run": "runs/old"}])
    train(model, "two", previous=[{"run": "runs/old"}, {"run": "runs/one"}])
    rows = {r["name"]: (r["users"], r["earlier"]) for r in book.read()["reservations"]}
    assert rows == {"old": (12, True), "one": (12, False), "two": (12, False)}
    alone = book.read()["reservations"][0]["epsilon"]
    card = json.loads(Path("runs/two/privacy.json").read_text())
    assert card["epsilon"] == pytest.approx(alone)
    assert book.read()["datasets"][0]["spent"] == pytest.approx(card["total"]["epsilon"])
    other = [f"somebody {i}" for i in range(USERS)]
    train(model, "three", prompts=other, previous=[{"run": "runs/two", "users": "disjoint"}])
    assert {r["name"]: r["users"] for r in book.read()["reservations"]}["two"] == 12


def test_a_password_has_no_place_in_a_recipe(model: str) -> None:
    for url in (
        f"postgresql://me:{PASSWORD}@host/book",
        f"postgresql://host/book?user=me&password={PASSWORD}",
    ):
        with pytest.raises(DprlhfError, match="a recipe is public") as caught:
            train(model, "one", privacy__book=url)
        assert PASSWORD not in str(caught.value)


@pytest.mark.slow
def test_supervised_stages_reserve_and_audits_on_canaries_do_not(model: str) -> None:
    book = make()
    stage = stage_of(
        recipe.SFTRecipe, model, rounds=2, output_dir="runs/sft",
        data={"path": "in-memory", "max_prompt_tokens": 8, "max_completion_tokens": 8},
        privacy={"noise_multiplier": 8.0, "partition": "fixed"},
    )  # fmt: skip
    rows = [{"prompt": f"user {i} says", "completion": " yes"} for i in range(USERS)]
    dprlhf.train_stage(stage, data=rows, quiet=True)
    assert [(r["stage"], r["users"]) for r in book.read()["reservations"]] == [("sft", USERS)]
    train(model, "rl")
    spent = book.read()["datasets"][0]["spent"]
    alone = book.read()["reservations"][0]["epsilon"]
    assert spent > 1.3 * alone  # the same users
    audit(make_recipe(values(model, epsilon=4.0)), "runs/audit", canaries=20, quiet=True)
    assert len(book.read()["reservations"]) == 2


@pytest.mark.slow
def test_the_commands_show_what_is_spent_and_no_hashes(model: str) -> None:
    def call(*words: str) -> str:
        done = CliRunner().invoke(app, ["budget", *words])
        assert done.exit_code == 0, done.output
        return done.output

    made = call("create", "clinic", "--epsilon", "2", "--delta", "1e-5")
    assert "book.db.key" in made
    rows = [{"text": f"user {i} says"} for i in range(USERS)]
    Path("users.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": "users.jsonl", "prompt_column": "text"}
    Path("recipe.yaml").write_text(json.dumps(values(model, epsilon=1.0) | {"data": data}))
    call("enrol", "clinic", "recipe.yaml")
    assert json.loads(call("show", "--json"))["datasets"][0]["users"] == USERS
    assert "users enrolled" in call("history")
    train(model, "one", privacy__tuning_runs=1)
    shown = call("show")
    assert "clinic" in shown
    assert "* at least: runs together cost less" in shown
    book = Book("book.db")
    row = json.loads(call("show", "--json"))["datasets"][0]
    assert (row["runs"], row["users"], row["epsilon"]) == (1, USERS, 2.0)
    assert row["spent"] + row["remaining"] == pytest.approx(2.0)
    listed = call("history")
    assert "one" in listed
    assert "fixed, zero-out, T 2, z 8" in listed
    assert "(2 runs)" in listed
    assert json.loads(call("history", "clinic", "--json"))[1]["times"] == 2
    exported = call("export")
    assert json.loads(exported)["book"] == book.id
    for name in book.hashed(f"user {i} says" for i in range(USERS)):
        assert name.hex() not in exported
    refused = CliRunner().invoke(app, ["budget", "history", "clinci"])
    assert "no data set 'clinci'" in str(refused.exception)


def test_tuning_runs_of_an_earlier_run_are_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Stub:
        id = "b"

        def __init__(self, place: str) -> None:
            pass

        def hashed(self, names: Any) -> set[bytes]:
            return set()

        def reserve(self, spending: Any, users: Any, **more: Any) -> None:
            asked.update(more)

    monkeypatch.setattr("dprlhf.budget.Book", Stub)
    monkeypatch.setenv("DPRLHF_BOOK", "book.db")
    private = {"noise_multiplier": 2.0, "partition": "fixed"}
    made = make_recipe(recipe_settings(privacy=private, rounds=2))
    plan = plan_of(made, 10)
    own = Record("k", "a", "rl", None, 1e-5, cost_terms(vars(plan.mechanism)), [], tuning_runs=3)
    data = made.data.model_copy(update={"prompt_column": "prompt"})
    users = Users(rows_from(["a", "b"], "prompt"), data)
    budget.reserve(made, plan, users, Earlier([own]), None, commit=False)
    assert [spent.times for spent in asked["earlier"]] == [4]


@pytest.mark.parametrize(("error", "left"), [(BrokenOffError, True), (DprlhfError, False)])
def test_a_book_that_broke_off_leaves_the_folder_with_the_key(error, left, tmp_path, monkeypatch):
    """The reservation may have been written: without the key nobody could find it again."""

    def reserve(*_: Any, **__: Any) -> None:
        raise error("x")

    monkeypatch.setattr(build, "reserve", reserve)
    made = make_recipe(recipe_settings())
    parts: Any = SimpleNamespace(recipe=made, plan=None, users=None, earlier=None)
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(DprlhfError):
        build._start(parts, folder, create=True, counted=True)
    assert folder.key.exists() == left
