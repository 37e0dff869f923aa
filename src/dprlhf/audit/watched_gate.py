"""The gate of an audited run, with a record of every sum before it and every value after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf.audit.prompt_readings import PromptReadings
from dprlhf.boundary import BoundedSum, Released, open_released
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.plan import Plan
from dprlhf.updates.telemetry import TelemetryCoordinates

Array = NDArray[np.float64]

_KEPT = 2**16


@dataclass(frozen=True, repr=False)
class Seen:
    """One release of an audited run."""

    given: Array  # [users]
    released: Array  # The same after the gate, [users]
    noise: Array  # [coordinates]
    telemetry: float = 0.0


class WatchedGate:
    """Passes sums on to the gate of a run whose users are all canaries, and keeps what it sees."""

    def __init__(
        self,
        gate: Gate,
        plan: Plan,
        own: int,
        telemetry: TelemetryCoordinates | None = None,
        users: Sequence[int] = (),
    ) -> None:
        self.ledger = gate.ledger
        self.rounds: dict[int, list[Seen]] = {}
        self.moved = False
        self._gate, self._plan = gate, plan
        self._own, self._count = own, telemetry.count if telemetry else 0
        self._users, self._bound = users, telemetry.norm if telemetry else 0.0
        self.prompts: PromptReadings | None = None

    def release(self, t: int, bounded: BoundedSum) -> Released[torch.Tensor]:
        """Release a sum as the gate does, and keep it and its noise."""
        before = bounded.total.numpy().copy()  # the gate adds the noise in place
        released = self._gate.release(t, bounded)
        after = open_released(released, "the audit").numpy() * self._plan.expected_batch_size
        end = len(before) - (0 if t in self.rounds else self._count)
        place = slice(max(0, end - self._own), end)
        self.moved |= bool(before[place if self._own else slice(end)].any())
        scale = self._plan.clip_norm
        brought = float(np.linalg.norm(before[end:]))
        if brought:
            brought /= max(1, self._users[t - 1]) * self._bound
        noise = _kept(after - before)
        if self.prompts is not None and t not in self.rounds:
            self.prompts.read(t, before[:end] / scale, after[:end] / scale)
        seen = Seen(before[place] / scale, after[place] / scale, noise, brought)
        self.rounds.setdefault(t, []).append(seen)
        return released


def values_tested(length: int) -> int:
    """Return how many values of a release of this length have their noise kept, and tested."""
    return min(length, _KEPT)


def _kept(noise: Array) -> Array:
    half = _KEPT // 2
    return noise if len(noise) <= _KEPT else np.concatenate([noise[:half], noise[-half:]])
