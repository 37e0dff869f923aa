"""Simulating users: each is one trajectory of the current policy, with random numbers of its own.

Trajectories are simulated :data:`CHUNK` at a time, whatever the number of users: fillers complete a
chunk, so that no user rounds another's numbers (see :mod:`dprlhf.rollout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dprlhf.boundary import Private, open_private
from dprlhf.papers.control.environments import Environment
from dprlhf.papers.control.gym import Gymnasium
from dprlhf.papers.control.policies import Array, TrajectoryPolicy
from dprlhf.privacy.partition import Allocation
from dprlhf.runs.folder import JsonLines

CHUNK = 64
"""Trajectories simulated together."""


@dataclass(frozen=True, repr=False)
class Trajectories:
    """A chunk: the first ``users`` rows are users, the others fillers.

    Attributes:
        users: how many rows count.
        observations: ``[chunk, horizon, size]``.
        actions: ``[chunk, horizon]`` or ``[chunk, horizon, actions]``.
        rewards: clipped to [−R, R]; 0 where there is no step, ``[chunk, horizon]``.
        steps: of each, ``[chunk]``; 0 for fillers and for users whose environment failed.
        terminated: whether the episode ended by itself, not by a time limit, ``[chunk]``.
        choice: ±1 in the place of the direction along which each user moved its parameters, else 0,
            ``[chunk, directions]``.
        out_of_range: rewards outside [−R, R]. Computed from users: for secret telemetry.
        failed: users whose environment failed. Computed from users: for secret telemetry.
    """

    users: int
    observations: Array
    actions: Array
    rewards: Array
    steps: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    choice: Array
    out_of_range: int = 0
    failed: int = 0

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Which steps were taken, ``[chunk, horizon]``."""
        return np.arange(self.rewards.shape[1]) < self.steps[:, None]

    @property
    def returns(self) -> Array:
        """The sum of rewards of each, ``[chunk]``."""
        return np.asarray(self.rewards.sum(1))


def collect(
    environment: Environment,
    policy: TrajectoryPolicy,
    theta: Array,
    allocation: Private[Allocation],
    round_: int,
    seed: int,
    directions: Array | None = None,
) -> Private[list[Trajectories]]:
    """Return the trajectories of a round's users.

    Args:
        theta: ``[d]``.
        allocation: of users to rounds.
        round_: t, from 1.
        seed: of the simulated population; user u's random numbers are those of (seed, u).
        directions: ``[directions, d]``; a user then draws one and a sign, and acts with θ ± it.
    """
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
    """Return the returns of fresh trajectories, ``[episodes]``: of nobody, so they are public."""
    chunks = simulate(environment, policy, theta, [(*seed, i) for i in range(episodes)])
    return np.concatenate([chunk.returns[: chunk.users] for chunk in chunks])


def record(folder: Path, round_: int, trajectories: Private[list[Trajectories]]) -> None:
    """Append the round's counts to ``secret/telemetry.jsonl``: they are computed from users."""
    chunks = open_private(trajectories)
    secret = folder / "secret"
    secret.mkdir(mode=0o700, parents=True, exist_ok=True)
    counts = {
        "round": round_,
        "users": sum(chunk.users for chunk in chunks),
        "failed": sum(chunk.failed for chunk in chunks),
        "rewards_out_of_range": sum(chunk.out_of_range for chunk in chunks),
    }
    JsonLines(secret / "telemetry.jsonl", mode=0o600).write(counts)


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
    # Instances of their own need no fillers; the policy's inputs are filled up all the same.
    rows = users if isinstance(env, Gymnasium) else CHUNK
    state = env.reset(uniforms[:rows, : env.reset_draws])
    draws = uniforms[:, env.reset_draws :].reshape(CHUNK, horizon, -1)
    seen = np.zeros((CHUNK, horizon, env.size))
    acted = np.zeros((CHUNK, horizon, env.actions) if env.continuous else (CHUNK, horizon))
    rewards = np.zeros((CHUNK, horizon))
    steps = np.zeros(CHUNK, dtype=np.int64)
    terminated = np.zeros(CHUNK, dtype=bool)
    alive = np.arange(CHUNK) < users
    for t in range(horizon):
        now = seen[:, t]
        now[:rows] = env.observe(state)
        action = policy.act(own, now, draws[:, t, : policy.draws])
        acted[:, t] = action
        state, reward, ended = env.step(state, action[:rows], draws[:rows, t, policy.draws :])
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
    finite = np.isfinite(rewards.sum(1) + seen.sum((1, 2)))  # inf − inf is not finite either
    broken: NDArray[np.bool_] = np.logical_not(finite)
    taken = np.arange(horizon) < steps[:, None]
    limit = env.reward_range
    beyond = int((np.abs(rewards[~broken]) > limit).sum())
    keep = taken & ~broken[:, None]
    return Trajectories(
        users=users,
        observations=np.where(keep[..., None], seen, 0.0),
        actions=np.where(keep[..., None] if env.continuous else keep, acted, 0.0),
        rewards=np.where(keep, np.clip(np.where(keep, rewards, 0.0), -limit, limit), 0.0),
        steps=np.where(broken, 0, steps),
        terminated=terminated & ~broken,
        choice=np.where(broken[:, None], 0.0, choice),
        out_of_range=beyond,
        failed=int(broken.sum()),
    )
