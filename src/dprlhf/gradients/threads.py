"""Small products side by side: each in one thread, in place of each in all of torch's threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Found = TypeVar("Found")


def side_by_side(work: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
    """Return what ``work`` finds for each item, in their order, on as many threads as torch has."""
    # Products of a few dozen tokens are too small to be shared among torch's threads.
    threads = min(torch.get_num_threads(), len(items))
    if threads <= 1:
        return [work(item) for item in items]
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=_alone) as pool:
            return list(pool.map(work, items))
    finally:  # torch keeps the number for each thread, and once more for threads to come
        torch.set_num_threads(before)


def _alone() -> None:
    torch.get_num_threads()  # a thread's own number is set at its first use, to that of the process
    torch.set_num_threads(1)
