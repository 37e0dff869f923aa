"""Log-probabilities of chosen tokens, a part of the rows at a time, beside ``cross_entropy``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from bench.measure import interleaved, peak_bytes, ratio, seconds
from dprlhf.policies.head_logprobs import chosen_logprobs
from dprlhf.runs.measurements import Result

ROWS, VOCABULARY = 1536, 49_152  # a round of 96 responses of 16 tokens, SmolLM2's vocabulary


def results(*, quick: bool, device: str, repeats: int) -> Iterator[Result]:
    """Yield time and peak memory of a forward and a backward pass, over those of ours."""
    rows, words = (64, 512) if quick else (ROWS, VOCABULARY)
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.randn(rows, words, device=device).to(dtype).requires_grad_()
        tokens = torch.randint(words, (rows,), device=device)
        weights = torch.randn(rows, device=device)

        def call(
            function: Callable[..., torch.Tensor], x: torch.Tensor = logits,
            y: torch.Tensor = tokens, w: torch.Tensor = weights,
        ) -> None:  # fmt: skip
            x.grad = None
            function(x, y).backward(w)

        sides = {
            "ours": lambda call=call: call(lambda x, y: chosen_logprobs(x, y, 1.0)),
            "cross_entropy": lambda call=call: call(
                lambda x, y: -F.cross_entropy(x.float(), y, reduction="none")
            ),
        }
        times = interleaved(sides, repeats)
        name = f"cross_entropy over chosen log-probabilities, {str(dtype)[6:]} logits"
        yield from ratio(f"{name}: time", times["cross_entropy"], times["ours"])
        peaks = {side: peak_bytes(run, resident=0) for side, run in sides.items()}
        yield Result(f"{name}: peak memory", peaks["cross_entropy"] / peaks["ours"], "1")
        for side, found in times.items():
            yield seconds(f"{side}, {str(dtype)[6:]} logits", found)
