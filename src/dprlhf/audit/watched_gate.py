"""The gate of an audited run, with a record of every sum before it and every value after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf.audit.guesses import noise_of
from dprlhf.boundary import BoundedSum, Released, open_released
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.plan import Plan
from dprlhf.updates.telemetry import TelemetryCoordinates

MOST_VALUES = 2**27  # a gigabyte of one round's contributions
_LEAST_NOISE = 1e-3
_LEAST_SIZE = 0.05  # one that moves less is guessed as if it moved so much


class PromptReadings:
    """Readings of a run's canaries in the recipe's own model, one for each canary and round.

    A canary's contribution to its round is known beforehand, up to whether it was made: the audit
    computes what every canary of the round would contribute (one that took part, and one that did
    not), v_1 ... v_n in units of S. Gram and Schmidt give orthonormal directions q_i with v_i in
    the span of q_1 ... q_i, so canary i moves its reading <release, q_i> by c_i = <v_i, q_i>, at
    most 1, and no later one by anything. The canaries are guessed from the last to the first, and
    how far those that were guessed before move a reading is subtracted.

    Why the guesses bound the noise, however similar canaries are. Given the releases before, the
    directions and c_i are fixed, and the noise of the readings is independent. So whatever came
    before, canary i is recognised with probability at most p_i, that of the plan's best guess at
    c_i times the contribution, and Π_i exp(λ_i right_i) / (1 + p_i (exp λ_i − 1)) is a
    supermartingale that starts at 1 for all λ_i that follow from c_i: it exceeds 1/α with
    probability at most α (Ville's inequality). Noise for which it does is refuted
    (:func:`dprlhf.audit.guesses.readings_refute`).

    Agrawal et al. 2026 (arXiv 2606.12733) read canaries along their own directions, too, and fit
    two Gaussians to the scores, which holds asymptotically; this test holds for finite samples.
    Canaries are random texts, as in Mitchell et al. 2026 (arXiv 2606.10481): their gradients
    overlap least.

    Args:
        signs: 1 for a canary that is in, NaN for one that is absent, −1 for its opposite.
        plan: The run's plan.
        random: Source of the readings of rounds that a canary has no part in. They hold noise alone
            in whatever direction they are read, so they are drawn, with the noise of the round.

    Attributes:
        noise: The noise of each round's readings, in units of S, ``[rounds]``: as it is across the
            canaries' directions, which tells nothing of them; as planned until a round is read, or
            where they fill the space.
        readings: ``[canaries, rounds]``.
        sizes: How far each canary moves its own reading, c, ``[canaries]``.
        faults: What no chance explains, in words.
    """

    def __init__(self, signs: Array, plan: Plan, random: np.random.Generator) -> None:
        planned = noise_of(plan) * math.sqrt(plan.releases_per_round)  # of a single release
        self.noise = np.full(plan.rounds, planned)
        self.readings = random.standard_normal((len(signs), plan.rounds))
        self.sizes = np.full(len(signs), _LEAST_SIZE)
        self.faults: list[str] = []
        self._signs = signs
        self._round: tuple[NDArray[np.int64], Array, Array] | None = None

    def expect(self, members: NDArray[np.int64], if_in: Array, if_out: Array) -> None:
        """State what the canaries of the next release would contribute, in and out.

        Args:
            members: Their numbers, ``[n]``.
            if_in: Clipped contributions in units of S, ``[n, dimension]``.
            if_out: The same without them: zeros, or those of the opposites in their place.
        """
        self._round = members, if_in, if_out

    def read(self, t: int, before: Array, after: Array) -> None:
        """Read the canaries of round t from its first release.

        Args:
            t: The round.
            before: The sum before the noise, in units of S, ``[dimension]``.
            after: The same with noise.
        """
        if self._round is None:
            return
        (members, if_in, if_out), self._round = self._round, None
        included = self._signs[members] > 0
        expected = np.where(included[:, None], if_in, if_out).sum(0)
        if np.abs(before - expected).max(initial=0.0) > 1e-3 * max(1.0, len(members) ** 0.5):
            self.faults.append(f"round {t} summed something other than its users' contributions")
        opposed = bool(if_out.any())
        offset, moves = ((if_in + if_out) / 2, (if_in - if_out) / 2) if opposed else (0.0, if_in)
        coins = np.where(included, 1.0, -1.0 if opposed else 0.0)
        directions, sizes = np.linalg.qr(moves.T)  # [dimension, n'], [n', n], n' = min of both
        rest = after - np.sum(offset, axis=0)
        seen = directions.T @ rest
        own = np.diag(sizes)
        later = np.triu(sizes, 1) @ coins
        spare = len(rest) - len(own)
        if spare:
            across = np.linalg.norm(rest - directions @ seen) / math.sqrt(spare)
            self.noise[t - 1] = max(across, _LEAST_NOISE)
        self.readings[:, t - 1] *= self.noise[t - 1]
        read = members[: len(own)]  # one beyond the dimension has no direction of its own
        self.readings[read, t - 1] = np.where(own < 0, -1.0, 1.0) * (seen - later)
        self.sizes[read] = np.maximum(np.abs(own), _LEAST_SIZE)


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
