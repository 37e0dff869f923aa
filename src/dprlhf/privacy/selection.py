"""What it costs to release the best of a random number of private runs: private selection.

Choosing settings by runs on the same users costs the sum of the runs, if their results are looked
at. It costs far less if only the best run is released and the number of runs is random and secret
(Liu & Talwar, arXiv 1811.07971; Papernot & Steinke, arXiv 2110.03620). Here the number K has a
truncated negative binomial distribution, and the cost follows from the curve δ(ε) of one run, as in
Koskela, Redberg & Wang (arXiv 2402.06701); docs/proofs/selection.md has the proof.

What must hold, and what no code can check:

- Each of the K runs draws its settings at random from a list, with fixed probabilities that do not
  depend on the users, and the mechanism of every setting in the list is given. The costliest of
  them at δ is not enough: its curve may lie below another's at the ε and δ that decide.
- The score that selects is a function of what the run itself releases, such as its noised rewards
  or its reward on public prompts. With a score from users' data that was not released, ε is wrong.
- Nothing but the selected run leaves the machine: no other run's folder, not K, and nothing that
  shows K, such as how long all runs took. Otherwise the runs add up (``privacy.tuning_runs``).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.optimize import brentq

from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Mechanism, delta_of, epsilon

_UP = 1 + 1e-9
"""Covers the rounding of this module's own floating-point formulas."""

_MOST = 1e6
_ZERO = 1e-300  # below it, η → 0 is taken, where the formulas would be 0/0


@dataclass(frozen=True)
class Repetitions:
    """The truncated negative binomial distribution of the number of runs, K ≥ 1.

    Attributes:
        eta: η > −1. 1 is the geometric distribution, 0 the logarithmic one; smaller ones cost less
            at the same mean, and are less concentrated: a single run is likelier.
        gamma: γ in (0, 1]; the smaller, the more runs. 1 is always one run.

    Raises:
        DprlhfError: A parameter is out of range.
    """

    eta: float
    gamma: float

    def __post_init__(self) -> None:
        if not -1 < self.eta < math.inf or not 0 < self.gamma <= 1:
            raise DprlhfError(
                f"repetitions: eta must be above -1 and gamma in (0, 1], not {self.eta} and"
                f" {self.gamma}"
            )

    @property
    def mean(self) -> float:
        """Return E[K], the expected number of runs."""
        if self.gamma == 1:
            return 1.0
        log = math.log(self.gamma)
        odds = math.expm1(-log)  # (1 − γ)/γ, without cancellation near γ = 1
        if abs(self.eta) < _ZERO:
            return odds / -log
        return self.eta * odds / -math.expm1(self.eta * log)

    @staticmethod
    def with_mean(mean: float, eta: float = 1.0) -> Repetitions:
        """Return the distribution with this mean.

        Raises:
            DprlhfError: The mean is not between 1 and 1e6, or η not above −1.
        """
        if not 1 <= mean <= _MOST:
            raise DprlhfError(f"repetitions: the mean must be from 1 to {_MOST:g}, not {mean}")
        if mean < 1 + 1e-9:
            return Repetitions(eta, 1.0)
        lowest = Repetitions(eta, 1e-250)
        if lowest.mean < mean:
            raise DprlhfError(f"repetitions: eta {eta} is too close to -1 for a mean of {mean}")
        try:
            log = brentq(
                lambda x: math.log(Repetitions(eta, math.exp(x)).mean / mean),
                math.log(lowest.gamma), -1e-12, xtol=1e-14,
            )  # fmt: skip
        except (ValueError, OverflowError):
            raise DprlhfError(
                f"repetitions: eta {eta:g} is too large for a mean of {mean}"
            ) from None
        return Repetitions(eta, math.exp(log))

    def probability(self, runs: int) -> float:
        """Return P[K = runs]."""
        if runs < 1 or self.gamma == 1:
            return float(runs == 1)
        left = math.log1p(-self.gamma)
        if abs(self.eta) < _ZERO:
            return math.exp(runs * left) / (runs * -math.log(self.gamma))
        log = -self.eta * math.log(self.gamma)
        first = math.log(abs(self.eta)) + left
        # log(γ^−η − 1), without cancellation near η = 0
        first -= log + math.log(-math.expm1(-log)) if log > 0 else math.log(-math.expm1(log))
        rest = math.lgamma(runs + self.eta) - math.lgamma(1 + self.eta) - math.lgamma(runs + 1)
        return math.exp(first + (runs - 1) * left + rest)

    def draw(self) -> int:
        """Draw K from the operating system's random numbers; it must stay secret."""
        left, runs = secrets.SystemRandom().random(), 1
        while (left := left - self.probability(runs)) > 0 and runs < 100 * _MOST:
            runs += 1
        return runs


@dataclass(frozen=True)
class SelectionCost:
    """The cost of the best of a random number of runs.

    Attributes:
        epsilon: ε of the selected run's release, an upper bound.
        delta: The δ at which it holds.
        one_run: ε of one run alone at the same δ.
        repetitions: The distribution of the number of runs.
    """

    epsilon: float
    delta: float
    one_run: float
    repetitions: Repetitions


def selection_cost(
    mechanisms: Sequence[Mechanism], repetitions: Repetitions, delta: float
) -> SelectionCost:
    """Return the cost of releasing the best of K runs, K drawn from ``repetitions``.

    With the curve δ(·) of one run, the selection is (ε₁ + (1 + η) ε₂, δ)-DP for any ε₁ with
    E[K] δ(ε₁) ≤ δ and any ε₂ with (1 − γ) δ(ε₂) ≤ γ (e^{ε₂} − 1) (docs/proofs/selection.md, after
    Koskela et al., arXiv 2402.06701). The smallest of both are taken, from upper bounds on δ(·).

    Args:
        mechanisms: One run under each of the settings that it may draw; δ(·) is the largest of
            their curves at each ε.
        repetitions: The distribution of the number of runs.
        delta: δ of the selection.

    Raises:
        DprlhfError: δ is out of range, or a mechanism has no noise, or there is none, or they
            protect against different neighbours.
    """
    if len({mechanism.adjacency for mechanism in mechanisms}) != 1:
        raise DprlhfError("a selection needs one run or more, all with the same privacy.adjacency")
    one = max(epsilon(mechanism, delta).epsilon for mechanism in mechanisms)
    share = delta / (repetitions.mean * _UP)
    first = max(epsilon(mechanism, share).epsilon for mechanism in mechanisms)
    second = max(_ratio_epsilon(mechanism, repetitions.gamma) for mechanism in mechanisms)
    total = (first + (1 + repetitions.eta) * second) * _UP
    return SelectionCost(total, delta, one, repetitions)


def _ratio_epsilon(mechanism: Mechanism, gamma: float) -> float:
    """Return nearly the smallest ε₂ with (1 − γ) δ(ε₂) ≤ γ (e^{ε₂} − 1)."""

    def holds(e: float) -> bool:
        return _UP * (1 - gamma) * delta_of(mechanism, e) <= gamma * math.expm1(min(e, 700.0))

    if holds(0.0):
        return 0.0
    low, high = 0.0, 1e-3
    while not holds(high):
        low, high = high, 2 * high
    while high - low > 1e-5 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
