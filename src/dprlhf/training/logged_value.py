"""The value of the tuned policy from the users' logs, released in the place of last gradients.

A user's vector is (p, q, p₀, q₀): the means over its rows of w a, w (1 − a), a and 1 − a, where a
in [0, 1] is the row's feedback and w = min(π(y|x)/μ(y|x), c) the truncated ratio of the whole
completion. Since p + q ≤ c and p₀ + q₀ = 1, its norm is at most √(c² + 1): it is scaled by that to
the clip norm, clipped, summed and released as a gradient is. ``docs/proofs/logged_value.md`` has
what follows for privacy, and why the interval counts what truncation leaves out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]

MOST = 4.0
"""Bound c on a row's importance ratio. A larger one truncates less and needs more noise."""

_BOUND = math.sqrt(MOST**2 + 1)
_Z = 1.959963984540054
"""The 97.5% quantile of the normal distribution: each end of an interval fails in 2.5%."""


@dataclass(frozen=True)
class Value:
    """The mean feedback that a policy would get, estimated from the logs."""

    mean: float | None  # The self-normalised estimate Σ w r / Σ w; None where the noise hides Σ w
    low: float  # Lower end of the 95% interval
    high: float  # Upper end of it
    # Noised mean ratio, at most about 1: the part of the policy's completions of which the logs
    # tell something, and which the mean is about
    weight: float

    def __str__(self) -> str:
        mean = "hidden by the noise" if self.mean is None else f"{self.mean:+.3f}"
        return f"{mean} (95% interval {self.low:+.3f} to {self.high:+.3f})"


def of_users(
    user: NDArray[np.int64],  # of each row, [rows]
    users: int,
    log_ratios: Array,  # log π − log μ of each row's completion, [rows]
    shares: Array,  # the feedback a of each row, in [0, 1], [rows]
    scale: float,  # the clip norm S
) -> torch.Tensor:
    """Return each user's vector, of norm at most ``scale``, ``[users, 4]``; 0 without a row."""
    ratios = np.exp(np.minimum(log_ratios, math.log(MOST)))
    ratios[np.isnan(log_ratios)] = np.nan  # its user contributes nothing
    parts = np.stack([ratios * shares, ratios * (1 - shares), shares, 1 - shares], axis=1)
    rows = np.maximum(np.bincount(user, minlength=users), 1)
    means = [np.bincount(user, part, minlength=users) / rows for part in parts.T]
    return torch.from_numpy(np.stack(means, axis=1) * (scale / _BOUND))


class LoggedValue:
    """The released vectors so far, which a checkpoint keeps."""

    def __init__(self) -> None:
        self.rounds = 0
        self._sum = np.zeros(4)
        self._variance = 0.0

    def state(self) -> dict[str, torch.Tensor]:
        """Return the sums, all of them released or public."""
        return {"sums": torch.tensor([*self._sum, self._variance, self.rounds])}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what :meth:`state` returned."""
        *sums, self._variance, rounds = state["sums"].tolist()
        self._sum, self.rounds = np.array(sums), int(rounds)

    def add(self, released: list[float], noise_std: float, scale: float) -> None:
        """Count a round's RELEASED mean vector."""
        self.rounds += 1
        self._sum += np.array(released) * (_BOUND / scale)
        self._variance += (noise_std * _BOUND / scale) ** 2

    def estimates(self, users_a_round: float, middle: float, bound: float) -> dict[str, Value]:
        """Return the value of the ``tuned`` policy, and of the ``logged`` one."""
        p, q, p0, q0 = (self._sum / self.rounds).tolist()
        std, users = math.sqrt(self._variance) / self.rounds, users_a_round * self.rounds
        both = {"tuned": (p, q, MOST), "logged": (p0, q0, 1.0)}
        return {n: _estimate(*of_one, std, users, middle, bound) for n, of_one in both.items()}


def _estimate(
    p: float, q: float, most: float, std: float, users: float, middle: float, bound: float
) -> Value:
    """Return the estimate from the noised means p of w a and q of w (1 − a), w in [0, most]."""

    def feedback(share: float) -> float:
        return middle + bound * (2 * min(max(share, 0.0), 1.0) - 1)

    mean = feedback(p / (p + q)) if p + q > max(3 * math.sqrt(2) * std, 1e-9) else None
    ends = least(p, most, std, users), 1 - least(q, most, std, users)
    low, high = (feedback(end) for end in ends)
    return Value(mean, low, high, p + q)


def least(noised: float, most: float, std: float, users: float) -> float:
    """Return the lower 97.5% confidence bound of a mean of values in [0, ``most``].

    The variance of such a value is at most ``most`` times its mean x. So the bound is the smaller
    root x of (noised − x)² = z² (std² + most · x / users), noise and sampling together.
    """
    half = _Z**2 * most / users / 2
    root = math.sqrt(max(half**2 + 2 * half * noised + (_Z * std) ** 2, 0.0))
    return min(max(noised + half - root, 0.0), 1.0)
