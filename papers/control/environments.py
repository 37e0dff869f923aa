"""Riverswim and insulin dosing, of whose trajectories many are simulated together, a row each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from papers.control.gym import Array, Flags, Gymnasium, PlanarRobot


@dataclass(frozen=True)
class Riverswim:
    """Six states in a river (Osband et al. 2013; Rio et al., appendix C.1; H = 20).

    Left always works. Right moves on with probability 0.35 (0.6 at the left bank, where it stays
    otherwise), stays with 0.6, and drifts back with 0.05. At the right bank, right stays with
    probability p and pays 1; else it drifts back. Left at the left bank pays 5/1000.
    """

    success: float = 0.6  # Probability p that swimming right at the right bank stays there
    blind: bool = False
    states: int = 6
    actions: int = 2
    continuous: bool = False
    horizon: int = 20
    reward_range: float = 1.0
    reset_draws: int = 0
    step_draws: int = 1

    @property
    def size(self) -> int:
        return 1 if self.blind else self.states

    @property
    def transitions(self) -> Array:
        """P(s′|s, a), ``[states, actions, states]``; action 1 is right."""
        n = self.states
        moves = np.zeros((n, 2, n))
        for s in range(n):
            moves[s, 0, max(s - 1, 0)] = 1.0
            if s == 0:
                moves[s, 1, [0, 1]] = 0.4, 0.6
            elif s == n - 1:
                moves[s, 1, [s - 1, s]] = 1 - self.success, self.success
            else:
                moves[s, 1, [s - 1, s, s + 1]] = 0.05, 0.6, 0.35
        return moves

    @property
    def rewards(self) -> Array:
        """r(s, a, s′), ``[states, actions, states]``."""
        rewards = np.zeros((self.states, 2, self.states))
        rewards[0, 0, 0] = 5 / 1000
        rewards[-1, 1, -1] = 1.0
        return rewards

    def reset(self, uniforms: Array) -> Array:
        return np.zeros(len(uniforms), dtype=np.int64)

    def observe(self, state: Array) -> Array:
        return np.ones((len(state), 1)) if self.blind else np.asarray(np.eye(self.states)[state])

    def step(self, state: Array, actions: Array, uniforms: Array) -> tuple[Array, Array, Flags]:
        action = actions.astype(np.int64)
        ends = np.cumsum(self.transitions, -1)[state, action]
        new = np.minimum((ends < uniforms).sum(1), self.states - 1)
        return new, self.rewards[state, action, new], np.zeros(len(new), dtype=bool)

    def value(self, policy: Array | None) -> float:
        """Return the expected return of a policy, ``[states, actions]``; None: of the best one."""
        expected = (self.transitions * self.rewards).sum(-1)
        value = np.zeros(self.states)
        for _ in range(self.horizon):
            ahead = expected + self.transitions @ value  # [states, actions]
            value = ahead.max(-1) if policy is None else (policy * ahead).sum(-1)
        return float(value[0])

    @property
    def best(self) -> float:
        return self.value(None)


@dataclass(frozen=True)
class Dosing:
    """Insulin for a type-1 diabetic over one day, a dose every ten minutes (Salas et al. 2019).

    The expanded Bergman minimal model (Bergman et al. 1979; parameters of J. D. Hedengren,
    APMonitor). The reward is 1 − tanh²(|G − 80| / 7), and −1 where G leaves 65 to 105 mg/dL.
    Departures from Rio et al.: steps of a minute instead of an adaptive solver; the meals are our
    own of the same hours, heights and widths.
    """

    varying: bool = False
    size: int = 9
    actions: int = 1
    continuous: bool = True
    horizon: int = 143
    reward_range: float = 1.0
    reset_draws: int = 26
    step_draws: int = 0

    def reset(self, uniforms: Array) -> Array:
        """Return states after the first dose, ``[users, 6 + 3 + meals]``."""
        from scipy.special import ndtri

        n = len(uniforms)
        z = ndtri(uniforms)
        mean = np.array([33.33, 33.33, 25.0, 25.0, 250.0])
        glucose = 65.0 + 40.0 * uniforms[:, :1]
        body = np.concatenate([glucose, mean + 5.0 * z[:, 1:6]], 1)
        steady = 800.0 + 400.0 * uniforms[:, 6] if self.varying else np.full(n, 1000.0)
        dose = np.floor(7 * uniforms[:, 7]) if self.varying else np.full(n, 3.0)
        meals = self._meals(steady, uniforms, z)
        state = np.concatenate([body, np.zeros((n, 3)), meals], 1)
        state[:, 8] = meals[:, 0]
        return self._advance(state, dose)

    def _meals(self, steady: Array, uniforms: Array, z: Array) -> Array:
        """Return the meal disturbance at each ten minutes of the day, ``[users, 145]``."""
        minutes, level = np.arange(145.0), np.repeat(steady[:, None], 145, 1)
        if not self.varying:
            for start in (43.0, 79.0, 115.0):
                after = minutes - start
                rise = np.clip((after + 1) / 3.0, 0.0, 1.0)
                fall = np.exp(-np.clip(after - 2.0, 0.0, None) / 5.0)
                level += np.where(after >= 0, 650.0 * rise * fall, 0.0)
            return level
        hours = np.array([7, 9.5, 12, 15, 18, 21])
        bounds = np.array([[5, 9], [9, 10], [11, 13], [14, 16], [16.5, 23.5], [20, 22]])
        chance = np.array([0.95, 0.2, 0.95, 0.2, 0.95, 0.2])
        height = np.array([2500.0, 1250.0, 2800.0, 1250.0, 2800.0, 1250.0])
        eaten = uniforms[:, 8:14] < chance
        at = np.clip(hours * 6 + 10.0 * z[:, 14:20], bounds[:, 0] * 6, bounds[:, 1] * 6)
        amount = height * (1 + 0.04 * z[:, 20:26])
        for meal in range(6):
            # A single sample, smoothed over an hour and a half.
            pulse = np.exp(-0.5 * ((minutes - np.round(at[:, meal : meal + 1])) / 2.0) ** 2)
            extra = np.clip(amount[:, meal : meal + 1] - steady[:, None], 0, None)
            level += np.where(eaten[:, meal : meal + 1], 0.21 * extra * pulse, 0.0)
        return level

    def _advance(self, state: Array, dose: Array) -> Array:
        body, clock, meals = state[:, :6], state[:, 6].astype(np.int64) + 1, state[:, 9:]
        meal = np.take_along_axis(meals, clock[:, None], 1)[:, 0]
        before = state[:, 0]
        for _ in range(10):
            # The expanded Bergman model a minute later: all compartments but glucose are linear and
            # solved exactly; glucose is, with the mean of remote insulin and of the gut over the
            # minute, for which it is stable whatever the dose.
            p1, si, kabs, f, v = 3.17e-2, 2.9e-2, 1.2e-2, 0.8, 12.0
            inputs = np.stack([*body.T[1:], dose], 1)
            rest = inputs @ _LINEAR.T
            x = (body[:, 1] + rest[:, 0]) / 2
            gut = (body[:, 5] + rest[:, 4]) / 2
            rate = p1 + si * x
            level = (p1 * 291.0 + f * kabs / v * gut + f / v * meal) / rate
            glucose = level + (body[:, 0] - level) * np.exp(-rate)
            body = np.concatenate([glucose[:, None], rest[:, :5]], 1)
        seen = np.stack([clock.astype(np.float64), before, meal], 1)
        return np.concatenate([body, seen, meals], 1)

    def observe(self, state: Array) -> Array:
        """Return the six compartments, the meal, the glucose and the meal ten minutes ago."""
        last = np.take_along_axis(state[:, 9:], state[:, 6].astype(np.int64)[:, None] - 1, 1)
        return np.concatenate([state[:, :6], state[:, 8:9], state[:, 7:8], last], 1)

    def step(self, state: Array, actions: Array, uniforms: Array) -> tuple[Array, Array, Flags]:
        """Give a dose (mU/min, from 0 to 10) for ten minutes."""
        new = self._advance(state, np.clip(actions[:, 0], 0.0, 10.0))
        glucose = new[:, 0]
        reward = 1 - np.tanh(np.abs(glucose - 80.0) / 7.0) ** 2
        reward = np.where((glucose < 65.0) | (glucose > 105.0), -1.0, reward)
        return new, reward, np.zeros(len(new), dtype=bool)


def _linear_minute() -> Array:
    """Return the matrix from (x, i, s1, s2, gut, dose) to the same a minute later."""
    from scipy.linalg import expm

    p2, ke, kabs, kemp = 1.23e-2, 9e-2, 1.2e-2, 1.8e-1
    rates = np.zeros((6, 6))
    rates[0, [0, 1]] = -p2, p2
    rates[1, [1, 5]] = -ke, 1.0
    rates[2, [2, 5]] = -kemp, 1.0
    rates[3, [2, 3]] = kemp, -kemp
    rates[4, [3, 4]] = kemp, -kabs
    return np.asarray(expm(rates))


_LINEAR = _linear_minute()


Environment = Riverswim | Dosing | Gymnasium
"""A task: ``reset`` takes uniforms ``[users, reset_draws]``, ``observe`` returns ``[users, size]``,
``step`` returns states, rewards in [−R, R] ``[users]``, NaN for a failure, and who has ended."""


ENVIRONMENTS: dict[str, Callable[[], Environment]] = {
    "cartpole": lambda: Gymnasium("CartPole-v1", 500, 1.0, reset_draws=4),
    "acrobot": lambda: Gymnasium("Acrobot-v1", 500, 1.0, reset_draws=4),
    "riverswim-0.6": lambda: Riverswim(0.6),
    "riverswim-0.9": lambda: Riverswim(0.9),
    "riverswim-0.6-blind": lambda: Riverswim(0.6, blind=True),
    "riverswim-0.9-blind": lambda: Riverswim(0.9, blind=True),
    "dosing-0": lambda: Dosing(varying=False),
    "dosing-1": lambda: Dosing(varying=True),
    "halfcheetah-clock": lambda: PlanarRobot("HalfCheetah-v5", 1000, 10.0, period=0.25),
    "hopper-trunk": lambda: PlanarRobot("Hopper-v5", 1000, 10.0, trunk=True, stiffness=2.0),
}
"""How to make each environment, by its name in a recipe."""


def make_environment(name: str) -> Environment:
    return ENVIRONMENTS[name]()
