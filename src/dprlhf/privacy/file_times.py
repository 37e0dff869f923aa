"""Modification times (mtime) of a run's public files, which say nothing about how long it took.

The duration of a private round reveals how many users it had, so every writer of a run folder calls
:func:`stamp`. The date is that of the day before the run began; the time of day is a checksum of
the content, so that ``rsync`` sees each change. The time of an inode's last change (ctime) cannot
be set: a copy of a run has public times only, the folder itself has not.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
import zlib
from pathlib import Path

_DAY = 86_400  # seconds
_HEAD = 1 << 22
"""Bytes at a file's start that its checksum covers: each release changes all trained weights."""

_TAIL = 1 << 16
"""Bytes at the end of a file that only grows, which its checksum covers: a round's stamps must not
take longer the more rounds came before."""

_STARTED = time.time()
"""When the program was loaded, which is before it read any user's row."""


def run_of(path: Path) -> Path | None:
    """Return the run folder that a file or folder belongs to; None where it belongs to none."""
    runs = (p for p in (path, *path.parents) if (p / "secret" / "key").exists())
    return next(runs, None)


def public_time(path: Path, root: Path) -> float:
    """Return the modification time of a file or folder of a run, in seconds since 1970."""
    try:
        # The recipe is the first file that a run writes, and is stamped like all others.
        first = (root / "recipe.yaml").stat().st_mtime
    except OSError:
        first = _STARTED - _DAY
    day = first // _DAY * _DAY
    if path.is_dir():
        return day
    size = path.stat().st_size
    with open(path, "rb") as file:
        if path.suffix == ".jsonl" or "tfevents" in path.name:
            file.seek(max(0, size - _TAIL))
        return day + zlib.crc32(file.read(_HEAD), size & 0xFFFFFFFF) % _DAY


def first_day(root: Path) -> str:
    """Return the day on which a run began, ``2026-01-31``, which its files' times tell, too."""
    began = public_time(root, root) + _DAY
    return datetime.datetime.fromtimestamp(began, datetime.UTC).date().isoformat()


def stamp(path: Path) -> None:
    """Set the public modification time of a file or folder of a run, and of its parent."""
    # A file in secret/ keeps its own; the folder secret/ can be seen from outside. What belongs to
    # no run is left as it is.
    root = run_of(path)
    if root is None:
        return
    for place in (path, path.parent):
        inside = place.relative_to(root).parts if place.is_relative_to(root) else ("..",)
        if inside[:1] == ("..",) or (inside[:1] == ("secret",) and len(inside) > 1):
            continue
        with contextlib.suppress(OSError):  # another process replaced it, or it is not ours
            seconds = public_time(place, root)
            os.utime(place, (seconds, seconds))


def stamp_run(root: Path) -> None:
    """Give everything in a run folder its public time, deepest first."""
    for place in sorted(root.rglob("*"), key=lambda p: -len(p.parts)):
        stamp(place)
    stamp(root)
