"""Small policies for control tasks: log-linear and two-layer softmax, and linear actions.

A policy is a set of functions of its parameters θ, an array ``[d]``, or ``[users, d]`` where each
user acts with parameters of its own. Gradients are written out, in float64. The log-linear softmax
is that of He & Zhou (arXiv 2510.21060), section 6.2, the network that of appendix H.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = Array | None
Layers = list[tuple[Array, Array, bool]]
"""The gradient of a (weighted) log π by each layer's outputs, its inputs, whether it has biases."""


def softmax(logits: Array) -> Array:
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(-1, keepdims=True))


def _slope(logits: Array, actions: Array) -> Array:
    """Return the gradient of log π of the actions by the logits."""
    index = actions.astype(np.int64)[..., None]
    shifted = logits - logits.max(-1, keepdims=True)
    slope = -np.exp(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
    np.put_along_axis(slope, index, np.take_along_axis(slope, index, -1) + 1, -1)
    return np.asarray(slope)


def _apply(weight: Array, inputs: Array) -> Array:
    """Return W x for one W, ``[out, in]``, or one a user, ``[users, out, in]``."""
    if weight.ndim == 2:
        return np.asarray(inputs @ weight.T)
    return np.asarray((weight @ inputs[..., None])[..., 0])


class _Softmax:
    """What both softmax policies share: sampling, and gradients from those of their layers."""

    draws = 1

    def act(self, theta: Array, observations: Array, uniforms: Array) -> Array:
        """Return the actions, ``[users]``."""
        below = np.cumsum(softmax(self._logits(theta, observations)), -1) < uniforms
        most = below.shape[-1] - 1
        return np.asarray(np.minimum(below.sum(-1), most), dtype=np.float64)

    def scores(self, theta: Array, observations: Array, actions: Array) -> Array:
        """Return ∇ log π, ``[users, steps, d]``."""
        parts = []
        for out, into, bias in self._layers(theta, observations, actions, None):
            weight = out[..., :, None] * into[..., None, :]
            parts += [weight.reshape(*out.shape[:-1], -1), *[out] * bias]
        return np.concatenate(parts, -1)

    def weighted_scores(self, theta: Array, seen: Array, actions: Array, weights: Array) -> Array:
        """Return Σ_t weight · ∇ log π, ``[users, d]``."""
        parts = []
        for out, into, bias in self._layers(theta, seen, actions, weights):
            weight = np.matmul(out.swapaxes(-1, -2), into)
            parts += [weight.reshape(len(out), -1), *[out.sum(1)] * bias]
        return np.concatenate(parts, -1)

    def _logits(self, theta: Array, observations: Array) -> Array:
        raise NotImplementedError

    def _layers(self, theta: Array, seen: Array, actions: Array, weights: Weights) -> Layers:
        raise NotImplementedError


@dataclass(frozen=True)
class LogLinearSoftmax(_Softmax):
    """π(a|s) ∝ exp(θ_a · x), x the scaled observation: d = actions · size.

    With ``levels``, π(a|s) ∝ exp(level_a θ · x), for actions that have an order: d = size. An entry
    of the observation whose scale is 0 is left out.
    """

    size: int
    actions: int
    scale: tuple[float, ...] | None = None  # [size]
    levels: tuple[float, ...] | None = None  # Public constants that order the actions, [actions]

    @property
    def dimension(self) -> int:
        return len(self._read) * (1 if self.levels else self.actions)

    @property
    def _read(self) -> NDArray[np.intp]:
        return np.flatnonzero(np.ones(self.size) if self.scale is None else self.scale)

    def initial(self, rng: np.random.Generator) -> Array:
        return np.zeros(self.dimension)

    def _inputs(self, observations: Array) -> Array:
        """Return x, ``[..., numbers that are read]``."""
        if self.scale is None:
            return observations
        return np.asarray((observations * np.asarray(self.scale))[..., self._read])

    def _logits(self, theta: Array, observations: Array) -> Array:
        inputs = self._inputs(observations)
        logits = _apply(theta.reshape(*theta.shape[:-1], -1, inputs.shape[-1]), inputs)
        return logits * np.asarray(self.levels) if self.levels else logits

    def _layers(self, theta: Array, seen: Array, actions: Array, weights: Weights) -> Layers:
        slope = _slope(self._logits(theta, seen), actions)
        if self.levels:
            slope = slope @ np.asarray(self.levels)[:, None]
        slope = slope if weights is None else weights[..., None] * slope
        return [(slope, self._inputs(seen), False)]


@dataclass(frozen=True)
class MLPSoftmax(_Softmax):
    """Linear(size, hidden)-ReLU-Linear(hidden, actions)-Softmax (He & Zhou, appendix H)."""

    size: int
    actions: int
    hidden: int = 64
    scale: tuple[float, ...] | None = None  # [size]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of weights and biases, in the order of θ."""
        of_first, of_last = (self.hidden, self.size), (self.actions, self.hidden)
        return [of_first, of_first[:1], of_last, of_last[:1]]

    @property
    def dimension(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def initial(self, rng: np.random.Generator) -> Array:
        """Return random weights; the last layer's are small, so the policy is nearly uniform."""
        first = rng.normal(size=(self.hidden, self.size)) / np.sqrt(self.size)
        last = 0.1 * (rng.normal(size=(self.actions, self.hidden)) / np.sqrt(self.hidden))
        biases = np.zeros(self.hidden), np.zeros(self.actions)
        return np.concatenate([first.ravel(), biases[0], last.ravel(), biases[1]])

    def _split(self, theta: Array) -> list[Array]:
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        parts = np.split(theta, ends, axis=-1)
        return [p.reshape(*theta.shape[:-1], *s) for p, s in zip(parts, self.shapes, strict=True)]

    def _forward(self, theta: Array, observations: Array) -> tuple[Array, Array, Array]:
        x = observations if self.scale is None else observations * np.asarray(self.scale)
        first, first_bias, last, last_bias = self._split(theta)
        hidden = np.maximum(_apply(first, x) + first_bias, 0.0)
        return x, hidden, _apply(last, hidden) + last_bias

    def _logits(self, theta: Array, observations: Array) -> Array:
        return self._forward(theta, observations)[2]

    def _layers(self, theta: Array, seen: Array, actions: Array, weights: Weights) -> Layers:
        x, hidden, logits = self._forward(theta, seen)
        slope = _slope(logits, actions)
        slope = slope if weights is None else slope * weights[..., None]
        by_hidden = (slope @ self._split(theta)[2]) * (hidden > 0)
        return [(by_hidden, x, True), (slope, hidden, True)]


@dataclass(frozen=True)
class LinearAction:
    """a = center + spread · (W x + b), deterministic: only ``pgpe`` can train it."""

    size: int
    actions: int
    scale: tuple[float, ...] | None = None  # [size]
    shift: tuple[float, ...] | None = None  # Public constants subtracted from observations, [size]
    spread: float = 1.0  # Factor from W x + b to the action's distance from center
    center: float = 0.0  # Action where W x + b is 0
    draws: int = 0

    @property
    def dimension(self) -> int:
        return self.actions * (self.size + 1)

    def initial(self, rng: np.random.Generator) -> Array:
        return np.zeros(self.dimension)

    def act(self, theta: Array, observations: Array, uniforms: Array) -> Array:
        """Return the actions, ``[users, actions]``."""
        x = observations if self.shift is None else observations - np.asarray(self.shift)
        x = x if self.scale is None else x * np.asarray(self.scale)
        weight = theta[..., : -self.actions].reshape(*theta.shape[:-1], self.actions, self.size)
        return np.asarray(
            self.center + self.spread * (_apply(weight, x) + theta[..., -self.actions :])
        )


ScoredPolicy = LogLinearSoftmax | MLPSoftmax
TrajectoryPolicy = ScoredPolicy | LinearAction
"""Policies π_θ(a|s); those with scores also know ∇ log π_θ, ``[users, steps, d]``."""
