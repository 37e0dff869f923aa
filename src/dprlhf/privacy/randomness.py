"""Secret randomness: one 32-byte key from the operating system, one stream for each use.

Every stream is ChaCha20 (RFC 8439) under its own key: SHAKE-256 of the run's key and a context that
names the use. So every process draws the same numbers at any micro-batch size, and no two uses
share a stream. SHAKE-256 alone would do as well, at a tenth of the speed. The key determines
allocation and noise: it is stored in ``secret/`` and nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import secrets

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

KEY_BYTES = 32
_NONCE = bytes(16)  # constant: each key is used for one stream only


def new_key() -> bytes:
    """Return a fresh key from the operating system's entropy."""
    return secrets.token_bytes(KEY_BYTES)


def uint64_stream(key: bytes, *context: str | int, count: int) -> NDArray[np.uint64]:
    """Return ``[count]`` uniform 64-bit integers for the use that ``context`` names."""
    # JSON, so that ("a", "b") and ("ab",) are different streams.
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes")
    own = hashlib.shake_256(key + json.dumps(context).encode()).digest(KEY_BYTES)
    stream = Cipher(ChaCha20(own, _NONCE), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * count)), dtype="<u8")


def uniforms(key: bytes, *context: str | int, count: int) -> NDArray[np.float64]:
    """Return ``[count]`` uniform draws in the open interval (0, 1): k · 2⁻⁵² + 2⁻⁵³."""
    # 52 bits, not 53: the half step must not be rounded away, or the largest number would be 1.
    words = uint64_stream(key, *context, count=count) >> np.uint64(12)
    draws = words.view(np.int64).astype(np.float64)  # signed numbers convert faster
    draws += 0.5
    draws *= 2.0**-52
    return draws


def commitment(key: bytes, *context: str | int) -> str:
    """Return a cryptographic commitment to the key, in hexadecimal: safe to publish."""
    return uint64_stream(key, "commitment", *context, count=4).tobytes().hex()
