"""The privacy ledger: an append-only, hash-chained file, written before anything is released.

Each line of ``ledger.jsonl`` contains the SHA-256 hash of the one before it and is fsynced before
:meth:`Ledger.charge` returns, so noise is never drawn for a round that is not recorded. Entries
hold public values only: no times (a round's duration reveals its realised batch size) and nothing
computed from users. A charge's nonce makes its hash, which names the noise's stream, new even where
a folder was restored from a backup and a round is charged once more.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dprlhf.errors import DprlhfError
from dprlhf.privacy.file_times import stamp

_GENESIS = "0" * 64


@dataclass(frozen=True)
class Entry:
    """One line of the ledger."""

    sequence: int  # Line number, from 0
    kind: str  # Type of the entry: open, book, charge or commit
    body: dict[str, Any]  # Values of the entry, JSON-ready
    previous: str  # Hash of the entry before; 64 zeros for the first
    hash: str  # SHA-256 of the four other fields, in hexadecimal

    @property
    def is_charge(self) -> bool:
        """Whether the entry charges a round."""
        return self.kind == "charge"

    @classmethod
    def make(cls, sequence: int, kind: str, body: dict[str, Any], previous: str) -> Self:
        """Return an entry with the hash of its fields."""
        text = json.dumps([sequence, kind, body, previous], sort_keys=True)
        return cls(sequence, kind, body, previous, hashlib.sha256(text.encode()).hexdigest())


def new_nonce() -> str:
    """Return 32 fresh random bytes of the operating system, in hexadecimal."""
    return secrets.token_hex(32)


class Ledger:
    """The privacy charges of one run; the file stays locked until :meth:`close`."""

    def __init__(self, path: Path, terms: dict[str, Any]) -> None:
        self.path = path
        terms = json.loads(json.dumps(terms))
        self._file = open(path, "a+b")  # noqa: SIM115 - held open: it carries the lock
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise DprlhfError(f"{path}: another process is using this run") from None
        try:
            self._drop_torn_tail()
            self.entries = read_ledger(path)
            self._charges = {e.body["round"]: e for e in self.entries if e.kind == "charge"}
            self._last_charged = max(self._charges, default=0)
            if not self.entries:
                self._append("open", terms)
                fsync_folder(path.parent)
            elif (held := self.entries[0].body) != terms:
                changed = sorted(
                    k for k in held.keys() | terms.keys() if held.get(k) != terms.get(k)
                )
                raise DprlhfError(
                    f"{path}: this run was started under other terms ({', '.join(changed)}"
                    " changed); start a new run folder instead"
                )
        except BaseException:
            self._file.close()
            raise
        self.rounds = int(terms["rounds"])

    def _drop_torn_tail(self) -> None:
        # A crash in the middle of an append leaves a line without its newline. Its charge was
        # never acknowledged, so no noise was drawn for it and the line may go.
        self._file.seek(0)
        content = self._file.read()
        keep = content.rfind(b"\n") + 1
        if keep != len(content):
            self._file.truncate(keep)
            os.fsync(self._file.fileno())

    def _append(self, kind: str, body: dict[str, Any]) -> Entry:
        previous = self.entries[-1].hash if self.entries else _GENESIS
        entry = Entry.make(len(self.entries), kind, body, previous)
        self._file.seek(0, os.SEEK_END)
        start = self._file.tell()
        try:
            self._file.write(json.dumps(vars(entry), sort_keys=True).encode() + b"\n")
            self._file.flush()
            stamp(self.path)
            os.fsync(self._file.fileno())
        except OSError as error:
            self._undo(start)
            raise DprlhfError(
                f"{self.path}: the ledger could not be written ({error.strerror}); nothing was"
                " released. Free the disk and resume"
            ) from None
        self.entries.append(entry)
        if kind == "charge":
            self._charges[body["round"]] = entry
            self._last_charged = body["round"]
        return entry

    def _undo(self, start: int) -> None:
        # The copy holds the lock while the entry is cut off: who has it next may append a charge.
        held = os.dup(self._file.fileno())
        try:
            with contextlib.suppress(OSError):  # the entry that did not fit is discarded on purpose
                self._file.close()
            if os.fstat(held).st_size > start:
                os.ftruncate(held, start)
        finally:
            os.close(held)

    @property
    def charged(self) -> Set[int]:
        """The numbers of all charged rounds; their users are spent."""
        return self._charges.keys()

    def charge_of(self, round_: int) -> Entry | None:
        """Return the charge of a round; None where it was not charged."""
        return self._charges.get(round_)

    @property
    def next_round(self) -> int:
        """The first round that may still be charged; rounds are charged in increasing order."""
        return self._last_charged + 1

    def charge(
        self,
        round_: int,
        *,
        noise_multiplier: float,
        clip_norm: float | str,
        releases_per_round: int = 1,
    ) -> Entry:
        """Charge one round, durably, before its noise is drawn."""
        # The fresh nonce makes the noise under its hash new in every copy of the folder.
        terms = self.entries[0].body
        if round_ > self.rounds or round_ < 1:
            raise DprlhfError(f"round {round_} is outside the budget of {self.rounds} rounds")
        if round_ < self.next_round:
            raise DprlhfError(f"round {round_} was charged before: its users are spent")
        asked = {
            "noise_multiplier": noise_multiplier,
            "clip_norm": clip_norm,
            "releases_per_round": releases_per_round,
        }
        for name, value in asked.items():
            if value != terms[name]:
                raise DprlhfError(
                    f"round {round_}: {name} {value} is not the planned {terms[name]}, which the"
                    " stated epsilon was computed for"
                )
        return self._append("charge", {"round": round_, **asked, "nonce": new_nonce()})

    def commit(self, round_: int) -> None:
        """Record that the policy after ``round_`` is safely on disk."""
        self._append("commit", {"round": round_})

    # A book's counter only rises: one restored from a backup is behind some ledger.
    def note_book(self, entry: dict[str, Any], *, resumed: bool = False) -> None:
        """Record the run's place in a budget book, before the first charge and on resuming."""
        if resumed:
            entry = {**entry, "nonce": new_nonce()}
        if entry not in [e.body for e in self.entries if e.kind == "book"][-1:]:
            self._append("book", entry)

    def confirm(self, saved: int) -> None:
        """Check the latest checkpoint's round; append a commit that a crash kept out."""
        committed = max((e.body["round"] for e in self.entries if e.kind == "commit"), default=0)
        if saved and saved not in self.charged:
            raise DprlhfError(
                f"{self.path}: ends before round {saved}, which the checkpoint holds; lines were"
                " lost, and what this run spent is no longer known. Start a new run"
            )
        if saved < committed:
            raise DprlhfError(
                f"the checkpoint is of round {saved}, but {self.path} has round {committed} as"
                " saved: the checkpoint was replaced by an older one and cannot be used"
            )
        if saved > committed:
            self.commit(saved)

    def close(self) -> None:
        """Release the file and its lock."""
        self._file.close()


def read_ledger(path: Path) -> list[Entry]:
    """Read and verify a ledger file."""
    entries: list[Entry] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        previous = entries[-1].hash if entries else _GENESIS
        try:
            read = Entry(**json.loads(line))
            good = read == Entry.make(len(entries), read.kind, read.body, previous)
        except (TypeError, ValueError, RecursionError):
            good = False
        if not good:
            raise DprlhfError(
                f"{path}: line {number} was altered or lost; this run cannot be continued, because"
                " what it spent is no longer known"
            )
        entries.append(read)
    return entries


def read_opened(path: Path) -> list[Entry]:
    """Read and verify the ledger file of a started run, whose first entry holds its terms."""
    entries = read_ledger(path)
    if not entries:
        raise DprlhfError(f"{path}: empty; what this run spent is not known")
    return entries


def opened_terms(path: Path) -> dict[str, Any]:
    """Return the terms that a run's ledger opened with, not verified; empty if unreadable."""
    # A continued run keeps them where today's version, or this machine's rounding, states others.
    try:
        with open(path, "rb") as file:
            terms = json.loads(file.readline())["body"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return terms if isinstance(terms, dict) else {}


def charged_rounds(path: Path) -> list[int]:
    """Return the numbers of the charged rounds in a ledger file, in order."""
    return sorted(e.body["round"] for e in read_opened(path) if e.kind == "charge")


def fsync_folder(folder: Path) -> None:
    """Fsync a folder, so that its file names are durable; fsync of a file does not cover them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
