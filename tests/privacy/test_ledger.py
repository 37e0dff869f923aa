"""The ledger: durable before it returns, never charged twice, and it shows when it was altered."""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dprlhf.errors import DprlhfError
from dprlhf.privacy import ledger as module
from dprlhf.privacy.ledger import Entry, Ledger, charged_rounds, new_nonce, read_ledger
from dprlhf.runs.earlier import records_of

TERMS: dict[str, Any] = {
    "rounds": 5, "noise_multiplier": 0.8, "clip_norm": 1.0, "releases_per_round": 1, "epsilon": 2.0,
}  # fmt: skip


class Crash(BaseException):
    """The process dies here."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def charge(ledger: Ledger, round_: int) -> Entry:
    return ledger.charge(round_, noise_multiplier=0.8, clip_norm=1.0)


def written(path: Path, rounds: int = 3) -> bytes:
    """Write a ledger with so many charged and committed rounds; return its content."""
    ledger = Ledger(path, TERMS)
    for t in range(1, rounds + 1):
        charge(ledger, t)
        ledger.commit(t)
    ledger.close()
    return path.read_bytes()


def reopened(path: Path, terms: dict[str, Any] | None = None) -> Ledger:
    return Ledger(path, TERMS if terms is None else terms)


def test_every_charge_has_a_nonce_of_the_operating_system(path, monkeypatch):
    monkeypatch.setattr(module, "new_nonce", new_nonce)
    written(path)
    nonces = [e.body["nonce"] for e in read_ledger(path) if e.kind == "charge"]
    asked: list[int] = []
    monkeypatch.setattr(
        "secrets.token_hex", lambda size: asked.append(size) or f"{len(asked):064x}"
    )
    assert new_nonce() == f"{1:064x}"
    assert asked == [32]
    assert len(set(nonces)) == 3
    assert all(len(bytes.fromhex(nonce)) == 32 for nonce in nonces)


def test_a_charge_is_on_disk_before_it_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(path, TERMS)
    synced: list[bytes] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        assert os.path.samestat(os.fstat(descriptor), path.stat())
        synced.append(path.read_bytes())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    before = path.read_bytes()
    entry = charge(ledger, 1)
    assert len(synced) == 1
    assert synced[0] == path.read_bytes() != before  # all was written when fsync was called
    assert json.loads(synced[0].splitlines()[-1]) == vars(entry)
    ledger.commit(1)
    assert len(synced) == 2


def test_a_new_ledger_syncs_its_folder_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda d: synced.append(os.fstat(d).st_ino))
    Ledger(path, TERMS).close()
    assert synced == [path.stat().st_ino, path.parent.stat().st_ino]


@pytest.mark.parametrize("after_fsync", [False, True])
def test_a_crash_around_fsync_never_leaves_an_acknowledged_charge_unknown(
    path: Path, monkeypatch: pytest.MonkeyPatch, after_fsync: bool
) -> None:
    ledger = Ledger(path, TERMS)
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if after_fsync:
            real(descriptor)
        raise Crash

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(Crash):
        charge(ledger, 1)  # not acknowledged: no noise was drawn
    monkeypatch.undo()
    ledger._file.close()
    # The line got as far as the file: the round counts as spent, which is the safe side.
    again = reopened(path)
    assert again.charged == {1}
    with pytest.raises(DprlhfError, match="charged before"):
        charge(again, 1)


def test_a_torn_last_line_is_dropped_at_every_byte_and_its_round_can_be_charged(path: Path) -> None:
    whole = written(path, 2)
    ledger = reopened(path)
    charge(ledger, 3)
    ledger.close()
    longer = path.read_bytes()
    assert longer.startswith(whole)
    for end in [*range(len(whole), len(longer), 13), len(longer) - 1]:
        path.write_bytes(longer[:end])
        ledger = reopened(path)
        assert path.read_bytes() == whole
        assert ledger.charged == {1, 2}
        charge(ledger, 3)
        ledger.close()
        assert path.read_bytes() == longer
    ledger = reopened(path)
    assert ledger.charged == {1, 2, 3}


def test_a_last_line_of_zero_bytes_counts_as_torn(path: Path) -> None:
    whole = written(path, 1)
    path.write_bytes(whole + bytes(300))  # what some file systems leave after a power cut
    assert reopened(path).charged == {1}
    assert path.read_bytes() == whole


def fail_half_way(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, data: bytes) -> int:
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    monkeypatch.setattr(ledger, "_file", Full(ledger._file))


def fail_fsync(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("fail", [fail_half_way, fail_fsync])
def test_a_full_disk_leaves_the_ledger_as_it_was(path, monkeypatch, fail):
    before = written(path, 2)
    ledger = reopened(path)
    with monkeypatch.context() as patch:
        fail(ledger, patch)
        with pytest.raises(DprlhfError, match=r"No space left on device.*nothing was\s+released"):
            charge(ledger, 3)
        assert ledger.charged == {1, 2}
    assert path.read_bytes() == before
    again = reopened(path)  # the lock went with the file
    charge(again, 3)
    assert again.charged == {1, 2, 3}


def test_a_full_disk_at_the_start_leaves_a_ledger_that_can_be_opened(path, monkeypatch):
    with monkeypatch.context() as patch:
        fail_fsync(None, patch)  # type: ignore[arg-type]
        with pytest.raises(DprlhfError, match="could not be written"):
            Ledger(path, TERMS)
    assert path.read_bytes() == b""
    charge(reopened(path), 1)


@pytest.mark.parametrize(
    ("round_", "changes", "message"),
    [
        (2, {}, "round 2 was charged before: its users are spent"),
        (1, {}, "round 1 was charged before"),
        (0, {}, "round 0 is outside the budget of 5 rounds"),
        (-1, {}, "outside the budget"),
        (6, {}, "round 6 is outside the budget of 5 rounds"),
        (3, {"noise_multiplier": 0.79}, "noise_multiplier 0.79 is not the planned 0.8"),
        (3, {"noise_multiplier": 0.0}, "noise_multiplier 0.0 is not the planned 0.8"),
        (3, {"releases_per_round": 2}, "releases_per_round 2 is not the planned 1"),
        (3, {"clip_norm": 1.0000001}, "clip_norm 1.0000001 is not the planned 1.0"),
    ],
)
def test_a_charge_that_epsilon_does_not_cover_is_refused(path, round_, changes, message):
    before = written(path, 2)
    ledger = reopened(path)
    with pytest.raises(DprlhfError, match=message):
        ledger.charge(round_, **({"noise_multiplier": 0.8, "clip_norm": 1.0} | changes))
    assert path.read_bytes() == before
    assert ledger.next_round == 3


def test_rounds_are_charged_once_in_increasing_order(path: Path) -> None:
    ledger = Ledger(path, TERMS)
    assert (ledger.charged, ledger.next_round) == (frozenset(), 1)
    charge(ledger, 2)  # a round may be left out, never redone
    for spent in (1, 2):
        with pytest.raises(DprlhfError, match="charged before"):
            charge(ledger, spent)
    charge(ledger, 5)
    assert ledger.charged == {2, 5}
    ledger.close()
    again = reopened(path)
    assert (again.charged, again.next_round) == ({2, 5}, 6)
    for t in range(7):
        with pytest.raises(DprlhfError):
            charge(again, t)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"epsilon": 3.0}, "epsilon"),
        ({"rounds": 6, "clip_norm": 2.0}, "clip_norm, rounds"),
        ({"extra": 1}, "extra"),
        ({"noise_multiplier": 0.8000000000000002}, "noise_multiplier"),
    ],
)
def test_other_terms_are_refused_by_name(path: Path, changes: dict[str, Any], named: str) -> None:
    before = written(path)
    with pytest.raises(DprlhfError, match=rf"other terms \({named} changed\)"):
        reopened(path, TERMS | changes)
    with pytest.raises(DprlhfError, match=r"\(epsilon changed\)"):
        reopened(path, {k: v for k, v in TERMS.items() if k != "epsilon"})
    assert path.read_bytes() == before
    assert reopened(path).charged == {1, 2, 3}  # a refusal lets go of the lock


def lines(content: bytes) -> list[bytes]:
    return content.splitlines(keepends=True)


def tampered(content: bytes) -> Iterator[tuple[str, bytes]]:
    all_ = lines(content)
    yield "value altered", content.replace(b'"round": 2', b'"round": 4')
    yield "terms altered", content.replace(b'"epsilon": 2.0', b'"epsilon": 1.0')
    yield "kind altered", content.replace(b'"kind": "charge"', b'"kind": "commit"', 1)
    yield "hash altered", content.replace(b'"hash": "', b'"hash": "0', 1)
    yield "sequence altered", content.replace(b'"sequence": 3', b'"sequence": 4')
    for i in range(len(all_) - 1):
        yield f"line {i} deleted", b"".join(all_[:i] + all_[i + 1 :])
        yield f"line {i} swapped", b"".join([*all_[:i], all_[i + 1], all_[i], *all_[i + 2 :]])
        yield f"line {i} doubled", b"".join([*all_[: i + 1], *all_[i:]])
        yield f"line {i} cut", b"".join([*all_[:i], all_[i][:40] + b"\n", *all_[i + 1 :]])
        yield f"line {i} empty", b"".join([*all_[:i], b"\n", *all_[i:]])
        yield f"line {i} not text", b"".join([*all_[:i], b"\xff" + all_[i][1:], *all_[i + 1 :]])
    yield "no entry", content + b"3\n"
    yield "no object", content + b"[]\n"
    yield "other fields", content + b'{"round": 4}\n'
    yield "more fields", content.replace(b'{"body"', b'{"more": 1, "body"', 1)
    # A forged line that chains well, put where a charge was.
    entries = [Entry(**json.loads(line)) for line in all_]
    forged = Entry.make(3, "commit", {"round": 2}, entries[2].hash)
    yield (
        "line forged",
        b"".join([*all_[:3], json.dumps(vars(forged)).encode() + b"\n", *all_[4:]]),
    )


def test_every_alteration_is_noticed(path: Path) -> None:
    content = written(path)
    names = []
    for name, altered in tampered(content):
        assert altered != content, name
        path.write_bytes(altered)
        for read in (read_ledger, reopened):
            with pytest.raises(DprlhfError, match=r"line \d+ was altered or lost") as caught:
                read(path)
            assert "\n" not in str(caught.value), name
        assert path.read_bytes() == altered, name  # the evidence stays
        names.append(name)
    assert len(names) > 40
    path.write_bytes(content)
    assert reopened(path).charged == {1, 2, 3}


def test_every_flipped_byte_is_noticed(path: Path) -> None:
    content = written(path, 1)
    for position in range(0, len(content), 7):
        altered = bytearray(content)
        altered[position] ^= 0x04
        if content[position : position + 1] == b"\n":
            continue
        path.write_bytes(bytes(altered))
        with pytest.raises(DprlhfError, match="altered or lost"):
            read_ledger(path)


def test_a_second_opening_is_refused_until_the_first_is_closed(path: Path) -> None:
    first = Ledger(path, TERMS)
    charge(first, 1)
    before = path.read_bytes()
    with pytest.raises(DprlhfError, match="another process is using this run"):
        reopened(path)
    assert path.read_bytes() == before
    charge(first, 2)
    first.close()
    assert reopened(path).charged == {1, 2}


def test_the_torn_tail_of_a_running_process_is_left_alone(path: Path) -> None:
    # The lock comes first: what looks torn may be another process in the middle of a line.
    content = written(path) + b'{"half'
    path.write_bytes(content)
    with open(path, "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DprlhfError, match="another process"):
            reopened(path)
    assert path.read_bytes() == content


def test_entries_hold_public_values_only(path: Path) -> None:
    written(path, 2)
    entries = read_ledger(path)
    assert [e.kind for e in entries] == ["open", "charge", "commit", "charge", "commit"]
    assert entries[0].body == TERMS
    # Nothing else: a time would tell a round's duration, and with it the size of its batch.
    for t in (1, 2):
        charge = {"noise_multiplier": 0.8, "clip_norm": 1.0, "releases_per_round": 1}
        assert entries[2 * t - 1].body == {"round": t, **charge, "nonce": "a test"}
        assert entries[2 * t].body == {"round": t}
    for line in path.read_text().splitlines():
        assert set(json.loads(line)) == {"sequence", "kind", "body", "previous", "hash"}


def test_two_runs_with_the_same_terms_write_the_same_bytes(tmp_path: Path) -> None:
    assert written(tmp_path / "a") == written(tmp_path / "b")


def test_the_chain_by_hand(path: Path) -> None:
    import hashlib

    written(path, 1)
    previous = "0" * 64
    for number, entry in enumerate(read_ledger(path)):
        text = json.dumps([number, entry.kind, entry.body, previous], sort_keys=True)
        assert entry.previous == previous
        assert entry.hash == hashlib.sha256(text.encode()).hexdigest()
        previous = entry.hash


def test_an_empty_ledger_tells_nothing_of_what_was_spent(tmp_path: Path) -> None:
    recipe = "policy: {model_name_or_path: a}\ndata: {path: a}\nrewards: [{function: a}]\n"
    (tmp_path / "recipe.yaml").write_text(recipe + "privacy: {epsilon: 4}\nrounds: 2\n")
    (tmp_path / "ledger.jsonl").touch()
    for read in (lambda: charged_rounds(tmp_path / "ledger.jsonl"), lambda: records_of(tmp_path)):
        with pytest.raises(DprlhfError, match=r"ledger\.jsonl: empty; what this run spent is not"):
            read()


def test_a_checkpoint_older_than_the_ledgers_last_is_refused(path: Path) -> None:
    written(path, rounds=3)
    ledger = reopened(path)
    for saved in (0, 1, 2):
        with pytest.raises(DprlhfError, match="replaced by an older one"):
            ledger.confirm(saved)
    ledger.confirm(3)
    assert [e.body["round"] for e in ledger.entries if e.kind == "commit"] == [1, 2, 3]


def test_a_commit_that_a_crash_kept_out_is_made_up_for(path: Path) -> None:
    written(path, rounds=2)
    ledger = reopened(path)
    charge(ledger, 3)
    ledger.confirm(3)
    assert [e.body["round"] for e in ledger.entries if e.kind == "commit"] == [1, 2, 3]


def test_a_checkpoint_that_the_ledger_does_not_know_is_refused(path: Path) -> None:
    written(path, rounds=2)
    with pytest.raises(DprlhfError, match="ends before round 3"):
        reopened(path).confirm(3)


def test_the_lock_is_held_until_a_failed_entry_is_cut_off(path, monkeypatch):
    written(path, 1)
    ledger = reopened(path)
    fail_half_way(ledger, monkeypatch)
    cut = os.ftruncate
    seen: list[str] = []

    def truncate(descriptor: int, size: int) -> None:
        with pytest.raises(DprlhfError, match="another process is using this run") as refused:
            reopened(path)
        seen.append(str(refused.value))
        cut(descriptor, size)

    monkeypatch.setattr(os, "ftruncate", truncate)
    with pytest.raises(DprlhfError, match="could not be written"):
        charge(ledger, 2)
    assert len(seen) == 1
    reopened(path).close()
