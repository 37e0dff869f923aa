"""Gates with a fault in their noise, for audits that have to see it."""

from collections.abc import Callable
from typing import Any

import torch

from dprlhf.boundary import BoundedSum, Released, open_released
from dprlhf.privacy.gate import Gate

Noise = Callable[[torch.Tensor, int, dict[str, torch.Tensor]], torch.Tensor]
"""Makes the noise that is released from the true one, the round, and what was kept of earlier."""


def _none(noise: torch.Tensor, t: int, kept: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.zeros_like(noise)


def _halved(noise: torch.Tensor, t: int, kept: dict[str, torch.Tensor]) -> torch.Tensor:
    return noise / 2


def _short(noise: torch.Tensor, t: int, kept: dict[str, torch.Tensor]) -> torch.Tensor:
    return 0.97 * noise


def _in_every_round(noise: torch.Tensor, t: int, kept: dict[str, torch.Tensor]) -> torch.Tensor:
    return kept.setdefault(str(len(noise)), noise.clone())


def _in_two_releases(noise: torch.Tensor, t: int, kept: dict[str, torch.Tensor]) -> torch.Tensor:
    return kept.setdefault(str(len(noise)), noise.clone()) if t <= 2 else noise


def _tail_without(noise: torch.Tensor, t: int, kept: dict[str, torch.Tensor]) -> torch.Tensor:
    cut = noise.clone()
    cut[-20:] = 0.0
    return cut


BROKEN: dict[str, Noise] = {
    "none": _none,
    "halved": _halved,
    "the same in every round": _in_every_round,
    "the same in two releases": _in_two_releases,
}
"""The faults that every audit has to see."""

SMALL: dict[str, Noise] = {"3% too small": _short, "none at the end": _tail_without}
"""Faults that an audit of d ≥ 1,000 coordinates and T ≥ 8 rounds has to see."""


def break_gate(monkeypatch: Any, fault: Noise) -> None:
    """Let every gate add noise with a fault.

    Args:
        monkeypatch: Pytest's fixture, or anything with its ``setattr``.
        fault: The fault.
    """
    real = Gate.release
    kept: dict[str, torch.Tensor] = {}

    def release(self: Gate, t: int, bounded: BoundedSum) -> Released[torch.Tensor]:
        before = bounded.total.clone()
        if t == 1:
            kept.clear()
        after = open_released(real(self, t, bounded), "a broken gate")
        noise = after * self.plan.expected_batch_size - before
        return Released((before + fault(noise, t, kept)) / self.plan.expected_batch_size, t)

    monkeypatch.setattr(Gate, "release", release)
