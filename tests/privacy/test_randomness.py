"""Noise has the stated law, streams are apart, and the key stays in."""

import hashlib
import math
import secrets
import struct

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dprlhf.privacy import randomness
from dprlhf.privacy.randomness import (
    KEY_BYTES,
    commitment,
    new_key,
    uint64_stream,
    uniforms,
)
from helpers.laws import is_standard_normal

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
DRAWS = 1_000_000


def normals(key: bytes, *context: str | int, count: int) -> NDArray[np.float64]:
    return np.asarray(stats.norm.ppf(uniforms(key, *context, count=count)))


@pytest.fixture(scope="module")
def draws() -> NDArray[np.float64]:
    return normals(KEY, "noise", 1, count=DRAWS)


def test_what_is_made_of_uniforms_is_standard_normal(draws: NDArray[np.float64]) -> None:
    assert is_standard_normal(draws)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: 0.99 * x,
        lambda x: 1.01 * x,
        lambda x: x + 0.01,
        lambda x: math.sqrt(12) * (stats.norm.cdf(x) - 0.5),  # uniform of variance 1
        lambda x: np.abs(x),
        lambda x: np.clip(x, -3.5, 3.5),  # truncated tails carry the whole of δ
        lambda x: np.where(np.arange(len(x)) % 200, x, 0.0),  # every 200th draw forgotten
    ],
    ids=["std 0.99", "std 1.01", "mean 0.01", "uniform", "half", "no tails", "gaps"],
)
def test_the_normality_test_can_fail(draws, wrong):
    assert not is_standard_normal(wrong(draws))


def test_noise_does_not_repeat_itself(draws: NDArray[np.float64]) -> None:
    assert len(np.unique(draws)) > 0.999999 * DRAWS  # float16 noise has some 30,000 values


def test_noise_is_not_correlated_with_its_neighbours(draws: NDArray[np.float64]) -> None:
    for lag in (1, 2, 4, DRAWS // 4, DRAWS // 2):
        correlation = np.corrcoef(draws[:-lag], draws[lag:])[0, 1]
        assert abs(correlation) < 4.5 / math.sqrt(DRAWS - lag)


def test_the_same_use_gives_the_same_bits() -> None:
    first, again = (uniforms(KEY, "noise", 3, "ab", count=1001) for _ in range(2))
    assert first.tobytes() == again.tobytes()
    assert first.shape == (1001,)
    assert first.dtype == np.float64


CONTEXTS: list[tuple[str | int, ...]] = [
    (),
    ("",),
    ("a", "b"),
    ("ab",),
    ("a", "", "b"),
    ("a b",),
    ('a", "b',),
    ("b", "a"),
    (1,),
    ("1",),
    (1, 1),
    (11,),
    (1, "1"),
    ("1", 1),
    ("[1]",),
    (-1,),
    ("noise", 1),
    ("noise", 2),
    ("allocation",),
    ("allocation", 1),
]


def test_contexts_are_encoded_injectively() -> None:
    streams = [uint64_stream(KEY, *c, count=4).tobytes() for c in CONTEXTS]
    streams += [uint64_stream(OTHER, *c, count=4).tobytes() for c in CONTEXTS]
    assert len(set(streams)) == 2 * len(CONTEXTS)


def test_other_contexts_and_keys_give_uncorrelated_noise() -> None:
    n = 100_000
    rows = [normals(KEY, *c, count=n) for c in CONTEXTS] + [normals(OTHER, *CONTEXTS[-4], count=n)]
    correlations = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlations).max() < 5 / math.sqrt(n)
    # A shift of one stream against another shows nothing either.
    for shift in (1, 4, 1000):
        assert abs(np.corrcoef(rows[0][shift:], rows[1][:-shift])[0, 1]) < 5 / math.sqrt(n - shift)


def chacha20(key: bytes, count: int) -> bytes:
    """The keystream of RFC 8439, section 2.4, from block 0 and with a nonce of zeros."""

    def quarter(x: list[int], *place: int) -> None:
        for turn, (a, b, d) in zip((16, 12, 8, 7), ((0, 1, 3), (2, 3, 1)) * 2, strict=True):
            to, other, turned = place[a], place[b], place[d]
            x[to] = (x[to] + x[other]) % 2**32
            mixed = x[turned] ^ x[to]
            x[turned] = (mixed << turn | mixed >> (32 - turn)) % 2**32

    stream = b""
    for block in range(-(-count // 64)):
        start = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key)]
        start += [block, 0, 0, 0]
        x = list(start)
        for _ in range(10):
            for column in range(4):
                quarter(x, *range(column, 16, 4))
            for diagonal in range(4):
                quarter(x, *(4 * row + (diagonal + row) % 4 for row in range(4)))
        stream += struct.pack("<16I", *((a + b) % 2**32 for a, b in zip(x, start, strict=True)))
    return stream[:count]


def test_the_stream_is_chacha20_under_a_key_from_shake_256() -> None:
    # RFC 8439, appendix A.1, test vector 1.
    assert chacha20(bytes(32), 8).hex() == "76b8e0ada0f13d90"
    own = hashlib.shake_256(KEY + b'["noise", 7]').digest(32)
    expected = chacha20(own, 8 * 100)
    assert uint64_stream(KEY, "noise", 7, count=100).astype("<u8").tobytes() == expected


def test_every_bit_of_the_key_counts() -> None:
    streams = {uint64_stream(KEY, "x", count=4).tobytes()}
    for bit in range(8 * KEY_BYTES):
        flipped = (int.from_bytes(KEY) ^ (1 << bit)).to_bytes(KEY_BYTES)
        streams.add(uint64_stream(flipped, "x", count=4).tobytes())
    assert len(streams) == 8 * KEY_BYTES + 1


@pytest.mark.parametrize("size", [0, 16, 31, 33, 64])
def test_a_key_of_another_length_is_refused(size: int) -> None:
    # key ‖ context is injective only while all keys have one length.
    with pytest.raises(ValueError, match="32 bytes"):
        uint64_stream(bytes(size), "x", count=1)


def test_integers_and_uniforms_are_uniform() -> None:
    counts = np.bincount((uint64_stream(KEY, "u", count=400_000) % 256).astype(int), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-4
    top = np.bincount((uint64_stream(KEY, "u", count=400_000) >> 56).astype(int), minlength=256)
    assert stats.chisquare(top).pvalue > 1e-4
    assert stats.kstest(uniforms(KEY, "u", count=400_000), "uniform").pvalue > 1e-4


@pytest.mark.parametrize("word", [0, 2**64 - 1, 2**63, 2**63 - 1, 2**12 - 1])
def test_uniforms_lie_inside_the_open_interval(monkeypatch: pytest.MonkeyPatch, word: int) -> None:
    monkeypatch.setattr(
        randomness, "uint64_stream", lambda *_, count, **__: np.full(count, word, dtype=np.uint64)
    )
    value = uniforms(KEY, "x", count=1)[0]
    assert 0 < value < 1
    assert abs(value - word / 2**64) <= 2.0**-52
    assert math.isfinite(normals(KEY, "x", count=1).item())


def test_uniforms_are_symmetric_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    words = uint64_stream(KEY, "x", count=10_000)
    sides = []
    for word in (words, ~words):
        monkeypatch.setattr(randomness, "uint64_stream", lambda *_, w=word, count, **__: w)
        sides.append(uniforms(KEY, "x", count=len(words)))
    np.testing.assert_array_equal(sides[0], 1 - sides[1])


def test_a_new_key_is_fresh_entropy_of_the_operating_system(monkeypatch):
    np.random.seed(0)
    first = new_key()
    np.random.seed(0)
    assert len(first) == KEY_BYTES
    assert len({first, *(new_key() for _ in range(20))}) == 21
    asked: list[int] = []
    monkeypatch.setattr(secrets, "token_bytes", lambda n: asked.append(n) or bytes([7]) * n)
    assert new_key() == bytes([7]) * 32
    assert asked == [32]


def test_the_commitment_binds_to_the_key_and_does_not_hold_it() -> None:
    digest = commitment(KEY)
    assert len(bytes.fromhex(digest)) == 32
    assert digest == commitment(KEY) != commitment(OTHER)
    assert commitment(KEY, "a") != digest
    raw = bytes.fromhex(digest)
    for size in range(4, 33):
        for start in range(33 - size):
            assert KEY[start : start + size] not in raw
    # It is a stream of its own: publishing it shows nothing of allocation or noise.
    for context in CONTEXTS:
        assert uint64_stream(KEY, *context, count=4).tobytes() != raw
