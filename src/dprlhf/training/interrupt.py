"""Ctrl-C at a safe point: between charges at once, within a charge after it is saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class Interruptible:
    """Turns SIGINT and SIGTERM into ``KeyboardInterrupt`` at a tick, or when the block ends.

    Raising inside a write would leave half a line. Outside the main thread nothing is installed.
    """

    def __init__(self) -> None:
        self._pending = False
        self._deferred = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._pending and kind is None:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending = True

    def defer(self) -> None:
        """Raise an interrupt that is pending, and defer later ones to the end of the block."""
        if self._pending:
            raise KeyboardInterrupt
        self._deferred = True

    def checked(self, tick: Callable[[int], None]) -> Callable[[int], None]:
        """Return ``tick`` with a check for an interrupt after it."""

        def check(rows: int) -> None:
            tick(rows)
            if self._pending and not self._deferred:
                raise KeyboardInterrupt

        return check
