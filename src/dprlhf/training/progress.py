"""Progress bars. Within a round, visible progress reveals its number of users, which is private.

A terminal shows the operator, who holds the data, progress in steps of ten percent. Any other
output (a job's log, a notebook's file) outlives the run and is passed on, and whatever collects it
stamps each line with the time. From the first private round to the end of the last it gets no line
of any work, not even of public work in between, which would show when the round before it ended:
only lines that come by the clock, at times that are fixed beforehand.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tqdm.auto import tqdm

from dprlhf.boundary import Private, open_private
from dprlhf.rewards.isolation import captured
from dprlhf.training.timing import in_words

# No count, no rate, no clock: the duration of a round reveals its number of users.
_SHARE_ONLY = "{desc}{percentage:3.0f}%|{bar}|"
_ROUNDS = "{desc}: {n_fmt}/{total_fmt}|{bar}|{postfix}"
_EVERY = 600.0
"""Seconds between two lines in a log."""

_STEP = 10
"""Percent; finer steps would show a micro-batch's share of the round, hence the round's size."""


class RoundBar:
    """The bar of one round, and the seconds of its phases (for secret telemetry)."""

    def __init__(self, bar: Any, label: str, rows_a_user: int) -> None:
        self._bar = bar
        self._label = label
        self._rows_a_user = rows_a_user
        self._rows, self._done = 1, 0
        self._phase = ""
        self._since = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def start(self, phase: str, users: Private[Any]) -> None:
        """Begin a phase of the round over these users."""
        self.stop()
        self._phase = phase
        self._rows, self._done = max(1, len(open_private(users)) * self._rows_a_user), 0
        self._bar.reset(total=100)
        self._bar.set_description(f"{self._label}: {phase}")

    def tick(self, rows: int) -> None:
        """Count this number of rows as done."""
        self._done += rows
        shown = min(100, 100 * self._done // self._rows // _STEP * _STEP)
        self._bar.update(shown - self._bar.n)

    def stop(self) -> None:
        """End the current phase."""
        now = time.perf_counter()
        if self._phase:
            self.seconds[self._phase] = now - self._since
        self._phase, self._since = "", now


class Progress:
    """All progress bars of a run; silent on processes other than the main one."""

    def __init__(self, rows_a_user: int, *, disable: bool = False) -> None:
        self._rows_a_user = rows_a_user
        self._seconds_a_round: float | None = None
        self._disable = disable
        self.bars = not disable
        self._rounds: Any = None
        self._shown: dict[str, str] = {}
        self._held: list[str] = []
        self._ended = threading.Event()

    def expect(self, seconds_a_round: float) -> None:
        """Show the remaining time, estimated on PUBLIC rows: a private round's time is private.

        Without this call, no remaining time is shown.
        """
        self._seconds_a_round = seconds_a_round

    def total(self, rounds: int, done: int) -> None:
        """Show the bar over rounds; where there is no terminal, one line before the first."""
        self._rounds = tqdm(
            total=rounds,
            initial=done,
            desc="rounds",
            bar_format=_ROUNDS,
            disable=self._hidden,
            position=0,
        )
        if self._hidden and not self._disable and done < rounds:
            print(
                f"dprlhf: rounds {done + 1} to {rounds}; until they have ended lines come by the"
                " clock alone, since the time of a round would tell how many users it had",
                file=sys.stderr,
                flush=True,
            )
            left = self._seconds_a_round and (rounds - done) * self._seconds_a_round
            threading.Thread(target=_tell_the_time, args=(self._ended, left), daemon=True).start()

    @property
    def _hidden(self) -> bool:
        """Whether no bar may be shown: a log gets none, and nothing between the rounds."""
        return not self.bars or not sys.stderr.isatty()

    @contextlib.contextmanager
    def phases(self, label: str) -> Iterator[RoundBar]:
        """Show a bar over the phases of a round, or of another part of the run."""
        with tqdm(
            total=100, bar_format=_SHARE_ONLY, leave=False, position=1, disable=self._hidden
        ) as bar:
            shown = RoundBar(bar, label, self._rows_a_user)
            yield shown
            shown.stop()

    @contextlib.contextmanager
    def round(self, t: int) -> Iterator[RoundBar]:
        """Show the bar of round t."""
        with self.phases(f"round {t}") as shown:
            yield shown
        if self._rounds is not None and not self._hidden:
            self._rounds.update(1)
            if self._seconds_a_round is not None:
                left = (self._rounds.total - self._rounds.n) * self._seconds_a_round
                self._shown["left"] = f"about {math.ceil(left / 60)} min"
            self._rounds.set_postfix(self._shown)

    @contextlib.contextmanager
    def bar(self, description: str, total: int) -> Iterator[Callable[[int], Any]]:
        """Show a bar over public work."""
        with tqdm(total=total, desc=description, leave=False, disable=self._hidden) as bar:
            yield bar.update

    @contextlib.contextmanager
    def unlogged(self) -> Iterator[None]:
        """Discard what tools and metrics print about public rows, unless on a terminal.

        In a log such a line would show when the round before it ended.
        """
        seen = sys.stdout.isatty() and sys.stderr.isatty()
        with contextlib.nullcontext() if seen else captured(None):
            yield

    def say(self, *lines: str) -> None:
        """Print lines of public facts, on any kind of output, unless the run is to be quiet."""
        if not self._disable:
            print(*(f"dprlhf: {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)

    def show(self, metrics: dict[str, Any]) -> None:
        """Show released values beside the bar over rounds."""
        for key, label in (
            ("private_reward_noised", "reward (noised)"),
            ("public_reward", "public reward"),
        ):
            if metrics.get(key) is not None:
                self._shown[label] = f"{metrics[key]:.2f}"
        if self._rounds is not None:
            self._rounds.set_postfix(self._shown)

    def warn(self, warning: str) -> None:
        """Show a warning from released values: in a log, when the rounds have ended."""
        self._held.append(warning)
        if sys.stderr.isatty():
            self._show_held()

    def _show_held(self) -> None:
        for warning in self._held:
            tqdm.write(f"dprlhf: warning: {warning}", file=sys.stderr)
        self._held.clear()

    def close(self) -> None:
        """Close all bars; the rounds have ended, and public work is shown again."""
        self._ended.set()
        if self._rounds is not None:
            self._rounds.close()
        self._show_held()


def _tell_the_time(ended: threading.Event, expected: float | None) -> None:
    """Write a line to the process's stderr every ten minutes: elapsed and PUBLIC expected time.

    It knows nothing else of the run. The descriptor is its own: what user code prints meanwhile is
    captured by exchanging descriptor 2, and a line that was lost to it would tell of a reward call.
    """
    try:
        own = os.dup(2)
    except OSError:  # a daemon may have closed it
        return
    of = f" of about {in_words(expected)}, by public rows" if expected is not None else ""
    passed = 0.0
    start = time.monotonic()
    while not ended.wait(start + passed + _EVERY - time.monotonic()):
        passed += _EVERY
        with contextlib.suppress(OSError):
            os.write(own, f"dprlhf: {in_words(passed)}{of}\n".encode())
    os.close(own)
