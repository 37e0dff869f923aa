"""The run folder: its layout, atomic writes, and files of JSON lines.

Everything outside ``secret/`` is covered by the stated guarantee and may be published together:

- ``recipe.yaml``, ``privacy.json``, ``ledger.jsonl``, ``metrics.jsonl``, ``samples.json``,
  ``public-samples.jsonl``, ``timing.json``
- ``evaluation.json``: the measures of responses to public prompts before and after; of a supervised
  stage, the public loss
- ``checkpoint/``: what ``dprlhf resume`` needs, after the last finished round
- ``policy/``: the final adapter, as ``PeftModel.from_pretrained`` loads it
- ``model/`` (supervised stages): the whole model for the next stage

``secret/`` (mode 0700, left out by git) holds the key that allocation and noise are derived from,
raw telemetry, and ``operator.txt``: what the operator should read about the private rows.

Every file outside of it has a public modification time (:mod:`dprlhf.privacy.file_times`).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dprlhf.errors import DprlhfError
from dprlhf.privacy.file_times import stamp
from dprlhf.privacy.ledger import fsync_folder
from dprlhf.privacy.randomness import KEY_BYTES, new_key

_BLOCK = 1 << 16

_MOST_SECRET = 1 << 28
"""Bytes of one file in ``secret/``: what users bring could fill a disk."""


class RunFolder:
    """The paths in a run's folder, and the means to make and open one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"  # every default written out
        self.privacy = path / "privacy.json"  # the guarantee and its assumptions
        self.ledger = path / "ledger.jsonl"  # the append-only record of every charge
        self.metrics = path / "metrics.jsonl"  # a line a round: public or released values only
        # Public prompts with the continuations of the base and the tuned policy, and a few of them
        # at each evaluation during the run
        self.samples = path / "samples.json"
        self.public_samples = path / "public-samples.jsonl"
        self.timing = path / "timing.json"  # seconds per response of each phase, on public prompts
        self.evaluation = path / "evaluation.json"  # on public rows, before and after the run
        self.checkpoint = path / "checkpoint"  # the state after the last finished round
        self.policy = path / "policy"  # the final adapter
        self.model = path / "model"  # the whole model that a supervised stage leaves for the next
        # The key and values computed from users, never to be published
        self.secret = path / "secret"
        self.key = self.secret / "key"
        # Hashes of the users' identities, for later runs that declare to have other users
        self.identities = self.secret / "users.npy"
        # Numbers of the users who have withdrawn, and digests of the data without them
        self.withdrawn = self.secret / "withdrawn.json"
        # What the operator alone may read: which rows were cut, left out or unreadable
        self.operator = self.secret / "operator.txt"
        self._left_out_by_git = self.secret / ".gitignore"

    def tell_operator(self, *lines: str) -> None:
        """Append lines about private rows to ``secret/operator.txt``."""
        append_secret(self.operator, "".join(" ".join(line.split()) + "\n" for line in lines))

    def require(self) -> None:
        """Raise a :class:`DprlhfError` if this is no run folder."""
        if not self.recipe.is_file():
            raise DprlhfError(f"{self.path}: not a run folder (there is no recipe.yaml)")

    def refuse_to_overwrite(self) -> None:
        """Raise a :class:`DprlhfError` if the folder exists and is not empty, or is a file."""
        if self.path.is_file():
            raise DprlhfError(f"{self.path}: a file is there; choose another output_dir")
        if self.path.is_dir() and any(self.path.iterdir()):
            raise DprlhfError(
                f"{self.path}: the run folder exists; choose another output_dir, or continue it"
                f" with: dprlhf resume {self.path}"
            )

    def create(self, key: bytes | None = None) -> bytes:
        """Make the folder and its secret key."""
        self.refuse_to_overwrite()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.secret.mkdir(mode=0o700)
        except OSError as error:
            raise DprlhfError(f"{self.path}: {error.strerror}; choose another output_dir") from None
        write_atomically(self._left_out_by_git, "*\n", mode=0o600)
        key = key or new_key()
        write_atomically(self.key, key, mode=0o600)
        return key

    def discard(self) -> None:
        """Remove the folder of a run that was refused before its ledger was opened."""
        if not self.ledger.exists():
            self.key.unlink(missing_ok=True)
            self._left_out_by_git.unlink(missing_ok=True)
            self.operator.unlink(missing_ok=True)
            self.recipe.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # something else is in it
                self.secret.rmdir()
                self.path.rmdir()

    def open(self) -> bytes:
        """Return the secret key of an existing run; ``secret/`` is closed to other accounts."""
        self.require()
        with contextlib.suppress(OSError):  # a copy may have lost the mode
            self.secret.chmod(0o700)
        key = self.key.read_bytes() if self.key.is_file() else b""
        if len(key) != KEY_BYTES:
            raise DprlhfError(
                f"{self.key}: the run's secret key is missing or damaged; without it the users"
                " already spent are unknown and the run cannot be continued"
            )
        return key


def time_stamp() -> str:
    """Return the current time as in a run folder's default name, ``20260131-235959``."""
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S}"


def write_atomically(path: Path, content: bytes | str, mode: int = 0o644) -> None:
    """Write a file atomically: a crash leaves the old content or the new; durable on return."""
    temporary = path.with_name(path.name + ".tmp")
    data = content.encode() if isinstance(content, str) else content
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            stamp(temporary)
            os.fsync(file.fileno())
        os.replace(temporary, path)
        stamp(path)
        fsync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise DprlhfError(f"{path}: could not be written ({error.strerror})") from None


def append_secret(path: Path, text: str) -> None:
    """Append a text to a file in ``secret/``, or drop it: how much there is depends on users.

    A full disk, a folder that became read-only or a file of 256 MiB must not end the run, which
    would then end in the round of the user who had much to tell.
    """
    data = text.encode("utf-8", "backslashreplace")
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size + len(data) <= _MOST_SECRET and file.write(data) < len(data):
                file.truncate(size)  # a torn line would spoil the next one
        stamp(path)  # the folder's own time can be seen from outside


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically."""
    write_atomically(path, json.dumps(value, indent=2) + "\n")


class JsonLines:
    """An append-only file of JSON objects, flushed line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        os.truncate(path, _whole_lines(path))  # a torn last line would spoil the next one
        stamp(path)

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one JSON object as a line."""
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")
                file.flush()
                stamp(self.path)
        except OSError as error:
            raise DprlhfError(f"{self.path}: could not be written ({error.strerror})") from None

    def read(self) -> list[dict[str, Any]]:
        """Return all objects; a torn last line is dropped."""
        lines = self.path.read_text("utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines]


def _whole_lines(path: Path) -> int:
    """Return the length of a file up to its last newline, in bytes.

    It is read from its end: a file of ten thousand rounds is opened once for each of them.
    """
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _BLOCK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


@contextlib.contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """Give a fresh folder that replaces ``path`` when the block ends without an error."""
    fresh, old = path.with_name(path.name + ".new"), path.with_name(path.name + ".old")
    for leftover in (fresh, old):
        # A crash between the two renames below leaves only ".old": put it back first.
        if leftover is old and old.is_dir() and not path.exists():
            os.replace(old, path)
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        fresh.mkdir(parents=True)
        yield fresh
        for file in fresh.rglob("*"):
            stamp(file)
            if file.is_file():
                with open(file, "rb") as handle:
                    os.fsync(handle.fileno())
        fsync_folder(fresh)
        if path.exists():
            os.replace(path, old)
        os.replace(fresh, path)
        fsync_folder(path.parent)
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise DprlhfError(f"{path}: could not be written ({error.strerror or error})") from None
    shutil.rmtree(old, ignore_errors=True)
    stamp(path)
