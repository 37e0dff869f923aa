"""Simulated users: each is a trajectory of the current policy, with random numbers of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dprlhf.boundary import Private, open_private
from dprlhf.privacy.partition import Allocation
from papers.control.environments import Environment
from papers.control.gym import Gymnasium
from papers.control.policies import Array, TrajectoryPolicy

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


def collect(
    environment: Environment,
    policy: TrajectoryPolicy,
    theta: Array,  # Parameters θ, [d]
    allocation: Private[Allocation],
    round_: int,
    seed: int,
    directions: Array | None = None,  # [directions, d]
) -> Private[list[Trajectories]]:
    """Return the trajectories of a round's users."""
    users = open_private(allocation).round(round_)
    seeds = [(seed, int(user)) for user in users]
    return Private(simulate(environment, policy, theta, seeds, directions))


def simulate(
    environment: Environment,
    policy: TrajectoryPolicy,
    theta: Array,
    seeds: Sequence[tuple[int, ...]],
    directions: Array | None = None,
) -> list[Trajectories]:
    """Return trajectories with these seeds, in chunks."""
    return [
        _chunk(environment, policy, theta, seeds[start : start + CHUNK], directions)
        for start in range(0, len(seeds), CHUNK)
    ]


def evaluate(
    environment: Environment,
    policy: TrajectoryPolicy,
    theta: Array,
    seed: tuple[int, ...],
    episodes: int,
) -> Array:
    """Return the returns of fresh trajectories, ``[episodes]``; they are no user's, so public."""
    chunks = simulate(environment, policy, theta, [(*seed, i) for i in range(episodes)])
    return np.concatenate([chunk.returns[: chunk.users] for chunk in chunks])


def _chunk(
    env: Environment,
    policy: TrajectoryPolicy,
    theta: Array,
    seeds: Sequence[tuple[int, ...]],
    directions: Array | None,
) -> Trajectories:
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
    taken = Trajectories(
        users=users,
        observations=seen,
        actions=acted,
        rewards=rewards,
        steps=np.zeros(CHUNK, dtype=np.int64),
        terminated=np.zeros(CHUNK, dtype=bool),
        choice=choice,
    )
    # Instances of their own need no fillers; the policy's inputs are filled up all the same.
    rows = users if isinstance(env, Gymnasium) else CHUNK
    state: Any = env.reset(uniforms[:rows, : env.reset_draws])
    draws = uniforms[:, env.reset_draws :].reshape(CHUNK, horizon, -1)
    alive = np.arange(CHUNK) < users
    for t in range(horizon):
        now = taken.observations[:, t]
        now[:rows] = env.observe(state)
        action = policy.act(own, now, draws[:, t, : policy.draws])
        taken.actions[:, t] = action
        state, reward, ended = env.step(state, action[:rows], draws[:rows, t, policy.draws :])
        taken.rewards[:rows, t] = np.where(alive[:rows], reward, 0.0)
        taken.steps[:] += alive
        taken.terminated[:rows] |= alive[:rows] & ended
        alive &= ~taken.terminated
        if isinstance(env, Gymnasium):
            alive[:rows] &= ~env.over(state)
        if not alive.any():
            break
    if isinstance(env, Gymnasium):
        env.release(state)
    # Clip rewards to ±R, and empty the trajectories whose environment failed.
    finite = np.isfinite(rewards.sum(1) + seen.sum((1, 2)))  # inf − inf is not finite either
    broken: NDArray[np.bool_] = np.logical_not(finite)
    keep = taken.mask & ~broken[:, None]
    of_entries = keep[..., None] if taken.actions.ndim == 3 else keep
    return Trajectories(
        users=taken.users,
        observations=np.where(keep[..., None], seen, 0.0),
        actions=np.where(of_entries, taken.actions, 0.0),
        rewards=np.where(
            keep, np.clip(np.where(keep, rewards, 0.0), -env.reward_range, env.reward_range), 0.0
        ),
        steps=np.where(broken, 0, taken.steps),
        terminated=taken.terminated & ~broken,
        choice=np.where(broken[:, None], 0.0, taken.choice),
    )
