"""Measuring: sides in alternation, medians with quartiles, peak memory."""

from __future__ import annotations

import ctypes
import gc
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dprlhf.runs import measurements
from dprlhf.runs.measurements import Result


def interleaved(sides: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Time the sides in turn, after one uncounted call of each; seconds of every repeat.

    Load that comes and goes then meets all sides alike. Every other repeat runs in the opposite
    order, so that no side always finds the other's data in the caches.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name in list(sides)[:: 1 if repeat % 2 else -1]:
            start = _now()
            sides[name]()
            if repeat:
                seconds[name].append(_now() - start)
    return seconds


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class Turns:
    """Lets whole training loops alternate in one process, a lap each, in threads of their own.

    A loop calls :meth:`lap` after each of its steps; the call returns when its turn comes again.
    Only one loop ever runs.

    Attributes:
        laps: seconds of each loop's laps; the first lap of each (loading, warming up) is left out.
    """

    def __init__(self, loops: Mapping[str, Callable[[Callable[[], None]], object]]) -> None:
        self.laps: dict[str, list[float]] = {name: [] for name in loops}
        self._loops = loops
        self._order = list(loops)
        self._turn = threading.Condition()
        self._errors: list[BaseException] = []

    def run(self) -> None:
        """Run all loops to their end; an error in one of them is raised here."""
        threads = [
            threading.Thread(target=self._run, args=(name,), daemon=True) for name in self._loops
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _run(self, name: str) -> None:
        first, start = True, 0.0

        def lap() -> None:
            nonlocal first, start
            if not first:
                self.laps[name].append(_now() - start)
            first = False
            with self._turn:
                self._order.append(self._order.pop(0))
                self._turn.notify_all()
            self._wait(name)
            start = _now()

        try:
            self._wait(name)
            self._loops[name](lap)
        except BaseException as error:
            self._errors.append(error)
        with self._turn:
            self._order.remove(name)
            self._turn.notify_all()

    def _wait(self, name: str) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._order[0] == name or self._errors)
        if self._errors:
            raise SystemExit


def peak_bytes(call: Callable[[], object], resident: int) -> int:
    """Return the most bytes that tensors and arrays take at once during ``call``.

    On a GPU this is ``torch.cuda.max_memory_allocated``. On a CPU it is ``resident`` plus the rise
    of the process's resident set, whose high-water mark Linux lets a process reset. This sees all
    that the call needs, also NumPy's arrays and the matrix library's workspace, which a profile of
    torch's allocator does not. Imports and what was loaded before do not count, and the allocator
    is told to give every freed block back at once, so earlier calls leave nothing to reuse.

    Args:
        resident: bytes of the tensors that exist before the call (the GPU knows its own).
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated()
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, 2**16)
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    call()
    rise = _status("VmHWM") - before
    libc.mallopt(_MMAP_THRESHOLD, 2**25)  # where glibc arrives by itself in a long run
    return resident + rise


_MMAP_THRESHOLD = -3  # of malloc.h: larger blocks are mapped, and unmapped when freed


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def resident_bytes(*owners: Any) -> int:
    """Return the bytes of all tensors of modules and optimizers, shared ones counted once."""
    storages: dict[int, int] = {}
    for owner in owners:
        if isinstance(owner, torch.nn.Module):
            tensors = [*owner.parameters(), *owner.buffers()]
        else:
            tensors = [v for s in owner.state.values() for v in s.values()]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def ratio(
    name: str,
    above: list[float],
    below: list[float],
    *,
    at_most: float | None = None,
    at_least: float | None = None,
) -> list[Result]:
    """Return the median ratio of paired measurements, with its quartiles as the spread."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    middle = statistics.median(ratios)
    rows = [Result(name, middle, "1")]
    if at_most is not None:
        rows = [measurements.at_most(name, middle, "1", at_most)]
    elif at_least is not None:
        rows = [measurements.at_least(name, middle, "1", at_least)]
    if len(ratios) > 1:
        lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive")
        rows += [
            Result(f"{name}: lower quartile", lower, "1"),
            Result(f"{name}: upper quartile", upper, "1"),
        ]
    return rows


def seconds(name: str, times: list[float]) -> Result:
    """Return the median time."""
    return Result(f"{name}: median time", statistics.median(times), "s")
