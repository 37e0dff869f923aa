"""Pinning what comes from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from dprlhf.errors import DprlhfError


def pinned(source: str, revision: str | None, key: str) -> dict[str, str]:
    """Return what a loader is told about the revision of ``source``: nothing, or which.

    Args:
        source: as the recipe names it.
        revision: a branch, tag or commit of it; None takes what the hub has now.
        key: the recipe's key of the revision.

    Raises:
        DprlhfError: there is a revision, but the source is on this machine.
    """
    if revision is None:
        return {}
    if source.startswith("asset:") or Path(source).exists():
        raise DprlhfError(f"{key}: {source!r} is on this machine; only what is on the hub has one")
    return {"revision": revision}
