"""The choice of rounds, passes, bands and partition for one (ε, δ): how much signal noise leaves.

Every candidate is costed by :func:`~dprlhf.privacy.plan.make_plan`, the function that a run takes
its noise from; nothing here states an ε. What is computed here is utility, in units of the clip
norm S: with s the norm of the users' mean clipped contribution, v the mean squared distance of one
contribution from that mean, and p released coordinates, a round's release is

    s (along the mean) + an error of sampling m users, of variance v/m + noise of variance p(z/m)²,

so that its expected cosine with the mean is about s / √(s² + v/m + p(z/m)²). An optimizer with
momentum averages rounds, which shrinks both errors; correlated noise (``bands``) enters with its
covariance. Over the whole run, noise over signal is κ√p/(N s) with κ = z‖1ᵀC⁻¹‖/k, which is z√T/k
for independent noise.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from dprlhf.errors import DprlhfError
from dprlhf.privacy.correlated_noise import noise_matrix
from dprlhf.privacy.gaussian import gaussian_noise_multiplier
from dprlhf.privacy.partitions import Partition, partition_named
from dprlhf.privacy.plan import Plan, make_plan
from dprlhf.privacy.relations import Adjacency

Array = NDArray[np.float64]

ROUNDS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of rounds that are compared where none are given."""

_PASSES = (1, 2, 3, 4, 6, 8)  # numbers of passes k
_BANDS = (1, 2, 4, 8, 16)  # numbers of rounds whose noise may be correlated
_FEWEST_USERS = 8  # in a round: below that a round is one accident after another
_SPARE = 0.005  # noise above the least that keeps within ε, where the least takes long to find
_TRIES = 4
_MOST_BANDED = 32  # rounds with correlated noise on random allocation: more take minutes to cost


@dataclass(frozen=True)
class Signal:
    """How users' clipped contributions agree, in units of the clip norm S."""

    norm: float  # s, the norm of the users' mean clipped contribution
    spread: float  # v, the mean squared distance of a contribution from that mean; at most 1 − s²
    dimension: int  # p, the number of released coordinates
    # Cosine between the mean clipped contribution and the mean gradient before clipping, in all
    # trained parameters: what a subspace and clipping leave
    alignment: float = 1.0
    # Norm of the mean gradient before clipping, in units of the reward; None where it is not known
    gradient: float | None = None
    trained: int | None = None  # d, the number of trained parameters that a step moves
    # Factor on the coordinates of a subspace before clipping, by which a release is divided before
    # the step; 1 without a subspace
    scale: float = 1.0
    error: float = 0.0  # Standard error of s² where users do not agree at all; 0 where s is assumed

    @property
    def known(self) -> bool:
        """Whether the contributions agree by more than chance, by two standard errors."""
        return self.norm**2 > 2 * self.error


@dataclass(frozen=True)
class Candidate:
    """Settings that may be chosen: how users are spread over rounds, and their responses."""

    partition: Partition
    rounds: int  # T, the number of rounds
    participations: int  # k, the number of rounds that a user takes part in
    bands: int  # Number of rounds whose noise is correlated; 1 for independent noise
    responses: int


@dataclass(frozen=True)
class Choice:
    """A candidate with its plan, and what that leaves of the signal."""

    candidate: Candidate
    plan: Plan  # The plan of a run with these settings, from the accountant
    signal: Signal
    cosines: Array  # Expected cosine between each round's step and the mean gradient, [rounds]
    learning_rate: float
    seconds: float | None = None  # Estimated duration; None without a measured time for a response
    reward: float | None = None  # Predicted rise of the mean reward; None without a prediction

    @property
    def kappa(self) -> float:
        """κ, the noise of the run's sum over its signal, per √p/(N s)."""
        return kappa(self.plan)

    @property
    def signal_to_noise(self) -> float:
        """Summed signal over summed noise of the whole run, N s/(κ√p)."""
        plan, signal = self.plan, self.signal
        used = plan.expected_batch_size * plan.rounds / plan.participations
        noise = self.kappa * math.sqrt(signal.dimension)
        return used * signal.norm / noise if noise else math.inf

    @property
    def responses(self) -> float:
        """Expected number of responses that the run samples from users' prompts."""
        return self.plan.expected_batch_size * self.plan.rounds * self.candidate.responses

    def overrides(self) -> list[str]:
        """Return the settings as overrides of the recipe, ``section.key=value``."""
        plan = self.plan
        return [
            f"rounds={plan.rounds}",
            f"rollout.responses={self.candidate.responses}",
            f"optimizer.learning_rate={self.learning_rate:.6g}",
            f"privacy.partition={plan.partition}",
            f"privacy.participations={plan.participations}",
            f"privacy.bands={plan.bands}",
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures, JSON-ready."""
        plan = self.plan
        return {
            "partition": plan.partition,
            "adjacency": plan.adjacency,
            "rounds": plan.rounds,
            "participations": plan.participations,
            "bands": plan.bands,
            "responses": self.candidate.responses,
            "learning_rate": self.learning_rate,
            "batch": plan.expected_batch_size,
            "epsilon": plan.terms()["epsilon"],
            "noise_multiplier": plan.noise_multiplier,
            "noise_to_clip_ratio": plan.noise_to_clip_ratio(self.signal.dimension),
            "kappa": self.kappa,
            "signal": self.signal.norm,
            "cosine": float(self.cosines.mean()),
            "signal_to_noise": self.signal_to_noise,
            "seconds": self.seconds,
            "predicted_rise": self.reward,
        }


def noise_rows(plan: Plan) -> Array:
    """Return C⁻¹, ``[rounds, rounds]``: row t holds what round t's noise takes of each draw."""
    return np.linalg.inv(noise_matrix(plan.rounds, plan.bands)).astype(np.float64)


def kappa(plan: Plan) -> float:
    """Return κ = z‖1ᵀC⁻¹‖/k, the noise of the sum over rounds; z√T/k for independent noise."""
    # Independent noise needs no inverse, which takes seconds at thousands of rounds.
    independent = plan.bands == 1
    whole = math.sqrt(plan.rounds) if independent else np.linalg.norm(noise_rows(plan).sum(0))
    return plan.noise_multiplier * float(whole) / plan.participations


def cosines(plan: Plan, signal: Signal, momentum: float = 0.0) -> Array:
    """Return the expected cosine between each round's step and the mean gradient, ``[rounds]``.

    Steps follow the momentum's average of the releases so far, Σ_j μ^j x_{t−j}, and the mean is
    taken to be the same in these rounds. The sampling error of a round is independent of that of
    others, and noise has the covariance of C⁻¹.
    """
    if signal.norm == 0:
        return np.zeros(plan.rounds)
    expected: Array = signal.alignment * signal.norm / averaged_norms(plan, signal, momentum)
    return expected


def averaged_norms(plan: Plan, signal: Signal, momentum: float = 0.0) -> Array:
    """Return the root mean square norm of each round's average of releases over S, ``[rounds]``.

    The arguments are those of :func:`cosines`.
    """
    t = np.arange(plan.rounds)
    weights: Any = np.tril(np.power(momentum, np.maximum(t[:, None] - t, 0)))
    weights = weights / weights.sum(1, keepdims=True)
    m = plan.expected_batch_size
    sampling = signal.spread / m * (weights**2).sum(1)
    noise = signal.dimension * (plan.noise_multiplier / m) ** 2
    errors = sampling + noise * ((weights @ noise_rows(plan)) ** 2).sum(1)
    norms: Array = np.sqrt(signal.norm**2 + errors)
    return norms


def candidates(
    users: int,
    *,
    most_responses: float,
    rounds: Sequence[int] = ROUNDS,
    partitions: Sequence[Partition] = ("random-allocation", "fixed"),
    responses: Sequence[int] = (2,),
) -> Iterator[Candidate]:
    """List what fits into a budget of responses, over several numbers of passes and of bands.

    Under random allocation the number of passes k divides T.
    """
    for partition in partitions:
        for count in rounds:
            for k in _PASSES:
                if k > count or (count % k and partition == "random-allocation"):
                    continue
                if k > 1 and partition_named(partition).disjoint:
                    continue
                if count > users or (len(rounds) > 1 and k * users / count < _FEWEST_USERS):
                    continue
                for r in responses:
                    if users * k * r > most_responses * (1 + 1e-9):
                        continue
                    most = count if partition_named(partition).disjoint else _MOST_BANDED
                    for b in _BANDS:
                        if b == 1 or (k == 1 and b <= count <= most):
                            yield Candidate(partition, count, k, b, r)


@functools.cache
def guessed_noise(
    candidate: Candidate, epsilon: float, delta: float, releases: int = 1, replaced: bool = False
) -> float:
    """Guess a candidate's noise multiplier, to decide which candidates are computed first.

    Where a user's rounds are secret, its contribution is a mixture over the columns c of C, whose
    χ² divergence from noise alone is the mean of exp(⟨c_i, c_j⟩/z²) − 1 over all i and j. By the
    central limit theorem its losses, in all k blocks of rounds together, are about those of one
    Gaussian mechanism of the same divergence (as for subsampling in Gaussian differential privacy,
    arXiv 1911.11607). It is an estimate, on either side of the truth, and used for nothing else.
    """
    one = gaussian_noise_multiplier(epsilon, delta) * (2 if replaced else 1)
    if partition_named(candidate.partition).disjoint:
        return one * math.sqrt(releases)
    k, columns = candidate.participations, noise_matrix(candidate.rounds, candidate.bands)
    products = releases * columns.T @ columns

    def excess(z: float) -> float:
        mean = float(np.expm1(np.minimum(products / z**2, 500.0)).mean())
        return math.log(k**2 * mean) + 2 * math.log(one)

    noise: float = brentq(excess, one / 100, 10 * max(one, 1.0) * math.sqrt(releases) * k)
    return noise


Costed = Callable[[Candidate], Plan]
Rated = Callable[[Candidate, Plan], Choice]


def is_slow(candidate: Candidate) -> bool:
    """Return whether the accountant takes seconds for a candidate, and not a tenth of one."""
    if partition_named(candidate.partition).disjoint:
        return False
    one_pass = candidate.participations in (1, candidate.rounds) and candidate.bands == 1
    return candidate.partition != "random-allocation" or not one_pass


def best_choices(
    listed: Iterable[Candidate],
    *,
    cost: Costed,
    guess: Costed,
    rate: Rated,
    rank: Callable[[Choice], float],
    slow: Callable[[Candidate], bool],
    show: int = 5,
    seconds: float = 10.0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> tuple[list[Choice], int]:
    """Return the best few candidates, the best first, each with its plan from the accountant.

    Candidates are rated at a guess first, and then costed from the best guess down until no other
    guess beats those found. A candidate that the accountant refuses is left out.
    """
    guessed = []
    for i, candidate in enumerate(listed):
        with contextlib.suppress(DprlhfError):
            guessed.append((rank(rate(candidate, guess(candidate))), i, candidate))
    guessed.sort(key=lambda g: (-g[0], g[1]))
    start, passed = time.perf_counter(), 0
    ranked: list[tuple[float, int, Choice]] = []
    for done, (hoped, i, candidate) in enumerate(guessed):
        progress(done, len(guessed))
        if len(ranked) >= show and hoped < ranked[show - 1][0]:
            break
        if slow(candidate) and time.perf_counter() - start > seconds:
            passed += 1
            continue
        with contextlib.suppress(DprlhfError):
            choice = rate(candidate, cost(candidate))
            ranked = sorted([*ranked, (rank(choice), i, choice)], key=lambda f: (-f[0], f[1]))
    progress(len(guessed), len(guessed))
    return [choice for _, _, choice in ranked[:show]], passed


def planner(
    users: int, epsilon: float, delta: float, *, adjacency: Adjacency | None, releases: int
) -> tuple[Costed, Costed]:
    """Return the functions that cost a candidate and that guess its plan, with clip norm 1."""

    def made(candidate: Candidate, **noise: float) -> Plan:
        return make_plan(
            users=users,
            rounds=candidate.rounds,
            delta=delta,
            partition=candidate.partition,
            adjacency=adjacency,
            participations=candidate.participations,
            releases_per_round=releases,
            bands=candidate.bands,
            **noise,
        )

    def guessed(candidate: Candidate) -> Plan:
        z = guessed_noise(candidate, epsilon, delta, releases, adjacency == "replace-one")
        plain = made(candidate, epsilon=math.inf)
        size = plain.expected_batch_size
        return Plan(users, plain.mechanism.with_noise(z), 1.0, size, plain.guarantee)

    def costed(candidate: Candidate) -> Plan:
        if not is_slow(candidate):
            return made(candidate, epsilon=epsilon)
        # The least noise takes some 10 evaluations of seconds each; a little more takes 2 or 3.
        z = guessed(candidate).noise_multiplier * (1 + _SPARE)
        for _ in range(_TRIES):
            plan = made(candidate, noise_multiplier=z)
            if epsilon * (1 - 5 * _SPARE) <= plan.guarantee.epsilon <= epsilon:
                return plan
            z *= (plan.guarantee.epsilon / epsilon) ** 0.9 * (1 + _SPARE)
        return made(candidate, epsilon=epsilon)

    return costed, guessed
