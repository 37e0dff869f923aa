"""Gymnasium's environments, one instance a trajectory, and MuJoCo's planar robots."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import mujoco
import numpy as np
from numpy.typing import NDArray

# Else a notice of the model compiler goes to a file in the current folder.
mujoco.set_mju_user_warning(lambda text: None)

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Stepped = tuple[list[Any], Array, Flags]


class _Uniforms:
    """Stands in for the generator of an environment's reset: gives a user's own numbers."""

    def __init__(self, numbers: Array) -> None:
        self.numbers = numbers

    def uniform(self, low: float, high: float, size: tuple[int]) -> Array:
        return low + (high - low) * self.numbers


@dataclass
class Gymnasium:
    name: str  # Gymnasium's registered name, for example CartPole-v1
    horizon: int
    reward_range: float  # Bound R on a step's reward; rewards are clipped to [−R, R]
    reset_draws: int = 1  # Uniform numbers of a reset; one is the seed of the environment's own
    step_draws: int = 0
    make: Callable[[], Any] | None = None  # Makes an instance, in place of gymnasium.make

    def __post_init__(self) -> None:
        self._make = self.make or (
            lambda: gymnasium.make(self.name, disable_env_checker=True).unwrapped
        )
        first = self._make()
        self._idle = [first]
        self._box = None if hasattr(first.action_space, "n") else first.action_space
        self.continuous = self._box is not None
        self.actions = int(first.action_space.shape[0] if self._box else first.action_space.n)
        self.size = int(first.observation_space.shape[0])
        self._nothing = np.zeros(self.size)

    def reset(self, uniforms: Array) -> list[Any]:
        """Return a list of environments, observations and whether the episode is over, one each."""
        # An environment that raised is None from then on: broken, it could fail another user.
        state = []
        for numbers in uniforms:
            env = self._idle.pop() if self._idle else self._make()
            try:
                if self.reset_draws > 1:
                    env.np_random = _Uniforms(numbers)
                    seen, _ = env.reset()
                else:
                    seen, _ = env.reset(seed=int(numbers[0] * 2**31))
                state.append([env, np.asarray(seen, dtype=np.float64), False])
            except Exception:
                state.append([None, self._nothing, True])
        return state

    def observe(self, state: list[Any]) -> Array:
        return np.stack([row[1] for row in state])

    def step(self, state: list[Any], actions: Array, uniforms: Array) -> Stepped:
        """Step each environment; one that raises, here or at its reset, has a reward of NaN."""
        rewards, ended = np.zeros(len(state)), np.zeros(len(state), dtype=bool)
        for number, row in enumerate(state):
            env, _, over = row
            if over:  # before the first step only if the reset raised; later nobody reads it
                rewards[number] = math.nan
                continue
            action: Any = actions[number]
            action = np.clip(action, self._box.low, self._box.high) if self._box else int(action)
            try:
                seen, reward, terminated, truncated, _ = env.step(action)
                row[1] = np.asarray(seen, dtype=np.float64)
                rewards[number], ended[number] = float(reward), terminated
                row[2] = terminated or truncated
            except Exception:  # whatever it is, it must not tell about the user
                rewards[number], row[0], row[2] = math.nan, None, True
        return state, rewards, ended

    def over(self, state: list[Any]) -> Flags:
        """Return which episodes have ended, failed, or been cut by the environment's own limit."""
        return np.array([row[2] for row in state])

    def release(self, state: list[Any]) -> None:
        """Take environments back for the next trajectories, but none that raised."""
        self._idle.extend(row[0] for row in state if row[0] is not None)


@dataclass
class PlanarRobot(Gymnasium):
    """A planar robot of MuJoCo whose policy says where its joints should be, and sees no joints.

    Public gains turn desired positions into torques, stiffness · (desired − q) − damping · q̇; the
    policy sees a clock, the trunk, or both. With the clock alone these are the oscillators of
    Raffin et al. (2024, arXiv 2310.05808), with one public period for all joints and phases.
    """

    trunk: bool = False  # Whether the policy sees height, angle and three velocities of the trunk
    period: float | None = None
    stiffness: float = 1.0
    damping: float = 0.05  # Torque against each radian per second of joint velocity

    def __post_init__(self) -> None:
        super().__post_init__()
        self.size = 5 * self.trunk + 2 * (self.period is not None)

    def observe(self, state: list[Any]) -> Array:
        """Return the trunk, and sine and cosine of the clock."""
        parts = []
        if self.trunk:
            seen = super().observe(state)
            parts += [seen[:, :2], seen[:, 2 + self.actions : 5 + self.actions]]
        if self.period is not None:
            seconds = [0.0 if env is None else env.data.time for env, _, _ in state]
            angle = 2 * math.pi * np.array(seconds)[:, None] / self.period
            parts += [np.sin(angle), np.cos(angle)]
        return np.concatenate(parts, 1)

    def step(self, state: list[Any], actions: Array, uniforms: Array) -> Stepped:
        """Step with torques towards the positions, ``[users, joints]``."""
        seen = super().observe(state)
        position, velocity = seen[:, 2 : 2 + self.actions], seen[:, -self.actions :]
        torque = self.stiffness * (actions - position) - self.damping * velocity
        return super().step(state, torque, uniforms)
