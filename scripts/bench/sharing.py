"""The clipped sum with a prompt's responses behind one copy of it, beside all rows apart."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from bench import models
from bench.measure import interleaved, peak_bytes, ratio
from bench.overhead import clipped
from dprlhf.hardware import native_dtype
from dprlhf.runs.measurements import Result

ROWS = 32
SHAPES = ((2, 16, 16), (4, 64, 16), (8, 256, 32))  # responses to a prompt; tokens of both


def results(*, quick: bool, device: str, repeats: int) -> Iterator[Result]:
    """Yield time and peak memory of the rows apart, over those behind a shared prompt."""
    dtype = native_dtype(device)
    model = models.causal_lm("llama", small=quick).to(device, dtype)
    policy = models.policy(model, "llama", full=False)
    for each, prompt, response in SHAPES[:1] if quick else SHAPES:
        batch = models.responses(ROWS // each, each, prompt, response)
        weights = np.random.default_rng(1).normal(size=ROWS)
        sides = {
            side: functools.partial(clipped, policy, rows, weights, 1.0)
            for side, rows in {"shared": batch, "apart": replace(batch, num_generations=1)}.items()
        }
        times = interleaved(sides, repeats)
        shape = f"{each} responses of {response} tokens to a prompt of {prompt}, {str(dtype)[6:]}"
        name = f"rows apart over a shared prompt, {shape}"
        yield from ratio(f"{name}: time", times["apart"], times["shared"])
        peaks = {side: peak_bytes(run, resident=0) for side, run in sides.items()}
        yield Result(f"{name}: peak memory", peaks["apart"] / peaks["shared"], "1")
