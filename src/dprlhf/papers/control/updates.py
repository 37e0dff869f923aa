"""The private updates of small policies, with the shared clipping, gate and oracles.

Each takes a :class:`Round` and moves its policy along what the gate released. A user's contribution
is computed from its own trajectory and released values only, except with the baselines ``batch``
and ``critic``, whose runs state no ε.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dprlhf.boundary import Private, Read, Released, open_private, open_released, post_process
from dprlhf.gradients.clipping import clipped_vectors
from dprlhf.papers.control.policies import Array, TabularSoftmax, TrajectoryPolicy
from dprlhf.papers.control.settings import NPG, PG, PGPE, Advantage
from dprlhf.papers.control.trajectories import Trajectories
from dprlhf.policies.optimizers import ascend
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.plan import Plan
from dprlhf.updates.privls import make_oracle
from dprlhf.updates.privls.oracle import Contribution, project

NO_EXTRA = 0.0


@dataclass(repr=False, eq=False)
class Round:
    """One round as an update sees it.

    Attributes:
        number: t, from 1.
        policy: its form.
        theta: θ_t, ``[d]``, float64; :meth:`step` moves it.
        trajectories: of the round's users.
        plan: the clip norm and the divisor.
        gate: of the run.
        optimizer: of θ; it sees released values only.
        memory: released values that later rounds use, by name.
        directions: of ``pgpe``, ``[K, d]``; public.
        leak: what a non-private critic remembers; empty in private runs.
    """

    number: int
    policy: TrajectoryPolicy
    theta: torch.Tensor
    trajectories: Private[list[Trajectories]]
    plan: Plan
    gate: Gate
    optimizer: torch.optim.Optimizer
    memory: dict[str, float]
    directions: Array | None = None
    leak: dict[str, Array] = field(default_factory=dict)

    @property
    def parameters(self) -> Array:
        """θ as an array, ``[d]``."""
        return self.theta.detach().numpy()

    def release(
        self, rows: Private[Array], extra: Private[Array], share: float
    ) -> Released[torch.Tensor]:
        """Release the mean of the clipped rows and, beside them, of the extra coordinates.

        Args:
            rows: a vector of each user, ``[users, p]``.
            extra: further coordinates of each, of norm at most share · S, ``[users, e]``.
            share: of the clip norm that the extra coordinates may have.

        Returns:
            The noised mean, ``[p + e]``.
        """
        vectors = open_private(rows)
        clipped = clipped_vectors(
            Private([(np.arange(len(vectors)), torch.from_numpy(vectors))]),
            vectors.shape[1],
            extra=extra,
            extra_norm=share * self.plan.clip_norm,
            clip_norm=self.plan.clip_norm,
            reduce=lambda total: total,
        )
        return self.gate.release(self.number, clipped.bounded)

    def of_users(self, function: Callable[[Trajectories], Array], width: int) -> Private[Array]:
        """Return a function of each trajectory, ``[users, width]``."""
        chunks = open_private(self.trajectories)
        parts = [function(chunk)[: chunk.users, :width] for chunk in chunks]
        return Private(np.concatenate([np.zeros((0, width)), *parts]))

    def mean_of_users(
        self, function: Callable[[Trajectories], Array], width: int
    ) -> Released[torch.Tensor]:
        """Release the clipped, noised mean of a function of each trajectory, ``[width]``."""
        rows = self.of_users(function, width)
        none = Private(np.zeros((len(open_private(rows)), 0)))
        return self.release(rows, none, NO_EXTRA)

    def step(self, direction: Released[torch.Tensor]) -> None:
        """Let the optimizer ascend along a released direction, ``[d]``."""
        ascend([self.theta], self.optimizer, direction)


def pg(round_: Round, spec: PG) -> None:
    """DP-PG (He & Zhou, Algorithm 2): one released gradient."""
    policy, theta = round_.policy, round_.parameters
    advantage = advantages(round_, spec.advantage)

    def gradient(chunk: Trajectories) -> Array:
        weights = advantage(chunk)
        return policy.weighted_scores(theta, chunk.observations, chunk.actions, weights)

    direction = round_.mean_of_users(gradient, policy.dimension)
    if spec.log_barrier and isinstance(policy, TabularSoftmax):
        barrier = torch.from_numpy(policy.log_barrier_gradient(theta, spec.log_barrier))
        direction = direction.map(lambda gradient: gradient + barrier)
    round_.step(direction)


@dataclass(repr=False, eq=False)
class _Release:
    """A :class:`~dprlhf.updates.privls.oracle.Release` over the steps of a round's users."""

    round_: Round
    advantage: Callable[[Trajectories], Array]
    gain: float
    read: Read

    @property
    def noise_multiplier(self) -> float:
        """z over the gain: of an answer, in units of the bound."""
        return self.round_.plan.noise_multiplier / self.gain

    @property
    def expected_batch_size(self) -> float:
        """m."""
        return self.round_.plan.expected_batch_size

    def __call__(self, contribution: Contribution, bound: float) -> torch.Tensor:
        """Return (Σ_u clip(gain · mean over u's steps, bound) + noise) / (m · gain)."""
        round_, policy = self.round_, self.round_.policy
        scale = self.gain * round_.plan.clip_norm / bound
        width = contribution(torch.zeros(0, policy.dimension), torch.zeros(0)).shape[1]

        def mean(chunk: Trajectories) -> Array:
            features = policy.scores(round_.parameters, chunk.observations, chunk.actions)
            targets = torch.from_numpy(self.advantage(chunk).ravel())
            flat = torch.from_numpy(features.reshape(-1, policy.dimension))
            parts = contribution(flat, targets).numpy().reshape(*features.shape[:2], width)
            counted = np.where(chunk.mask[..., None], parts, 0.0).sum(1)
            return np.asarray(scale * counted / np.maximum(chunk.steps, 1)[:, None])

        return self.read(round_.mean_of_users(mean, width)) / scale


def npg(round_: Round, spec: NPG) -> None:
    """DP-NPG (He & Zhou, Algorithm 3): regress advantages on scores, and step along w."""
    oracle = make_oracle(
        spec.oracle,
        feature_bound=spec.clip_norm,
        target_bound=spec.target_bound,
        radius=spec.radius,
        steps=spec.steps,
        step_size=spec.step_size,
        ridge=spec.ridge,
        damping=spec.damping,
    )
    advantage = advantages(round_, spec.advantage)

    def solution(read: Read) -> torch.Tensor:
        release = _Release(round_, advantage, spec.gain, read)
        return project(oracle.solve(release, round_.policy.dimension), spec.radius)

    round_.step(post_process(solution))


def pgpe(round_: Round, spec: PGPE) -> None:
    """Move along the directions in proportion to the noised mean of ± (return − b)."""
    directions = round_.directions
    assert directions is not None
    baseline = round_.memory.setdefault("return", spec.center)

    def worth(chunk: Trajectories) -> Array:
        scaled = np.clip((chunk.returns - baseline) / spec.spread, -1.0, 1.0)
        return np.where(chunk.steps > 0, scaled, 0.0)[:, None]

    share, count = spec.share, len(directions)
    rows = round_.of_users(lambda chunk: worth(chunk) * chunk.choice, count)
    size = share * round_.plan.clip_norm
    extra = round_.of_users(lambda chunk: size * worth(chunk), 1 if share else 0)
    moves, of_return = round_.release(rows, extra, share).split([count, 1 if share else 0])
    if share:
        seen = baseline + spec.spread * float(open_released(of_return, "pgpe")) / size
        round_.memory["return"] = spec.momentum * baseline + (1 - spec.momentum) * seen
    round_.step(moves.map(lambda mean: torch.from_numpy(directions).T @ mean / spec.perturb))


UPDATES: dict[str, Callable[[Round, Any], None]] = {
    "pg": pg,
    "npg": npg,
    "pgpe": pgpe,
}
"""By the name in a recipe."""


def advantages(round_: Round, spec: Advantage) -> Callable[[Trajectories], Array]:
    """Return the function of a chunk to its advantages, ``[chunk, horizon]``."""

    def returns(chunk: Trajectories) -> Array:
        return discounted(chunk, spec.discount, spec.reference)

    if spec.baseline == "public":
        return returns
    if spec.baseline == "own":

        def own(chunk: Trajectories) -> Array:
            value = returns(chunk)
            mean = value.sum(1, keepdims=True) / np.maximum(chunk.steps, 1)[:, None]
            return np.where(chunk.mask, value - mean, 0.0)

        return own
    chunks = open_private(round_.trajectories)
    if spec.baseline == "batch":  # not private: one user's return moves all others' advantages
        steps = [returns(chunk)[chunk.mask] for chunk in chunks]
        taken = np.concatenate(steps) if steps else np.zeros(0)
        middle, width = (taken.mean(), taken.std() + 1e-8) if len(taken) else (0.0, 1.0)
        return lambda chunk: np.where(chunk.mask, (returns(chunk) - middle) / width, 0.0)
    # Not private: the critic was fitted, without noise, on the users of earlier rounds.
    size = chunks[0].observations.shape[2] if chunks else 1
    weights = round_.leak.get("critic", np.zeros(2 * size + 1))
    gram = round_.leak.setdefault("gram", np.eye(2 * size + 1))
    moment = round_.leak.setdefault("moment", np.zeros(2 * size + 1))
    for chunk in chunks:
        inputs = _critic_inputs(chunk.observations)[chunk.mask]
        gram += inputs.T @ inputs
        moment += inputs.T @ returns(chunk)[chunk.mask]
    round_.leak["critic"] = np.asarray(np.linalg.solve(gram, moment), dtype=np.float64)

    def beyond(chunk: Trajectories) -> Array:
        value = _critic_inputs(chunk.observations) @ weights
        return np.where(chunk.mask, returns(chunk) - value, 0.0)

    return beyond


def _critic_inputs(observations: Array) -> Array:
    ones = np.ones((*observations.shape[:-1], 1))
    return np.concatenate([observations, observations**2, ones], -1)


def discounted(chunk: Trajectories, discount: float, reference: float) -> Array:
    """Return Σ_k γ^{k−t}(r_k − ρ) and the end's −γ^{L−t} ρ/(1−γ), ``[chunk, horizon]``."""
    value = np.where(chunk.terminated, -reference / (1 - discount), 0.0)
    out = np.zeros_like(chunk.rewards)
    mask = chunk.mask
    for t in reversed(range(chunk.rewards.shape[1])):
        here = mask[:, t]
        value = np.where(here, chunk.rewards[:, t] - reference + discount * value, value)
        out[:, t] = np.where(here, value, 0.0)
    return out
