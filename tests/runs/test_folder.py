"""The run folder: secrets stay in, and a crash at any moment leaves something that loads."""

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from dprlhf.data.given_rows import rows_from
from dprlhf.data.users import Users
from dprlhf.errors import DprlhfError
from dprlhf.privacy.ledger import Ledger
from dprlhf.privacy.plan import make_plan
from dprlhf.runs.checkpoint import last_checkpoint, load_checkpoint, load_tuned, save_checkpoint
from dprlhf.runs.folder import (
    JsonLines,
    RunFolder,
    append_secret,
    replaced_folder,
    write_atomically,
)
from helpers.recipes import least


class Crash(BaseException):
    """The process dies here."""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "runs" / "one")
    made.create()
    write_atomically(made.recipe, "rounds: 1\n")
    return made


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_the_key_is_for_the_owner_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = RunFolder(tmp_path / "run")
        key = folder.create()
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.secret.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.key.stat().st_mode) == 0o600
    assert folder.key.read_bytes() == key
    assert len(key) == 32
    assert folder.key.parent == folder.secret
    # The key is nowhere else, not even in what a crash would leave.
    ignored = folder.secret / ".gitignore"  # so that ``git add .`` takes nothing of it
    assert {p for p in folder.path.rglob("*") if p.is_file()} == {folder.key, ignored}
    assert ignored.read_text() == "*\n"


def test_a_copy_that_lost_its_mode_is_closed_again(folder: RunFolder) -> None:
    folder.secret.chmod(0o755)  # as cp --no-preserve=mode leaves it
    folder.open()
    assert stat.S_IMODE(folder.secret.stat().st_mode) == 0o700


def test_an_existing_run_is_refused_with_the_way_to_go_on(folder: RunFolder) -> None:
    key = folder.key.read_bytes()
    with pytest.raises(DprlhfError) as caught:
        folder.create()
    assert f"dprlhf resume {folder.path}" in str(caught.value)
    assert "output_dir" in str(caught.value)
    assert folder.key.read_bytes() == key


@pytest.mark.parametrize("content", [None, b"", bytes(31), bytes(33)], ids=repr)
def test_a_damaged_key_is_refused(folder: RunFolder, content: bytes | None) -> None:
    folder.key.unlink()
    if content is not None:
        folder.key.write_bytes(content)
    with pytest.raises(DprlhfError, match="secret key is missing or damaged"):
        folder.open()
    assert not folder.key.exists() or folder.key.read_bytes() == content  # never made anew


def fails(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def dies(*_: Any, **__: Any) -> None:
    raise Crash


@pytest.mark.parametrize("step", ["open", "fdopen", "fsync", "replace"])
def test_a_failed_write_leaves_the_old_content(tmp_path, monkeypatch, step):
    path = tmp_path / "file"
    write_atomically(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, step, fails)
        with pytest.raises(DprlhfError, match=r"file: could not be written \(No space left"):
            write_atomically(path, "new" * 1000)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    with monkeypatch.context() as patch:
        patch.setattr(os, step, dies)
        with pytest.raises(Crash):
            write_atomically(path, "new" * 1000)
    assert path.read_text() == "old"
    write_atomically(path, "newer")  # what the crash left does not matter
    assert path.read_text() == "newer"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was fsynced, of a file with its size, and what was renamed."""
    done: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        status, name = os.fstat(descriptor), Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        done.append(name if stat.S_ISDIR(status.st_mode) else f"{name}: {status.st_size}")
        real_fsync(descriptor)

    def replace(a: Path, b: Path) -> None:
        done.append(f"{a.name} -> {b.name}")
        real_replace(a, b)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    return done


def test_an_atomic_write_is_durable_when_it_returns(tmp_path: Path, steps: list[str]) -> None:
    write_atomically(tmp_path / "file", "newer")
    # The name is as durable as the content.
    assert steps == ["file.tmp: 5", "file.tmp -> file", tmp_path.name]


@pytest.mark.parametrize("block", [8, 2**16])
def test_lines_survive_a_torn_one(tmp_path, monkeypatch, block):
    monkeypatch.setattr("dprlhf.runs.folder._BLOCK", block)  # of which a line may have several
    path = tmp_path / "metrics.jsonl"
    JsonLines(path).write({"round": 1})
    with open(path, "a") as file:
        file.write('{"round": 2, "epsi')  # a crash in the middle of a line
    assert JsonLines(path).read() == [{"round": 1}]
    JsonLines(path).write({"round": 2})
    assert JsonLines(path).read() == [{"round": 1}, {"round": 2}]


def test_the_operators_lines_are_added_in_secret_and_never_raise(folder, monkeypatch):
    folder.tell_operator("row 2: cut")
    folder.tell_operator("a text\nof a user \udc80", "end")
    assert folder.operator.read_text() == "row 2: cut\na text of a user \\udc80\nend\n"
    assert stat.S_IMODE(folder.operator.stat().st_mode) == 0o600
    assert folder.operator.parent == folder.secret
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        folder.tell_operator("lost")
    folder.discard()
    assert not folder.path.exists()


def test_secret_text_is_for_the_operator_alone_and_its_size_ends_no_run(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    append_secret(path, "a\ud800\n")  # half a character, as a reward may print
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with mock.patch("dprlhf.runs.folder._MOST_SECRET", 20):
        append_secret(path, "much " * 10)
    append_secret(tmp_path / "missing" / "file", "dropped")
    append_secret(tmp_path, "dropped")
    if Path("/dev/full").exists():  # a disk without room
        append_secret(Path("/dev/full"), "dropped")
    append_secret(path, "b\n")
    assert path.read_text() == "a\\ud800\nb\n"


class Policy:
    """The parts of a policy that a checkpoint touches."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, bias=False))
        self.parameters = dict(self.layers.named_parameters())
        self.base = nn.Linear(5, 40).requires_grad_(False)
        self.model = nn.ModuleDict({"layers": self.layers, "base": self.base})

    def state(self) -> dict[str, torch.Tensor]:
        return {k: v.detach().clone() for k, v in self.parameters.items()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.layers.load_state_dict(state)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
}


class Training:
    """A policy whose state after round t is a fixed function of t."""

    def __init__(self, folder: RunFolder, optimizer: str = "adam") -> None:
        self.folder = folder
        self.policy: Any = Policy()
        self.optimizer = OPTIMIZERS[optimizer](list(self.policy.parameters.values()))

    def step(self, t: int) -> None:
        for number, parameter in enumerate(self.policy.parameters.values()):
            parameter.grad = torch.full_like(parameter, float(t + number))
        self.optimizer.step()

    def save(self, t: int) -> None:
        save_checkpoint(self.folder, t, self.policy, self.optimizer)

    def load(self) -> int:
        return load_checkpoint(self.folder, self.policy, self.optimizer)


def after(folder: RunFolder, rounds: int, optimizer: str = "adam") -> dict[str, torch.Tensor]:
    training = Training(folder, optimizer)
    for t in range(1, rounds + 1):
        training.step(t)
    return training.policy.state()


def assert_is_after(folder: RunFolder, rounds: int, optimizer: str = "adam") -> None:
    """Check that what loads is the whole state after so many rounds, optimizer included."""
    loaded = Training(folder, optimizer)
    assert loaded.load() == rounds
    loaded.step(rounds + 1)  # the next step depends on the moments
    for name, value in after(folder, rounds + 1, optimizer).items():
        assert torch.equal(loaded.policy.parameters[name], value)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_gives_back_policy_optimizer_and_round(folder, optimizer):
    training = Training(folder, optimizer)
    assert Training(folder, optimizer).load() == 0
    for t in (1, 2, 3):
        training.step(t)
        training.save(t)
        assert_is_after(folder, t, optimizer)


def test_a_checkpoint_holds_no_secret(folder: RunFolder) -> None:
    training = Training(folder)
    training.step(1)
    training.save(1)
    assert sorted(p.name for p in folder.checkpoint.iterdir()) == [
        "optimizer.safetensors", "policy.safetensors", "state.json",
    ]  # fmt: skip
    key = folder.key.read_bytes()
    for path in folder.checkpoint.iterdir():
        content = path.read_bytes()
        assert key not in content
        assert key.hex().encode() not in content
    state = json.loads((folder.checkpoint / "state.json").read_text())
    assert state.keys() == {"round", "frozen"}  # and the weights of the public base model
    assert state["frozen"].keys() == {"base.weight", "base.bias"}


def test_a_run_goes_on_with_the_very_weights_and_generates_in_another_format(folder):
    """A light fine-tuning on the users would enter, of which the privacy card knows nothing."""
    training = Training(folder)
    training.step(1)
    training.save(1)
    loaded = Training(folder)
    checkpoint = last_checkpoint(folder)
    assert checkpoint is not None
    with torch.no_grad():
        loaded.policy.base.weight.copy_(loaded.policy.base.weight.bfloat16())
        load_tuned(checkpoint, loaded.policy)
    with pytest.raises(DprlhfError, match="base model is not the one that this run has tuned"):
        loaded.load()
    tuned = Training(folder)
    with torch.no_grad():
        tuned.policy.base.weight.mul_(1 + 1e-6)
    with pytest.raises(DprlhfError, match="base model is not the one that this run has tuned"):
        tuned.load()
    nn.init.normal_(loaded.policy.base.weight)  # another base model, whatever its names
    with pytest.raises(DprlhfError, match="base model"):
        load_tuned(checkpoint, loaded.policy)
    loaded.policy.model = nn.ModuleDict({"others": nn.Linear(5, 40).requires_grad_(False)})
    with pytest.raises(DprlhfError, match="base model"):
        loaded.load()


def crash_at(call: int, *, before: bool) -> Callable[..., Any]:
    real, calls = os.replace, 0

    def replace(a: Any, b: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call and before:
            raise Crash
        real(a, b)
        if calls == call:
            raise Crash

    return replace


@pytest.mark.parametrize(
    ("name", "double", "survives"),
    [
        ("mkdir", None, 1),
        ("save", None, 1),
        ("fsync", dies, 1),
        ("replace", crash_at(1, before=True), 1),
        ("replace", crash_at(1, before=False), 1),
        ("replace", crash_at(2, before=True), 1),
        ("replace", crash_at(2, before=False), 2),
        ("rmtree", None, 2),
    ],
    ids=["make", "save", "sync", "before 1st", "after 1st", "before 2nd", "after 2nd", "clean up"],
)
def test_after_a_crash_at_any_step_a_whole_checkpoint_loads(
    folder: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    double: Callable[..., Any] | None,
    survives: int,
) -> None:
    training = Training(folder)
    training.step(1)
    training.save(1)
    training.step(2)
    with monkeypatch.context() as patch:
        if name in ("fsync", "replace"):
            patch.setattr(os, name, double)
        elif name == "mkdir":
            patch.setattr(Path, "mkdir", dies)
        elif name == "save":
            patch.setattr("dprlhf.runs.checkpoint.json.dumps", dies)  # two of three files are there
        else:
            real = shutil.rmtree

            def half(path: Path, **options: Any) -> None:
                if path.name.endswith(".old") and path.exists():
                    (path / "policy.safetensors").unlink()
                    raise Crash
                real(path, **options)

            patch.setattr(shutil, "rmtree", half)
        with pytest.raises(Crash):
            training.save(2)
    assert_is_after(folder, survives)
    # The next checkpoint gets through and leaves nothing else behind.
    again = Training(folder)
    again.load()
    for t in range(survives + 1, 4):
        again.step(t)
    again.save(3)
    assert_is_after(folder, 3)
    assert not list(folder.path.glob("checkpoint.*"))


@pytest.mark.parametrize("file", ["state.json", "policy.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
def test_a_damaged_checkpoint_is_named(folder: RunFolder, file: str, damage: str) -> None:
    training = Training(folder)
    training.step(1)
    training.save(1)
    path = folder.checkpoint / file
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    again = Training(folder)
    readers = [again.load, lambda: load_tuned(folder.checkpoint, again.policy)]
    for read in readers[: 1 if "optimizer" in file else 2]:
        with pytest.raises(DprlhfError, match="checkpoint: damaged") as caught:
            read()
        assert "\n" not in str(caught.value)


def test_files_of_a_replaced_folder_are_synced_before_the_rename(tmp_path, steps):
    path = tmp_path / "folder"
    with replaced_folder(path) as fresh:
        (fresh / "old").write_text("")
    steps.clear()
    with replaced_folder(path) as fresh:
        (fresh / "inside").mkdir()
        (fresh / "inside" / "file").write_text("x")
    assert steps == [
        "file: 1", "folder.new", "folder -> folder.old", "folder.new -> folder", tmp_path.name,
    ]  # fmt: skip
    assert sorted(p.name for p in path.iterdir()) == ["inside"]


PLAN = make_plan(users=3, rounds=3, delta=1e-5, noise_multiplier=1.0)
SETTINGS = least(privacy={"noise_multiplier": 1.0}, rounds=3)


def open_ledger(folder: RunFolder, prompts: list[Any], key: bytes | None = None) -> Ledger:
    from dprlhf.runs.earlier import Earlier
    from dprlhf.runs.opening import open_ledger as opened

    users = Users(rows_from(prompts, "prompt"), SETTINGS.data)
    return opened(SETTINGS, PLAN, folder, key or folder.open(), users, Earlier())


def test_a_resumed_run_has_the_same_users_key_and_ledger(folder: RunFolder) -> None:
    first = open_ledger(folder, ["a", "b", "c"])
    first.charge(1, noise_multiplier=1.0, clip_norm=1.0)
    first.close()
    again = open_ledger(folder, ["a", "b", "c"])
    assert again.charged == {1}
    again.close()
    with pytest.raises(DprlhfError, match="the users are not the ones"):
        open_ledger(folder, ["a", "c", "b"])
    with pytest.raises(DprlhfError, match=r"\(key_commitment changed\)"):
        open_ledger(folder, ["a", "b", "c"], key=bytes(32))


@pytest.mark.parametrize("lost", ["ledger.jsonl", "secret/data-digest"])
def test_a_run_that_lost_what_it_spent_is_not_started_afresh(folder: RunFolder, lost: str) -> None:
    ledger = open_ledger(folder, ["a", "b", "c"])
    ledger.charge(1, noise_multiplier=1.0, clip_norm=1.0)
    ledger.close()
    (folder.path / lost).unlink()
    with pytest.raises(DprlhfError, match=f"{lost}: missing; this run cannot be continued"):
        open_ledger(folder, ["a", "b", "c"])
    assert not (folder.path / lost).exists()


def remaining(folder: RunFolder, ledger: Ledger) -> list[int]:
    from dprlhf.training.rounds import remaining_rounds

    training = Training(folder)
    run: Any = SimpleNamespace(
        folder=folder, policy=training.policy, optimizer=training.optimizer,
        processes=SimpleNamespace(on_main=lambda action: action()),
        progress=SimpleNamespace(total=lambda rounds, done: None),
        gate=SimpleNamespace(ledger=ledger), stage=SimpleNamespace(stateful={}), plan=PLAN,
    )  # fmt: skip
    return list(remaining_rounds(run))


def test_rounds_that_were_charged_are_never_run_again(folder: RunFolder) -> None:
    ledger = open_ledger(folder, ["a", "b", "c"])
    assert remaining(folder, ledger) == [1, 2, 3]
    training = Training(folder)
    ledger.charge(1, noise_multiplier=1.0, clip_norm=1.0)
    training.step(1)
    training.save(1)
    ledger.commit(1)
    assert remaining(folder, ledger) == [2, 3]
    ledger.charge(2, noise_multiplier=1.0, clip_norm=1.0)  # and a crash before the checkpoint
    assert remaining(folder, ledger) == [3]
    ledger.charge(3, noise_multiplier=1.0, clip_norm=1.0)
    assert remaining(folder, ledger) == []


def test_a_ledger_cut_at_its_end_is_noticed_by_the_checkpoint(folder: RunFolder) -> None:
    ledger = open_ledger(folder, ["a", "b", "c"])
    training = Training(folder)
    for t in (1, 2):
        ledger.charge(t, noise_multiplier=1.0, clip_norm=1.0)
        training.step(t)
        training.save(t)
        ledger.commit(t)
    ledger.close()
    lines = folder.ledger.read_bytes().splitlines(keepends=True)
    folder.ledger.write_bytes(b"".join(lines[:3]))  # the chain is whole; round 2 is forgotten
    cut = open_ledger(folder, ["a", "b", "c"])
    assert cut.next_round == 2
    with pytest.raises(DprlhfError, match="ends before round 2, which the checkpoint holds"):
        remaining(folder, cut)
