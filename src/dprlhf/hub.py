"""What comes from the Hugging Face hub: its revision, and whether the hub can be asked at all."""

from __future__ import annotations

from pathlib import Path

from dprlhf.errors import DprlhfError


def split_revision(source: str) -> tuple[str, str | None]:
    """Return a hub id and the branch, tag or commit behind its ``@``; None without one.

    >>> split_revision("org/model@v2"), split_revision("org/model")
    (('org/model', 'v2'), ('org/model', None))
    """
    if "@" not in source or source.startswith("asset:") or Path(source).exists():
        return source, None
    name, _, revision = source.partition("@")
    if Path(name).exists():
        raise DprlhfError(
            f"{source!r}: {name} is on this machine; only what is on the hub has revisions"
        )
    return name, revision or None


def pinned(source: str, revision: str | None, key: str) -> dict[str, str]:
    """Return what a loader is told about the revision of ``source``: nothing, or which.

    Args:
        revision: a branch, tag or commit of it; None takes what the hub has now.
    """
    if revision is None:
        return {}
    if source.startswith("asset:") or Path(source).exists():
        raise DprlhfError(f"{key}: {source!r} is on this machine; only what is on the hub has one")
    return {"revision": revision}


def check_reachable(source: str, revision: str | None, key: str) -> None:
    """Refuse a model that is neither here nor in the cache, at once where the hub does not answer.

    The hub's own client tries again for half a minute first, which helps nobody whose folder is
    misspelt.

    Args:
        revision: A branch, tag or commit of it; None is the main branch.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if source.startswith("asset:") or Path(source).exists() or constants.HF_HUB_OFFLINE:
        return
    try:
        if isinstance(try_to_load_from_cache(source, "config.json", revision=revision), str):
            return
    except HFValidationError:
        raise DprlhfError(
            f"{key} {source!r}: there is no such folder, and no model on the hub can be called that"
        ) from None
    check_connection(
        f"{key} {source!r}: there is no such folder, no copy from the hub in"
        f" {constants.HF_HUB_CACHE}"
    )


def check_connection(missing: str) -> None:
    """Refuse what only the hub could have, where the hub cannot be asked.

    Args:
        missing: Start of the message: what is missing, and where it was looked for.
    """
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and not _hub_answers():
        raise DprlhfError(f"{missing}, and no connection to {constants.ENDPOINT}")


def _hub_answers() -> bool:
    """Return whether the hub answers one request, whatever it says."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # by name: the client's library differs between its versions
        return type(error).__name__ not in ("ConnectError", "ConnectTimeout")
    return True


def hush_libraries() -> None:
    """Switch off other libraries' progress bars and notices."""
    import logging

    # As PEFT loads it, it warns of a kernel that it did not find on the hub.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
