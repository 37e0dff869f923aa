"""Contextual bandits with a known optimum: suboptimality against users (He & Zhou, sections 5, 6).

``log-linear``: features in the unit ball of d dimensions and a realizable reward r = ⟨w*, φ(x, y)⟩
plus bounded noise (Corollaries 2, 3). ``tabular``: mean rewards over contexts and actions, learned
by DP-PG with the log-barrier (appendix B, Theorem 5). One pass in T rounds of m = N/T users in
fixed batches; T grows as √N, as in the corollaries.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf.boundary import Private, open_released
from dprlhf.errors import DprlhfError
from dprlhf.gradients.clipping import clipped_vectors
from dprlhf.privacy.accounting import Adjacency
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import Ledger
from dprlhf.privacy.plan import make_plan
from dprlhf.privacy.randomness import uint64_stream
from dprlhf.updates.oracles import project
from papers.control.policies import Array, softmax
from papers.regression import ISSP, Exponential, Oracle, SufficientStatistics, descent, fit

ADJACENCY: Adjacency = "zero-out"
DELTA = 1e-5
NOISE = 0.25
"""Rewards are the mean plus uniform noise in ± this."""

RATES = {
    "pg": (-1 / 4, "N ≥ 1/α⁴ + √d/(α³ε) (Theorem 3): α ~ N^(-1/4), private term N^(-1/3)"),
    "npg/sufficient-statistics": (None, "not in the paper"),
    "npg/issp": (-1 / 4, "N ≥ d/α⁴ + d/(α³ε) + d/(α²ε²) (Corollary 2): α ~ N^(-1/4),"
        " private N^(-1/3)"),
    "npg/improper-batch-sgd": (-1 / 6, "N ≥ 1/α⁶ + 1/(α⁵ε) (Corollary 3): α ~ N^(-1/6),"
        " private N^(-1/5)"),
    "npg/projected-sgd": (-1 / 6, "N ≥ 1/α⁶ + √d/(α⁴ε) (appendix C): α ~ N^(-1/6),"
        " private N^(-1/4)"),
    "npg/exponential": (-1 / 4, "N ≥ (1 + 1/ε) log|W| / α⁴ (Corollary 1): α ~ N^(-1/4)"),
    "rebel": (-1 / 4, "as the oracle's (Theorem 6): α ~ N^(-1/4) with a least-squares oracle"),
    "tabular-pg": (-1 / 6, "N ≥ 1/α⁶ + √d/(α^(9/2)ε) (Theorem 5): α ~ N^(-1/6), private N^(-2/9)"),
}  # fmt: skip
"""The exponent that must hold for large N (the slowest term), and He & Zhou's sample complexities,
solved for α."""

SLOW = ("pg", "tabular-pg", "npg/projected-sgd")
"""Updates whose gradient vanishes as the policy becomes deterministic: they get more rounds."""


@dataclass(frozen=True)
class Bandit:
    d: int
    arms: int
    truth: Array  # Parameter w* of the mean reward, [d]
    fresh: Array  # Features of contexts to evaluate on, [contexts, arms, d]

    @classmethod
    def make(cls, d: int, arms: int, seed: int) -> Bandit:
        """Draw w* on the sphere of radius 3/4, so that |r| ≤ 1 with the noise."""
        rng = np.random.default_rng((seed, 7))
        truth = rng.normal(size=d)
        return cls(d, arms, 0.75 * truth / np.linalg.norm(truth), _features(rng, 2000, arms, d))

    def suboptimality(self, theta: Array) -> float:
        """Return J(π*) − J(π_θ) over the fresh contexts."""
        means = self.fresh @ self.truth
        chosen = softmax(self.fresh @ theta)
        return float((means.max(-1) - (chosen * means).sum(-1)).mean())

    def users(self, rng: np.random.Generator, count: int, theta: Array) -> tuple[Array, Array]:
        """Return centred φ ``[users, 2, d]`` and r ``[users, 2]`` of two responses of π_θ each."""
        phi = _features(rng, count, self.arms, self.d)
        chance = softmax(phi @ theta)
        arms = _pair(rng, chance)
        taken = np.take_along_axis(phi, arms[..., None], 1)
        rewards = taken @ self.truth + rng.uniform(-NOISE, NOISE, (count, 2))
        scores = taken - (chance[..., None] * phi).sum(1, keepdims=True)
        return scores, rewards


def _features(rng: np.random.Generator, count: int, arms: int, d: int) -> Array:
    raw = rng.normal(size=(count, arms, d))
    return np.asarray(raw / np.linalg.norm(raw, axis=-1, keepdims=True))


def _pair(rng: np.random.Generator, chance: Array) -> NDArray[np.int64]:
    """Draw two arms for each user with these probabilities, ``[users, 2]``."""
    below = chance.cumsum(-1)[:, None] < rng.random((len(chance), 2, 1))
    return np.asarray(np.minimum(below.sum(-1), chance.shape[-1] - 1))


def rounds_of(users: int, name: str) -> int:
    """Return T = √N / 8, at least 4, and more for oracles that move less in a round."""
    # ISSP needs many users in each, and no policy near its optimum keeps its bound on leverages.
    if name == "npg/issp":
        return 4
    return max(4, round(math.sqrt(users) / (4 if name in SLOW else 8)))


def run(name: str, d: int, users: int, epsilon: float, seed: int) -> float:
    """Return the suboptimality after one pass; NaN where the oracle refuses so few users."""
    if name == "tabular-pg":
        return _tabular(users, epsilon, seed)
    bandit = Bandit.make(d, 8, seed)
    rng = np.random.default_rng((seed, users))
    rounds = rounds_of(users, name)
    m = users // rounds
    theta = np.zeros(d)
    if name == "pg":

        def gradient(now: Array) -> Array:
            scores, rewards = bandit.users(rng, m, now)
            worth = rewards[:, 0] - rewards[:, 1]
            return np.asarray((scores[:, 0] - scores[:, 1]) * worth[:, None] / 2)

        rate = 10.0 * math.sqrt(d)
        return bandit.suboptimality(_ascend(gradient, theta, rounds, m, rate, epsilon, seed))
    key = _key(seed, name, users, epsilon)
    for t in range(rounds):
        scores, rewards = bandit.users(rng, m, theta)
        worth = rewards[:, 0] - rewards[:, 1]
        # A user's own second response is the baseline of the first; REBEL (Gauss–Newton) takes it
        # off the features, too.
        phi = scores[:, 0] - scores[:, 1] if name == "rebel" else scores[:, 0]
        oracle = _oracle(name, d, m, epsilon, key, t)
        delta = 0.0 if isinstance(oracle, Exponential) else DELTA
        try:
            fitted = fit(
                oracle, phi, worth, epsilon=epsilon, delta=delta, adjacency=ADJACENCY,
                key=_key(seed, name, users, epsilon, t),
            )  # fmt: skip
        except DprlhfError:  # ISSP, with too few users for d
            return math.nan
        w = project(fitted.w, 2.0).numpy()
        theta = theta + 8.0 / math.sqrt(rounds) * w * math.sqrt(d)
    return bandit.suboptimality(theta)


def _oracle(name: str, d: int, m: int, epsilon: float, key: bytes, t: int) -> Oracle:
    bound = radius = 2.0  # a difference of two features in the unit ball, and |w|
    kind = "sufficient-statistics" if name == "rebel" else name.removeprefix("npg/")
    if kind == "sufficient-statistics":
        return SufficientStatistics(bound, 2.0, radius)
    if kind == "issp":
        return ISSP(bound, 2.0, residual_bound=2.5, leverage=4.0)
    if kind == "exponential":
        # Public candidates: directions drawn without looking at users, and 0.
        draws = uint64_stream(key, "candidates", t, count=4)
        points = np.random.default_rng(draws.tolist()).normal(size=(2000, d))
        points *= 0.75 / np.linalg.norm(points, axis=1, keepdims=True)
        return Exponential(torch.from_numpy(points), 2.0)
    return descent(
        kind, m, d, epsilon=epsilon, delta=DELTA, adjacency=ADJACENCY, feature_bound=bound,
        target_bound=2.0, radius=radius, step_size=float(d), most=200,
    )  # fmt: skip


STATES, ARMS = 4, 4


def _tabular(users: int, epsilon: float, seed: int) -> float:
    """Run DP-PG on J_λ with a tabular softmax policy, and return J* − J."""
    rng = np.random.default_rng((seed, 8))
    table = rng.uniform(-0.75, 0.75, (STATES, ARMS))
    rng = np.random.default_rng((seed, users))
    rounds = rounds_of(users, "tabular-pg")
    m = users // rounds
    barrier = 0.07 * users ** (-1 / 6)  # λ of order α (Theorem 5), or its bias stays

    def gradient(flat: Array) -> Array:
        policy = softmax(flat.reshape(STATES, ARMS))
        states = rng.integers(STATES, size=m)
        taken = _pair(rng, policy[states])
        rewards = table[states[:, None], taken] + rng.uniform(-NOISE, NOISE, (m, 2))
        worth = (rewards[:, 0] - rewards[:, 1])[:, None] / 2
        rows = np.eye(ARMS)[taken[:, 0]] - np.eye(ARMS)[taken[:, 1]]
        out = np.zeros((m, STATES, ARMS))
        out[np.arange(m), states] = worth * rows
        return out.reshape(m, -1)

    def regularize(flat: Array) -> Array:
        policy = softmax(flat.reshape(STATES, ARMS))
        return np.asarray((barrier / STATES * (1 / ARMS - policy)).ravel())

    start = np.zeros(STATES * ARMS)
    theta = _ascend(gradient, start, rounds, m, 40.0, epsilon, seed, regularize)
    policy = softmax(theta.reshape(STATES, ARMS))
    return float((table.max(-1) - (policy * table).sum(-1)).mean())


def _ascend(
    gradient: Callable[[Array], Array],  # Of each of m users at θ, clipped to 1
    theta: Array,
    rounds: int,
    m: int,
    rate: float,
    epsilon: float,
    seed: int,
    regularize: Callable[[Array], Array] = np.zeros_like,
) -> Array:
    """Ascend along the rounds' released gradients, ``rate`` times each."""
    plan = make_plan(
        users=rounds * m, rounds=rounds, delta=DELTA, epsilon=epsilon, partition="fixed",
        adjacency=ADJACENCY, clip_norm=1.0,
    )  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Ledger(Path(folder) / "ledger.jsonl", plan.terms())) as ledger,
    ):
        gate = Gate(plan, ledger, _key(seed, "pg", rounds * m, epsilon))
        for t in range(1, rounds + 1):
            rows = gradient(theta)
            clipped = clipped_vectors(
                Private([(np.arange(m), torch.from_numpy(rows))]), rows.shape[1],
                extra=Private(np.zeros((m, 0))), extra_norm=0.0, clip_norm=1.0,
                reduce=lambda total: total,
            )  # fmt: skip
            step = open_released(gate.release(t, clipped.bounded), "the bandit").numpy()
            theta = theta + rate * (step + regularize(theta))
    return theta


def _key(*context: str | float) -> bytes:
    """Return a key of a simulation: reproducible, and so no secret."""
    return uint64_stream(bytes(32), "bandit", *map(str, context), count=4).tobytes()
