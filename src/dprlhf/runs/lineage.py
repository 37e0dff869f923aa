"""The privacy record that travels with a model's weights: which private runs it came from.

A model that is pushed, merged, copied or renamed leaves its run folder behind. What it cost its
users must not be forgotten when another run starts from it, so the record is written several times:
as a file beside the weights, in the metadata of each safetensors file, in ``config.json`` (which
transformers keeps when it saves the model again), in the model card, and in the config of the model
in memory. One of them is enough.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dprlhf.errors import DprlhfError
from dprlhf.runs.folder import write_atomically, write_json

FILE = "dprlhf_privacy.json"
KEY = "dprlhf_privacy"
"""The key in ``config.json``, in a safetensors file's metadata and in a model card."""

_WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
_COPIED_AT_ONCE = 1 << 24  # bytes

Carried = dict[str, Any]
"""A record: ``statement``, the guarantee in a sentence; ``runs``, the run's terms and then those of
the runs before it, each as :class:`dprlhf.runs.earlier.Record` has them."""


def attach(folder: Path, carried: Carried) -> None:
    """Write a record into a folder of weights, wherever it can be."""
    write_json(folder / FILE, carried)
    config, card = folder / "config.json", folder / "README.md"
    if config.is_file():
        write_json(config, {**json.loads(config.read_text("utf-8")), KEY: carried})
    if card.is_file():
        write_atomically(card, in_card(card.read_text("utf-8"), carried))
    for weights in folder.glob("*.safetensors"):
        # The tensors are copied as they are.
        length, header = _header(weights)
        header["__metadata__"] = {**header.get("__metadata__", {}), KEY: metadata(carried)[KEY]}
        data = json.dumps(header, separators=(",", ":")).encode()
        data += b" " * (-len(data) % 8)  # the format aligns the tensors to 8 bytes
        fresh = weights.with_name(weights.name + ".tmp")
        with open(weights, "rb") as old, open(fresh, "wb") as new:
            old.seek(8 + length)
            new.write(len(data).to_bytes(8, "little") + data)
            shutil.copyfileobj(old, new, _COPIED_AT_ONCE)
        os.replace(fresh, weights)


def mark(model: Any, carried: Carried) -> None:
    """Write a record into the config of a model in memory.

    It stays there through ``merge_and_unload`` and ``save_pretrained``.
    """
    if getattr(model, "config", None) is not None:
        setattr(model.config, KEY, carried)


def metadata(carried: Carried) -> dict[str, str]:
    """Return a record as the metadata of a safetensors file."""
    return {KEY: json.dumps(carried)}


def in_card(card: str, carried: Carried) -> str:
    """Return a model card with a record among its metadata."""
    start, line = "---\n", f"{KEY}: {json.dumps(carried)}\n"  # JSON is YAML
    return start + line + card.removeprefix(start) if card.startswith(start) else card


def carried_by(model: str, revision: str | None = None, *, fetch: bool = False) -> list[Carried]:
    """Return the records that a model carries, each once; none for one of another program."""
    records: list[Carried] = []
    for text in _texts(model, revision, fetch):
        try:
            carried = json.loads(text) if isinstance(text, str) else text
            known = [record["run"] for record in carried["runs"]]
        except (ValueError, TypeError, KeyError):
            known = []
        if not known or not all(isinstance(run, str) for run in known):
            raise DprlhfError(
                f"{model}: its privacy record ({KEY}) was altered, so what it cost its users is not"
                " known; take the model from its run's folder again"
            )
        if all(known != [record["run"] for record in other["runs"]] for other in records):
            records.append(carried)
    return records


def is_adapter(model: str, revision: str | None = None) -> bool:
    """Return whether a model, in a folder or in the hub's cache, is a PEFT adapter."""
    return any(True for _ in _files(model, "adapter_config.json", revision, False))


def _texts(model: str, revision: str | None, fetch: bool) -> Iterator[Any]:
    """Yield what each place says where a record may be, as text or already parsed."""
    for file in _files(model, FILE, revision, fetch):
        yield file.read_text("utf-8", errors="replace")
    for file in _files(model, "config.json", revision, fetch):
        with contextlib.suppress(ValueError):  # whoever loads the model will say so
            settings = json.loads(file.read_text("utf-8"))
            if isinstance(settings, dict) and KEY in settings:
                yield settings[KEY]
    for file in _files(model, "README.md", revision, False):
        card = file.read_text("utf-8", errors="replace")
        with contextlib.suppress(yaml.YAMLError, ValueError):  # the second for 2024-99-99
            record = yaml.safe_load(card[4:].split("\n---", 1)[0]) if card[:4] == "---\n" else None
            if isinstance(record, dict) and KEY in record:
                yield record[KEY]
    names = ["*.safetensors"] if Path(model).is_dir() else _WEIGHTS
    for file in (f for name in names for f in _files(model, name, revision, False)):
        with contextlib.suppress(ValueError, OSError):
            record = _header(file)[1].get("__metadata__", {})
            if KEY in record:
                yield record[KEY]


def _files(model: str, name: str, revision: str | None, fetch: bool) -> list[Path]:
    """Return the files of a name or pattern in a model's folder, or in the hub's cache."""
    if Path(model).is_dir():
        return sorted(Path(model).glob(name))
    if model.startswith("asset:") or model.count("/") > 1 or Path(model).is_absolute():
        return []
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError

    try:
        return [Path(hf_hub_download(model, name, revision=revision, local_files_only=not fetch))]
    # No such file, no connection, no such name: loading the model says which. Any other error is
    # not caught: a model without a record passes for one that cost no users anything.
    except (OSError, EntryNotFoundError, HFValidationError):
        return []


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Return the length in bytes of a safetensors file's header, and the header."""
    with open(file, "rb") as held:
        length = int.from_bytes(held.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file}: no safetensors file")
        header: dict[str, Any] = json.loads(held.read(length))
    return length, header
