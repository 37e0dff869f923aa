"""Keep what a reward prints, warns and logs about private prompts away from the terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TextIO

import numpy as np

from dprlhf.hardware import default_torch_state

_one_thread = threading.RLock()

SecretSink = Callable[[str], object] | TextIO
"""Destination of captured text inside ``secret/``: a function of the text or an open file."""


class _Open(io.TextIOWrapper):
    """A stream that stays open: one user's text must not close it for the others."""

    def close(self) -> None:
        """Do nothing."""


@contextlib.contextmanager
def captured(sink: SecretSink | None) -> Iterator[None]:
    """Send Python's stdout, stderr, warnings and log records to ``sink``; drop them without one.

    So does a library that kept ``sys.stderr`` as it was: the streams' own ``write`` is redirected,
    which reaches a notebook's too. File descriptors 1 and 2 point to the null device meanwhile, so
    that a subprocess or native code cannot print either; that part is dropped even with a sink. The
    redirection holds for the whole process, other threads included. Not covered: other streams,
    files and connections that the reward has opened, and what its threads write later.

    The working directory is afterwards what it was, as a run folder may have a relative name, and
    so are torch's settings. Another thread that comes here waits: the first to leave would put the
    streams back while the other still writes of private prompts.
    """
    raw = io.BytesIO()
    text = _Open(raw, "utf-8", errors="backslashreplace", write_through=True)
    try:
        with (
            _one_thread,
            kept_process_state(),
            _silent_descriptors(),
            _redirected_writes(text),
            contextlib.redirect_stdout(text),
            contextlib.redirect_stderr(text),
            _captured_logging(logging.StreamHandler(text)),
            _captured_warnings(text),
        ):
            yield
    finally:
        content = raw.getvalue().decode("utf-8", "backslashreplace")
        if sink is not None and content:
            write = sink.write if hasattr(sink, "write") else sink
            write(content)


@contextlib.contextmanager
def kept_process_state() -> Iterator[None]:
    """Leave the working directory and torch's settings as they were, whatever a user's code does.

    A directory that is no longer there cannot be gone back to.
    """
    try:
        before = os.getcwd()
    except OSError:
        before = ""
    try:
        with default_torch_state():
            yield
    finally:
        with contextlib.suppress(OSError):
            os.chdir(before)


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Drop warnings, log records and NumPy's complaints of numbers; what is printed is shown.

    For the private part of a round: that a library warned at all, of an overflow, say, tells of a
    user whose values are odd. It holds for the whole process, other threads included.
    """
    # A record is not even written as text: one that cannot be would be shown with its arguments.
    with (
        np.errstate(all="ignore"),  # of this thread; of one that is started inside, the filter
        warnings.catch_warnings(),
        _captured_logging(logging.NullHandler()),
    ):
        warnings.simplefilter("ignore")
        yield


def _streams() -> tuple[TextIO | None, ...]:
    return sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__


def _flush() -> None:
    for stream in _streams():
        if stream is not None:
            with contextlib.suppress(Exception):
                stream.flush()


@contextlib.contextmanager
def _silent_descriptors() -> Iterator[None]:
    _flush()
    saved: dict[int, int] = {}
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for descriptor in (1, 2):
            with contextlib.suppress(OSError):  # a daemon may have closed them
                saved[descriptor] = os.dup(descriptor)
                os.dup2(null, descriptor)
        yield
    finally:
        _flush()  # what was written to the original streams must go to the null device, not later
        for descriptor, original in saved.items():
            os.dup2(original, descriptor)
            os.close(original)
        os.close(null)


@contextlib.contextmanager
def _redirected_writes(text: io.TextIOWrapper) -> Iterator[None]:
    # Of the objects themselves: one without a descriptor, as in a notebook, that a library has kept
    # is reached in no other way.
    with contextlib.ExitStack() as stack:
        for stream in _streams():
            own = getattr(stream, "__dict__", {})
            before = {name: own[name] for name in ("write",) if name in own}
            own["write"] = text.write
            stack.callback(own.update, before)
            stack.callback(own.pop, "write", None)
        yield


@contextlib.contextmanager
def _captured_logging(handler: logging.Handler) -> Iterator[None]:
    # Handlers sit on any logger, and many libraries switch propagation off: every record passes
    # through this one method.
    original = logging.Logger.callHandlers

    def to_text(self: logging.Logger, record: logging.LogRecord) -> None:
        handler.handle(record)

    logging.Logger.callHandlers = to_text  # type: ignore[method-assign]
    try:
        yield
    finally:
        logging.Logger.callHandlers = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _captured_warnings(text: io.TextIOWrapper) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        # "always": whether a warning is an error or was shown before must not change a score.
        warnings.simplefilter("always")
        try:
            yield
        finally:
            for entry in caught:
                with contextlib.suppress(BaseException):  # of a warning's own __str__
                    text.write(
                        warnings.formatwarning(
                            entry.message, entry.category, entry.filename, entry.lineno
                        )
                    )
