"""Gymnasium's environments, one instance a trajectory, and MuJoCo's planar robots."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dprlhf.errors import DprlhfError, extra, one_line

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass
class Gymnasium:
    """Any Gymnasium environment, one instance a trajectory (a loop: its steps are in C).

    Attributes:
        name: Gymnasium's registered name, for example ``HalfCheetah-v5``.
        reward_range: Bound R on a step's reward; rewards are clipped to [−R, R].
        horizon: Largest number of steps of an episode.

    Raises:
        DprlhfError: Gymnasium or MuJoCo is missing, the name is unknown, or the action space is
            neither discrete nor a box of one axis.
    """

    name: str
    reward_range: float = 10.0
    horizon: int = 1000
    reset_draws: int = 1
    step_draws: int = 0
    size: int = field(init=False)
    actions: int = field(init=False)
    continuous: bool = field(init=False)
    make: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        """Build one environment, to learn its spaces."""
        self._idle: list[Any] = []
        with extra("papers", self.name):
            import gymnasium
            from gymnasium import spaces
        try:
            with extra("papers", self.name):
                first = self._new()
        except gymnasium.error.DependencyNotInstalled as missing:
            raise DprlhfError(f'{missing}: pip install "dprlhf[papers]"') from None
        except gymnasium.error.Error as problem:
            raise DprlhfError(f"{self.name}: {one_line(problem, None)}") from None
        seen, acted = first.observation_space, first.action_space
        self._idle.append(first)
        if not isinstance(seen, spaces.Box) or len(seen.shape) != 1:
            raise DprlhfError(f"{self.name}: observations are {seen}, not a vector of numbers")
        if isinstance(acted, spaces.Discrete):
            self.continuous, self.actions = False, int(acted.n)
        elif isinstance(acted, spaces.Box) and len(acted.shape) == 1:
            self.continuous, self.actions = True, acted.shape[0]
            self._low, self._high = acted.low, acted.high
        else:
            raise DprlhfError(
                f"{self.name}: the action space {acted} cannot be served: policies here give one of"
                " n actions, or a vector of numbers"
            )
        self.size = seen.shape[0]
        self._nothing = np.zeros(self.size)

    def _new(self) -> Any:
        import gymnasium

        if self.make is not None:
            return self.make()
        with contextlib.suppress(ImportError):
            import mujoco

            # Else a notice of the model compiler goes to a file in the current folder.
            mujoco.set_mju_user_warning(lambda text: None)
        return gymnasium.make(self.name, disable_env_checker=True).unwrapped

    def reset(self, uniforms: Array) -> list[Any]:
        """Return a list of environments, observations and whether the episode is over, one each.

        An environment that raised is None from then on: broken, it could fail another user.
        """
        state = []
        for u in uniforms[:, 0]:
            env = self._idle.pop() if self._idle else self._new()
            try:
                seen, _ = env.reset(seed=int(u * 2**31))
                state.append([env, np.asarray(seen, dtype=np.float64), False])
            except Exception:
                state.append([None, self._nothing, True])
        return state

    def observe(self, state: list[Any]) -> Array:
        """Return the observations."""
        return np.stack([row[1] for row in state])

    def step(
        self, state: list[Any], actions: Array, uniforms: Array
    ) -> tuple[list[Any], Array, Flags]:
        """Step each environment; one that raises, here or at its reset, has a reward of NaN."""
        rewards, ended = np.zeros(len(state)), np.zeros(len(state), dtype=bool)
        for number, row in enumerate(state):
            env, _, over = row
            if over:  # before the first step only if the reset raised; later nobody reads it
                rewards[number] = math.nan
                continue
            action: Any = actions[number]
            action = np.clip(action, self._low, self._high) if self.continuous else int(action)
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
    """A planar robot of MuJoCo whose policy says where its joints should be.

    Task, rewards and the cost of torques are Gymnasium's. What differs is the class of policies: a
    controller with public gains turns desired positions into torques, stiffness · (desired − q) −
    damping · q̇, and the policy sees a clock, the trunk, or both, and no joints. With the clock
    alone these are the oscillators of Raffin et al. (2024, arXiv 2310.05808). Departures: one
    public period for all joints and phases; a policy linear in sine and cosine has amplitudes of
    both in the place of an amplitude and a phase.

    Attributes:
        trunk: Whether the policy sees height, angle and three velocities of the trunk.
        period: Period of the clock that the policy sees, in seconds of simulated time; None for no
            clock.
        stiffness: Torque for each radian between the desired and the actual joint position.
        damping: Torque against each radian per second of joint velocity.
    """

    trunk: bool = False
    period: float | None = None
    stiffness: float = 1.0
    damping: float = 0.05

    def __post_init__(self) -> None:
        """Learn the robot's spaces, then narrow the observation to what the policy sees."""
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

    def step(
        self, state: list[Any], actions: Array, uniforms: Array
    ) -> tuple[list[Any], Array, Flags]:
        """Step with torques towards the positions, ``[users, joints]``."""
        seen = super().observe(state)
        position, velocity = seen[:, 2 : 2 + self.actions], seen[:, -self.actions :]
        torque = self.stiffness * (actions - position) - self.damping * velocity
        return super().step(state, torque, uniforms)
