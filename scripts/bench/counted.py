"""The products of a clipped sum by ours and by Opacus' ghost clipping, counted and not timed.

Counted are the multiplications and additions of matrix products and attention, as torch dispatches
them (``torch.utils.flop_counter``), in units of one forward pass over the same rows; as all of them
are made row by row, a few rows have the passes of many. The ratio of
both counts is what the ratio of times would be if every operation took the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.against_opacus import CASES, case
from bench.measure import Tick
from bench.overhead import NAMES
from dprlhf.runs.measurements import Result


def results(
    *, quick: bool, device: str, repeats: int, tick: Tick = lambda: None
) -> Iterator[Result]:
    """Yield the counts of both and their ratio, for each model; ``repeats`` has no effect."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the counter sees the operations of its own thread only
    for kind, part in CASES:
        sides, _, losses = case(kind, part, quick, device, rows=4)
        with torch.no_grad():
            forward = counted(losses)
        tick()
        passes = {}
        for name in ("ours", "ghost clipping"):
            passes[name] = counted(sides[name]) / forward
            tick()
        title = f"{NAMES[kind]}, {part}"
        yield Result(f"products of our clipped sum, {title}", passes["ours"], "forward passes")
        yield Result(
            f"products of Opacus ghost clipping, {title}",
            passes["ghost clipping"],
            "forward passes",
        )
        yield Result(
            f"products of Opacus ghost clipping over ours, {title}: counted",
            passes["ghost clipping"] / passes["ours"],
            "1",
        )
    torch.set_num_threads(threads)


def counted(call: Callable[[], object]) -> int:
    """Return the floating-point operations of all products in ``call``."""
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())
