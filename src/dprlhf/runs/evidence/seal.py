"""The seal of the evidence: one Ed25519 signature over its canonical JSON, in both files.

``evidence.json`` is a statement with its signature. ``evidence.html`` shows the statement, and ends
with the same text as ``evidence.json``. The statement holds the hash of the page without that end,
so that the signature covers every byte that a reader sees. Without a key both are unsigned, and say
so; the hash then still shows an accident, but not a forgery.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dprlhf.errors import DprlhfError

_CONTEXT = b"dprlhf evidence, version 1\n"
"""Starts every signed message, so that the key's signatures on other things cannot pass as one."""
_OPEN, _CLOSE = '<script type="application/json" id="seal">\n', "</script>\n"


def new_key(path: Path) -> str:
    """Write a new private key and its public half (``FILE.pub``), and return its fingerprint.

    Raises:
        DprlhfError: One of the files exists or cannot be written.
    """
    key = Ed25519PrivateKey.generate()
    public = path.with_name(path.name + ".pub")
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    shown = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    for file, content, mode in ((path, private, 0o600), (public, shown, 0o644)):
        try:
            opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(opened, "wb") as out:
                out.write(content)
        except OSError as error:
            raise DprlhfError(f"{file}: no key was written ({error.strerror})") from None
    return fingerprint(public_hex(key))


def read_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key in PEM form.

    Raises:
        DprlhfError: It cannot be read, is protected by a passphrase, or is no Ed25519 key.
    """
    key = _pem(path, lambda text: serialization.load_pem_private_key(text, password=None))
    if not isinstance(key, Ed25519PrivateKey):
        raise DprlhfError(f"{path}: no Ed25519 key; make one with: dprlhf comply --new-key FILE")
    return key


def read_public_key(path: Path) -> str:
    """Read a public key in PEM form, or the public half of a private one, as hexadecimal text.

    Raises:
        DprlhfError: It cannot be read, or is no Ed25519 key.
    """
    if path.is_file() and b"PRIVATE KEY" in path.read_bytes():
        return public_hex(read_key(path))
    key = _pem(path, serialization.load_pem_public_key)
    if not isinstance(key, Ed25519PublicKey):
        raise DprlhfError(f"{path}: no Ed25519 key")
    return key.public_bytes_raw().hex()


def public_hex(key: Ed25519PrivateKey) -> str:
    """Return the public half of a key, as hexadecimal text."""
    return key.public_key().public_bytes_raw().hex()


def fingerprint(public: str) -> str:
    """Return the SHA-256 hash of a public key in groups of four digits, to be compared by eye."""
    text = hashlib.sha256(bytes.fromhex(public)).hexdigest()[:40]
    return " ".join(text[i : i + 4] for i in range(0, len(text), 4))


def sealed(statement: dict[str, Any], key: Ed25519PrivateKey | None) -> str:
    """Return the text of ``evidence.json``: the statement, and the signature if there is a key."""
    signature = None
    if key is not None:
        signature = {
            "algorithm": "Ed25519",
            "public_key": public_hex(key),
            "value": key.sign(_message(statement)).hex(),
        }
    return _text({"statement": statement, "signature": signature})


def with_seal(page: str, seal: str) -> str:
    """Return the page with the text of ``evidence.json`` at its end."""
    return page + _OPEN + seal.replace("<", "\\u003c") + _CLOSE


def page_hash(page: str) -> str:
    """Return the hash of a page without its seal."""
    return hashlib.sha256(page.encode()).hexdigest()


def open_seal(path: Path) -> dict[str, Any]:
    """Return the sealed values of ``evidence.json`` or ``evidence.html``, byte for byte checked.

    The signature is not checked here, see :func:`check_signature`.

    Raises:
        DprlhfError: The file cannot be read, was altered, or is no evidence.
    """
    try:
        text = path.read_bytes().decode()
        page, opened, rest = text.rpartition(_OPEN)
        values: dict[str, Any] = json.loads(rest.removesuffix(_CLOSE) if opened else text)
        statement, _ = values["statement"], values["signature"]
        # Only the very text that dprlhf writes passes: a second key of the same name, or markup
        # behind the seal, would show a reader something else than was signed.
        whole = with_seal(page, _text(values)) if opened else _text(values)
        good = whole == text and (not opened or statement["page_sha256"] == page_hash(page))
    except OSError as error:
        raise DprlhfError(f"{path}: could not be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        good = False
    if not good:
        raise DprlhfError(f"{path}: altered, or not written by dprlhf comply; do not rely on it")
    return values


def check_signature(path: Path, values: dict[str, Any], expected: str | None) -> str:
    """Check the signature of sealed values, and return the fingerprint of its key.

    Args:
        path: The file that the values come from, for messages.
        values: What :func:`open_seal` returned.
        expected: The public key that must have signed; None accepts the one in the file.

    Raises:
        DprlhfError: There is no signature, it does not fit, or another key made it.
    """
    signature = values["signature"]
    if signature is None:
        raise DprlhfError(f"{path}: not signed; anybody could have written it")
    try:
        public, value = (bytes.fromhex(signature[name]) for name in ("public_key", "value"))
        said = {"algorithm": "Ed25519", "public_key": public.hex(), "value": value.hex()}
        if signature != said:
            raise ValueError  # another spelling of the same bytes
        Ed25519PublicKey.from_public_bytes(public).verify(value, _message(values["statement"]))
    except (InvalidSignature, ValueError, KeyError, TypeError):
        raise DprlhfError(f"{path}: the signature does not fit; do not rely on it") from None
    if expected is not None and public.hex() != expected:
        raise DprlhfError(
            f"{path}: signed by another key ({fingerprint(public.hex())}) than the one given"
            f" ({fingerprint(expected)})"
        )
    return fingerprint(public.hex())


def _message(statement: dict[str, Any]) -> bytes:
    return (
        _CONTEXT
        + json.dumps(statement, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    )


def _text(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=1, allow_nan=False) + "\n"


def _pem(path: Path, read: Any) -> Any:
    try:
        return read(path.read_bytes())
    except OSError as error:
        raise DprlhfError(f"{path}: could not be read ({error.strerror})") from None
    except TypeError:
        raise DprlhfError(
            f"{path}: protected by a passphrase; dprlhf comply needs a key without one, kept where"
            " only you can read it"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise DprlhfError(f"{path}: no key in PEM form") from None
