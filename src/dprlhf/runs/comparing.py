"""Comparisons of runs by what is in their folders: shared users, and copies that both went on.

A run is named by its folder, or by a model that it left and that tells only which run it was (the
commitment to its key). The folder is then looked for near the model.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dprlhf.errors import DprlhfError
from dprlhf.privacy.ledger import opened_terms, read_opened
from dprlhf.runs.folder import RunFolder


def check_one_continuation(named: Iterable[tuple[Path, str]]) -> None:
    """Check that no two of some folders are copies of one run that were both run on.

    They have one key and one record, and would count once, but the rounds that both ran released
    twice about their users (docs/proofs/resume.md). A copy that only lags behind is the same run. A
    model elsewhere does not tell which copy it is from, and is not compared.
    """
    seen: dict[str, list[tuple[Path, list[str]]]] = {}
    for path, run in named:
        folder = next(_folders(run, (path, *path.resolve().parents)), None)
        if folder is None:
            continue
        # A charge's hash stands for all before it. What was noted after the last releases nothing.
        charges = [entry.hash for entry in read_opened(folder.ledger) if entry.is_charge]
        for other, known in seen.setdefault(run, []):
            both = min(len(charges), len(known))
            if charges[:both] != known[:both]:
                z = opened_terms(folder.ledger)["noise_multiplier"]
                raise DprlhfError(
                    f"{other} and {path} are two continuations of one run: its folder was copied or"
                    " restored from a backup, and both were run on. Rounds that both ran have"
                    " released twice about their users, which no card counts: together they cost up"
                    f" to what the same plan costs at noise multiplier {z / math.sqrt(2):.4g} in"
                    f" place of {z:.4g}"
                )
        seen[run].append((path, charges))


def users_of(path: Path, run: str, beside: Path | None = None) -> NDArray[np.uint64] | None:
    """Return the hashes of a run's users; None where its folder is not at hand."""
    above = path.resolve().parents
    near = [path, *above, *above[0].glob("*"), *(beside.glob("*") if beside else ())]
    held = (f.identities for f in _folders(run, near) if os.access(f.identities, os.R_OK))
    identities = next(held, None)  # those of copies are the same
    return None if identities is None else read_identities(identities)


def read_identities(path: Path) -> NDArray[np.uint64]:
    """Return the hashes of a run's users from their file."""
    try:
        identities: NDArray[np.uint64] = np.load(path)
    except (OSError, ValueError, EOFError):
        raise DprlhfError(f"{path}: damaged; the run's users are not known from it") from None
    return identities


def _folders(run: str, places: Iterable[Path]) -> Iterator[RunFolder]:
    """Yield the folders among some places whose ledger is of a run (by commitment)."""
    for place in places:
        folder = RunFolder(place)
        if opened_terms(folder.ledger).get("key_commitment") == run:
            yield folder


def check_apart(named: Iterable[tuple[Path, str]]) -> None:
    """Check that runs declared disjoint share no user; a line says what is not compared."""
    read: list[tuple[Path, NDArray[np.uint64]]] = []
    for path, run in named:
        users = users_of(path, run)
        if users is None:
            print(
                f"dprlhf: {path}: its users were not compared with the others': the run's folder,"
                " which has their hashes, is not at hand",
                file=sys.stderr,
            )
            continue
        for other, known in read:
            if np.isin(users, known).any():
                raise overlap(other.name, path.name)
        read.append((path, users))


def overlap(first: str, second: str) -> DprlhfError:
    """Return the error that names two runs which are declared disjoint and share a user."""
    return DprlhfError(
        f"{first} and {second} are declared to have no users in common, but they have: their costs"
        " compose; write users: shared (without a data.user_column, rows with the same prompt count"
        " as one user's)"
    )
