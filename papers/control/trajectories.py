"""Simulated users: each is a trajectory of the current policy, with random numbers of its own.

Below, trajectories are the rows of the language models' ``updates/pg.py`` (a row is a trajectory)
and ``npg.py`` (a row is a step).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from papers.control.environments import Environment
from papers.control.gym import Gymnasium
from papers.control.policies import Array, ScoredPolicy, TrajectoryPolicy

CHUNK = 64
"""Trajectories simulated together."""


@dataclass(frozen=True, repr=False)
class Trajectories:
    """A chunk of trajectories of fixed shape: ``users`` rows of users, then fillers."""

    users: int  # Number of rows that are users
    observations: Array  # What the policy saw, [chunk, horizon, size]
    actions: Array  # What it did, [chunk, horizon] or [chunk, horizon, actions]
    rewards: Array  # Rewards clipped to [−R, R], 0 where there is no step, [chunk, horizon]
    steps: NDArray[np.int64]  # [chunk]
    terminated: NDArray[np.bool_]  # [chunk]
    choice: Array  # [chunk, directions]

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Whether each step was taken, ``[chunk, horizon]``."""
        return np.arange(self.rewards.shape[1]) < self.steps[:, None]

    @property
    def returns(self) -> Array:
        """The sum of rewards of each trajectory, ``[chunk]``."""
        return np.asarray(self.rewards.sum(1))


def simulate(
    environment: Environment, policy: TrajectoryPolicy, theta: Array,
    seeds: Sequence[tuple[int, ...]], directions: Array | None = None,
) -> list[Trajectories]:  # fmt: skip
    """Return trajectories with these seeds, in chunks."""
    return [
        _chunk(environment, policy, theta, seeds[start : start + CHUNK], directions)
        for start in range(0, len(seeds), CHUNK)
    ]


def evaluate(
    environment: Environment, policy: TrajectoryPolicy, theta: Array, seed: tuple[int, ...],
    episodes: int,
) -> Array:  # fmt: skip
    """Return the returns of fresh trajectories, ``[episodes]``; they are no user's, so public."""
    chunks = simulate(environment, policy, theta, [(*seed, i) for i in range(episodes)])
    return np.concatenate([chunk.returns[: chunk.users] for chunk in chunks])


def _chunk(
    env: Environment, policy: TrajectoryPolicy, theta: Array, seeds: Sequence[tuple[int, ...]],
    directions: Array | None,
) -> Trajectories:  # fmt: skip
    users, horizon = len(seeds), env.horizon
    generators = [np.random.default_rng(seed) for seed in seeds]
    width = env.reset_draws + horizon * (policy.draws + env.step_draws)
    uniforms = np.full((CHUNK, width), 0.5)
    for row, generator in enumerate(generators):
        # 2⁻⁵⁴ more: never 0, where the normal quantile is infinite.
        uniforms[row] = generator.random(width) + 2.0**-54
    own = theta
    choice = np.zeros((CHUNK, 0 if directions is None else len(directions)))
    if directions is not None:
        for row, generator in enumerate(generators):
            choice[row, generator.integers(len(directions))] = generator.choice((-1.0, 1.0))
        own = theta + choice @ directions
    seen = np.zeros((CHUNK, horizon, env.size))
    acted = np.zeros((CHUNK, horizon, env.actions) if env.continuous else (CHUNK, horizon))
    rewards = np.zeros((CHUNK, horizon))
    steps, terminated = np.zeros(CHUNK, dtype=np.int64), np.zeros(CHUNK, dtype=bool)
    # Instances of their own need no fillers; the policy's inputs are filled up all the same.
    rows = users if isinstance(env, Gymnasium) else CHUNK
    state: Any = env.reset(uniforms[:rows, : env.reset_draws])
    draws = uniforms[:, env.reset_draws :].reshape(CHUNK, horizon, -1)
    alive = np.arange(CHUNK) < users
    for t in range(horizon):
        seen[:rows, t] = env.observe(state)
        acted[:, t] = policy.act(own, seen[:, t], draws[:, t, : policy.draws])
        state, reward, ended = env.step(state, acted[:rows, t], draws[:rows, t, policy.draws :])
        rewards[:rows, t] = np.where(alive[:rows], reward, 0.0)
        steps += alive
        terminated[:rows] |= alive[:rows] & ended
        alive &= ~terminated
        if isinstance(env, Gymnasium):
            alive[:rows] &= ~env.over(state)
        if not alive.any():
            break
    if isinstance(env, Gymnasium):
        env.release(state)
    # Clip rewards to ±R, and empty the trajectories whose environment failed.
    finite = np.isfinite(rewards.sum(1) + seen.sum((1, 2)))  # inf − inf is not finite either
    keep = (np.arange(horizon) < steps[:, None]) & finite[:, None]
    bound = env.reward_range
    return Trajectories(
        users=users,
        observations=np.where(keep[..., None], seen, 0.0),
        actions=np.where(keep[..., None] if env.continuous else keep, acted, 0.0),
        rewards=np.clip(np.where(keep, rewards, 0.0), -bound, bound),
        steps=np.where(finite, steps, 0),
        terminated=terminated & finite,
        choice=np.where(finite[:, None], choice, 0.0),
    )


@dataclass(frozen=True, repr=False)
class TrajectoryRows:
    """The rows of a round's trajectories (:class:`~dprlhf.policies.protocol.Rows`)."""

    chunks: list[Trajectories]
    by_step: bool  # Whether a row is one step; else it is a whole trajectory

    @property
    def users(self) -> int:
        return sum(chunk.users for chunk in self.chunks)

    @cached_property
    def user(self) -> NDArray[np.int64]:
        """Which user each row belongs to, ``[rows]``."""
        if not self.by_step:
            return np.arange(self.users)
        steps = [chunk.steps[: chunk.users] for chunk in self.chunks]
        return np.repeat(np.arange(self.users), np.concatenate(steps) if steps else 0)

    @property
    def from_base(self) -> NDArray[np.bool_]:
        """False: users act by the policy that is trained, ``[rows]``."""
        return np.zeros(len(self.user), dtype=bool)

    @property
    def prompts(self) -> range:
        """One for each row, so that no row is a baseline of another."""
        return range(len(self.user))

    def take(self, values: list[Array]) -> Array:
        """Return a number for each step, ``[chunk, horizon]`` each, as the rows have them."""
        parts = []
        for chunk, of_steps in zip(self.chunks, values, strict=True):
            part = of_steps[: chunk.users]
            parts.append(part[chunk.mask[: chunk.users]] if self.by_step else part)
        return np.concatenate(parts) if parts else np.zeros(0 if self.by_step else (0, 1))


@dataclass(frozen=True, repr=False, eq=False)
class ControlPolicy:
    """A small policy at its current parameters, an ``ExplicitPolicy``."""

    form: ScoredPolicy
    theta: torch.Tensor  # Parameters θ, [d], float64; the optimizer moves them

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return {"theta": self.theta}

    @property
    def dimension(self) -> int:
        return self.form.dimension

    def user_scores(
        self, rows: TrajectoryRows, weights: Array
    ) -> Iterator[tuple[NDArray[np.int64], torch.Tensor]]:
        """Yield users and Σ_steps weight · ∇ log π of each of their rows, ``[users, rows, d]``."""
        # A chunk of trajectories has a fixed shape, so no user rounds another's scores.
        theta = self.theta.detach().numpy()
        first = np.concatenate([[0], np.bincount(rows.user, minlength=rows.users).cumsum()])
        start = 0
        for chunk in rows.chunks:
            users = np.arange(start, start + chunk.users)
            start += chunk.users
            if not rows.by_step:
                of_steps = np.zeros_like(chunk.rewards)
                of_steps[: chunk.users] = weights[users]
                total = self.form.weighted_scores(
                    theta, chunk.observations, chunk.actions, of_steps
                )
                yield users, torch.from_numpy(total[: chunk.users, None])
                continue
            scores = self.form.scores(theta, chunk.observations, chunk.actions)
            for place, user in enumerate(users):
                weight = weights[first[user] : first[user + 1]]
                if len(weight):  # an environment that failed left no step
                    of_user = scores[place, : len(weight)] * weight[:, None]
                    yield users[place : place + 1], torch.from_numpy(of_user[None])
