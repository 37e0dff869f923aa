"""Load the Python function or object that a recipe names."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import operator
import sys
from pathlib import Path
from types import ModuleType

from dprlhf.errors import DprlhfError, missing_path
from dprlhf.rewards.reward import suggestion, type_and_message


def load_function(source: str, kind: str = "reward") -> object:
    """Load what ``package.module:attribute`` or ``path/to/file.py:attribute`` names."""
    place, _, attribute = source.rpartition(":")
    if not place or not attribute:
        raise DprlhfError(
            f"{kind} function {source!r} is not of the form 'package.module:attribute' or "
            "'path/to/file.py:attribute'"
        )
    module = (_module_from_file if place.endswith(".py") else _module_by_name)(place, kind)
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError:
        known = [
            name
            for name, value in sorted(vars(module).items())
            if callable(value) and not name.startswith("_")
        ]
        raise DprlhfError(
            f"{kind} function {source!r}: {place} has no {attribute!r}; "
            + suggestion(attribute, known, "its callables")
        ) from None


def _module_by_name(name: str, kind: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as problem:
        raise DprlhfError(
            f"{kind} module {name!r} cannot be imported ({type_and_message(problem)}): install it,"
            " or name a file as 'path/to/file.py:attribute'"
        ) from problem


def _module_from_file(place: str, kind: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise missing_path(f"{kind} file {place!r} does not exist", place)
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise DprlhfError(f"{kind} file {place!r} cannot be read: {problem.strerror}") from problem
    # A name of its own, because two files may share a stem; registered, because pickle and
    # dataclasses look modules up. It follows from the content too: the same file is loaded once,
    # one that was edited meanwhile (in a notebook, say) anew.
    digest = hashlib.sha256(str(path).encode() + b"\0" + content).hexdigest()[:8]
    name = f"dprlhf_reward_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as problem:
        del sys.modules[name]
        if isinstance(problem, KeyboardInterrupt):
            raise
        raise DprlhfError(f"{kind} file {place!r} fails: {type_and_message(problem)}") from problem
    return module
