"""Secret randomness: one 32-byte key from the operating system, one stream for each purpose.

Every stream is SHAKE-256 of the key and a context that names its single use, so the same numbers
come out on every process and whatever the micro-batch size, and no two uses share a stream.
The key decides allocation and noise: it lives in ``secret/`` and nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri

KEY_BYTES = 32
_DRAWS_PER_NORMAL = 4
_BLOCK = 2**16


def new_key() -> bytes:
    """Return a fresh key from the operating system's entropy."""
    return secrets.token_bytes(KEY_BYTES)


def uint64_stream(key: bytes, *context: str | int, count: int) -> NDArray[np.uint64]:
    """Return ``count`` uniform 64-bit integers for the use that ``context`` names.

    The context is JSON-encoded, so that ``("a", "b")`` and ``("ab",)`` are different streams.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes")
    state = hashlib.shake_256(key + json.dumps(context).encode())
    return np.frombuffer(state.digest(8 * count), dtype="<u8")


def uniforms(key: bytes, *context: str | int, count: int) -> NDArray[np.float64]:
    """Return ``count`` numbers in the open interval (0, 1), multiples of 2⁻⁵² plus half a step."""
    # 52 bits, not 53: the half step must not be rounded away, or the largest number would be 1.
    draws = (uint64_stream(key, *context, count=count) >> np.uint64(12)).astype(np.float64)
    draws += 0.5
    draws *= 2.0**-52
    return draws


def gaussian_noise(key: bytes, *context: str | int, count: int) -> torch.Tensor:
    """Return ``[count]`` standard normal draws in float64.

    Each is the sum of four inverse-CDF draws over two. One float64 draw takes values on a grid
    that an observer of (value + noise) can invert (Mironov 2012); with four, the preimage of an
    output is far too large to search (Holohan & Braghin 2021, arXiv 2107.10138).

    Blocks of draws have streams of their own, so that threads share the work, and only the blocks
    at work take memory beyond what is returned.
    """
    noise = torch.empty(count, dtype=torch.float64)

    def fill(block: int) -> None:
        part = noise[block * _BLOCK : (block + 1) * _BLOCK].numpy()
        draws = uniforms(key, *context, block, count=_DRAWS_PER_NORMAL * len(part))
        ndtri(draws, out=draws)
        draws.reshape(_DRAWS_PER_NORMAL, -1).sum(axis=0, out=part)
        part /= math.sqrt(_DRAWS_PER_NORMAL)

    blocks = range(-(-count // _BLOCK))
    if len(blocks) <= 1:
        for block in blocks:
            fill(block)
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill, blocks))
    return noise


def commitment(key: bytes, *context: str | int) -> str:
    """Return a digest that binds to the key without revealing it: safe to publish."""
    return uint64_stream(key, "commitment", *context, count=4).tobytes().hex()
