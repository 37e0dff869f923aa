"""Small policies for control tasks: tabular, log-linear and two-layer softmax, and Gaussian.

A policy here is a set of functions of its parameters θ, an array ``[d]``, or ``[users, d]`` where
each user acts with parameters of its own. Everything is float64, and the gradients are written out,
so that those of thousands of trajectories are a few matrix products.

Sources: the tabular softmax with its log-barrier and the log-linear softmax are those of He & Zhou
(arXiv 2510.21060), Definition 3, equation (10) and section 6.2; Linear(4,64)-ReLU-Linear(64,2) that
of their appendix H.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

Array = NDArray[np.float64]


class TrajectoryPolicy(Protocol):
    """A policy π_θ(a|s) that acts on numbers and knows the gradients of its log-probabilities.

    Leading axes are those of the observations: ``[users]`` or ``[users, steps]``.
    """

    @property
    def dimension(self) -> int:
        """The number d of parameters."""

    @property
    def draws(self) -> int:
        """The number of uniform random numbers that one action takes."""

    def initial(self, rng: np.random.Generator) -> Array:
        """Return the parameters that training starts from, ``[d]``; public."""

    def act(self, theta: Array, observations: Array, uniforms: Array) -> Array:
        """Return actions of π_θ, ``[users]`` or ``[users, actions]``.

        Args:
            theta: ``[d]`` or ``[users, d]``.
            observations: ``[users, size]``.
            uniforms: in (0, 1), ``[users, draws]``.
        """

    def logprobs(self, theta: Array, observations: Array, actions: Array) -> Array:
        """Return log π_θ(a|s), ``[users, steps]``."""

    def scores(self, theta: Array, observations: Array, actions: Array) -> Array:
        """Return ∇ log π_θ(a|s), ``[users, steps, d]``."""

    def weighted_scores(
        self, theta: Array, observations: Array, actions: Array, weights: Array
    ) -> Array:
        """Return Σ_t weight · ∇ log π_θ(a|s) of each trajectory, ``[users, d]``.

        Args:
            weights: ``[users, steps]``; 0 where there is no step.
        """


def softmax(logits: Array) -> Array:
    """Return the softmax over the last axis."""
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(-1, keepdims=True))


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def _sample(logits: Array, uniforms: Array) -> Array:
    below = np.cumsum(softmax(logits), -1) < uniforms
    return np.asarray(np.minimum(below.sum(-1), logits.shape[-1] - 1), dtype=np.float64)


def _of_action(logits: Array, actions: Array) -> tuple[Array, Array]:
    """Return log π of the actions and its gradient by the logits."""
    index = actions.astype(np.int64)[..., None]
    log = _log_softmax(logits)
    slope = -np.exp(log)
    np.put_along_axis(slope, index, np.take_along_axis(slope, index, -1) + 1, -1)
    return np.take_along_axis(log, index, -1)[..., 0], slope


def _apply(weight: Array, inputs: Array) -> Array:
    """Return W x for one W, ``[out, in]``, or one a user, ``[users, out, in]``."""
    if weight.ndim == 2:
        return np.asarray(inputs @ weight.T)
    return np.asarray((weight @ inputs[..., None])[..., 0])


@dataclass(frozen=True)
class LogLinearSoftmax:
    """π(a|s) ∝ exp(θ_a · x), x the scaled observation: d = actions · size.

    Adding the same vector to every θ_a changes nothing, so d − size directions carry the policy;
    the noise in the others does no harm. With ``levels``, π(a|s) ∝ exp(level_a θ · x), for actions
    that have an order (a torque of −1, 0 or 1): d = size.

    Attributes:
        size: Number of entries of an observation.
        actions: Number of actions.
        scale: Public constants that observations are multiplied by, ``[size]``; an entry whose
            scale is 0 is not read, and has no parameters.
        levels: Public constants that order the actions, ``[actions]``.
    """

    size: int
    actions: int
    scale: tuple[float, ...] | None = None
    levels: tuple[float, ...] | None = None

    @property
    def dimension(self) -> int:
        """The number of observed entries that are read, times the actions without ``levels``."""
        return len(self._read) * (1 if self.levels else self.actions)

    @property
    def _read(self) -> NDArray[np.intp]:
        return np.flatnonzero(np.ones(self.size) if self.scale is None else self.scale)

    @property
    def draws(self) -> int:
        """One uniform number picks one of the actions."""
        return 1

    def initial(self, rng: np.random.Generator) -> Array:
        """Return zeros: the uniform policy."""
        return np.zeros(self.dimension)

    def inputs(self, observations: Array) -> Array:
        """Return x, ``[..., numbers that are read]``."""
        if self.scale is None:
            return observations
        return np.asarray((observations * np.asarray(self.scale))[..., self._read])

    def _logits(self, theta: Array, inputs: Array) -> Array:
        rows = theta.reshape(*theta.shape[:-1], -1, inputs.shape[-1])
        logits = _apply(rows, inputs)
        return logits * np.asarray(self.levels) if self.levels else logits

    def _of_rows(self, slope: Array) -> Array:
        """Turn a gradient by the logits, ``[..., actions]``, into one by the rows' products."""
        return slope @ np.asarray(self.levels)[:, None] if self.levels else slope

    def act(self, theta: Array, observations: Array, uniforms: Array) -> Array:
        """Return the actions, ``[users]``."""
        return _sample(self._logits(theta, self.inputs(observations)), uniforms)

    def logprobs(self, theta: Array, observations: Array, actions: Array) -> Array:
        """Return log π, ``[users, steps]``."""
        return _of_action(self._logits(theta, self.inputs(observations)), actions)[0]

    def scores(self, theta: Array, observations: Array, actions: Array) -> Array:
        """Return ∇ log π, ``[users, steps, d]``."""
        x = self.inputs(observations)
        _, slope = _of_action(self._logits(theta, x), actions)
        rows = self._of_rows(slope)
        return (rows[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], self.dimension)

    def weighted_scores(
        self, theta: Array, observations: Array, actions: Array, weights: Array
    ) -> Array:
        """Return Σ_t weight · ∇ log π, ``[users, d]``."""
        x = self.inputs(observations)
        _, slope = _of_action(self._logits(theta, x), actions)
        total = np.matmul((weights[..., None] * self._of_rows(slope)).swapaxes(-1, -2), x)
        return np.asarray(total.reshape(len(total), self.dimension))


@dataclass(frozen=True)
class TabularSoftmax(LogLinearSoftmax):
    """π(a|s) ∝ exp(θ_{a,s}), observations being one-hot states (He & Zhou, Definition 3)."""

    def probabilities(self, theta: Array) -> Array:
        """Return π(a|s), ``[states, actions]``."""
        return softmax(theta.reshape(self.actions, self.size).T)

    def log_barrier(self, theta: Array, strength: float) -> float:
        """Return −λ E_s KL(uniform, π(·|s)), the regularizer of He & Zhou's J_λ (equation 10)."""
        log = np.log(self.probabilities(theta))
        return float(strength * (log.mean() + np.log(self.actions)))

    def log_barrier_gradient(self, theta: Array, strength: float) -> Array:
        """Return its gradient, ``[d]``. It depends on no user: it is added after the release."""
        slope = (1 / self.actions - self.probabilities(theta)) * strength / self.size
        return slope.T.ravel()


@dataclass(frozen=True)
class TwoLayer:
    """Linear(size, hidden), ReLU or tanh, Linear(hidden, outputs); or one Linear without hidden.

    Attributes:
        size: Number of inputs.
        hidden: Number of hidden units; 0 makes the network one linear layer.
        outputs: Number of outputs.
        activation: ``relu`` or ``tanh``.
    """

    size: int
    hidden: int
    outputs: int
    activation: str = "relu"

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of weights and biases, in the order of θ."""
        sizes = [self.size, self.hidden, self.outputs] if self.hidden else [self.size, self.outputs]
        pairs = itertools.pairwise(sizes)
        return [shape for a, b in pairs for shape in ((b, a), (b,))]

    @property
    def dimension(self) -> int:
        """The number of parameters."""
        return sum(int(np.prod(shape)) for shape in self.shapes)

    def initial(self, rng: np.random.Generator, last: float = 1.0) -> Array:
        """Return weights with variance 1 / inputs, those of the last layer times ``last``."""
        parts = []
        for number, shape in enumerate(self.shapes):
            scale = last if number >= len(self.shapes) - 2 else 1.0
            weight = len(shape) == 2
            part = rng.normal(size=shape) / np.sqrt(shape[-1]) if weight else np.zeros(shape)
            parts.append(scale * part.ravel())
        return np.concatenate(parts)

    def split(self, theta: Array) -> list[Array]:
        """Return weights and biases."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes])[:-1]
        parts = np.split(theta, ends, axis=-1)
        lead = theta.shape[:-1]
        return [p.reshape(*lead, *s) for p, s in zip(parts, self.shapes, strict=True)]

    def forward(self, theta: Array, inputs: Array) -> tuple[Array, Array]:
        """Return outputs, ``[..., outputs]``, and hidden values, ``[..., hidden]``."""
        parts = self.split(theta)
        if not self.hidden:
            return _apply(parts[0], inputs) + parts[1], inputs
        before = _apply(parts[0], inputs) + parts[1]
        hidden = np.maximum(before, 0.0) if self.activation == "relu" else np.tanh(before)
        return _apply(parts[2], hidden) + parts[3], hidden

    def backward(
        self, theta: Array, inputs: Array, hidden: Array, slope: Array, *, total: bool
    ) -> Array:
        """Return the gradient of slope · outputs, ``[users, steps, d]``, or summed over steps.

        Args:
            slope: ``[users, steps, outputs]``.
        """
        pairs = [(slope, hidden)]
        if self.hidden:
            back = slope @ self.split(theta)[2]
            gate = hidden > 0 if self.activation == "relu" else 1 - hidden**2
            pairs.insert(0, (back * gate, inputs))
        parts: list[Any] = []
        for out, into in pairs:
            if total:
                weight: Array = np.matmul(out.swapaxes(-1, -2), into)
                parts += [weight.reshape(len(out), -1), out.sum(1)]
            else:
                weight = out[..., :, None] * into[..., None, :]
                parts += [weight.reshape(*out.shape[:-1], -1), out]
        return np.concatenate(parts, -1)


@dataclass(frozen=True)
class MLPSoftmax:
    """Linear(size, hidden)-ReLU-Linear(hidden, actions)-Softmax (He & Zhou, appendix H).

    Attributes:
        size: Number of entries of an observation.
        actions: Number of actions.
        hidden: Number of hidden units.
        scale: Public constants that observations are multiplied by, ``[size]``.
    """

    size: int
    actions: int
    hidden: int = 64
    scale: tuple[float, ...] | None = None

    @property
    def net(self) -> TwoLayer:
        """The network of the logits."""
        return TwoLayer(self.size, self.hidden, self.actions)

    @property
    def dimension(self) -> int:
        """The number d of parameters."""
        return self.net.dimension

    @property
    def draws(self) -> int:
        """One uniform number picks one of the actions."""
        return 1

    def initial(self, rng: np.random.Generator) -> Array:
        """Return random weights; the last layer's are small, so the policy is nearly uniform."""
        return self.net.initial(rng, last=0.1)

    def inputs(self, observations: Array) -> Array:
        """Return the scaled observations."""
        return observations if self.scale is None else observations * np.asarray(self.scale)

    def act(self, theta: Array, observations: Array, uniforms: Array) -> Array:
        """Return the actions, ``[users]``."""
        return _sample(self.net.forward(theta, self.inputs(observations))[0], uniforms)

    def logprobs(self, theta: Array, observations: Array, actions: Array) -> Array:
        """Return log π, ``[users, steps]``."""
        return _of_action(self.net.forward(theta, self.inputs(observations))[0], actions)[0]

    def scores(self, theta: Array, observations: Array, actions: Array) -> Array:
        """Return ∇ log π, ``[users, steps, d]``."""
        x = self.inputs(observations)
        logits, hidden = self.net.forward(theta, x)
        slope = _of_action(logits, actions)[1]
        return self.net.backward(theta, x, hidden, slope, total=False)

    def weighted_scores(
        self, theta: Array, observations: Array, actions: Array, weights: Array
    ) -> Array:
        """Return Σ_t weight · ∇ log π, ``[users, d]``."""
        x = self.inputs(observations)
        logits, hidden = self.net.forward(theta, x)
        slope = _of_action(logits, actions)[1] * weights[..., None]
        return self.net.backward(theta, x, hidden, slope, total=True)


@dataclass(frozen=True)
class GaussianMLP:
    """N(f_θ(s), diag σ²) with f of one tanh layer, or linear; log σ is part of θ, or fixed.

    Attributes:
        size: Number of entries of an observation.
        actions: Number of entries of an action.
        hidden: Number of hidden units; 0 makes f linear.
        std: Standard deviation σ at the start; 0 makes the policy deterministic, with no gradient.
        learn_std: Whether log σ is trained.
        scale: Public constants that observations are multiplied by, ``[size]``.
        shift: Public constants subtracted from observations before that, ``[size]``.
        spread: Factor on f plus noise that gives the action's distance from ``center``.
        center: Action where f is 0 and there is no noise.
    """

    size: int
    actions: int
    hidden: int = 64
    std: float = 0.5
    learn_std: bool = False
    scale: tuple[float, ...] | None = None
    shift: tuple[float, ...] | None = None
    spread: float = 1.0
    center: float = 0.0

    @property
    def net(self) -> TwoLayer:
        """The network f of the mean."""
        return TwoLayer(self.size, self.hidden, self.actions, "tanh")

    @property
    def dimension(self) -> int:
        """The number d of parameters."""
        return self.net.dimension + (self.actions if self.learn_std else 0)

    @property
    def draws(self) -> int:
        """One uniform number for each entry of an action; none for a deterministic policy."""
        return self.actions if self.std else 0

    def initial(self, rng: np.random.Generator) -> Array:
        """Return a mean of nearly 0 (exactly 0 if f is linear), and log σ."""
        net = self.net.initial(rng, last=0.1 if self.hidden else 0.0)
        return np.concatenate([net, np.full(self.dimension - len(net), np.log(self.std or 1.0))])

    def inputs(self, observations: Array) -> Array:
        """Return the shifted and scaled observations."""
        x = observations if self.shift is None else observations - np.asarray(self.shift)
        return x if self.scale is None else x * np.asarray(self.scale)

    def _split(self, theta: Array) -> tuple[Array, Array]:
        if not self.learn_std:
            return theta, np.full(self.actions, np.log(self.std or 1.0))
        return theta[..., : -self.actions], theta[..., -self.actions :]

    def act(self, theta: Array, observations: Array, uniforms: Array) -> Array:
        """Return the actions, ``[users, actions]``."""
        net, log_std = self._split(theta)
        mean = self.net.forward(net, self.inputs(observations))[0]
        noise = np.exp(log_std) * ndtri(uniforms) if self.std else 0.0
        return np.asarray(self.center + self.spread * (mean + noise))

    def _standardized(self, theta: Array, x: Array, actions: Array) -> tuple[Array, Array, Array]:
        net, log_std = self._split(theta)
        mean, hidden = self.net.forward(net, x)
        return ((actions - self.center) / self.spread - mean) / np.exp(log_std), log_std, hidden

    def logprobs(self, theta: Array, observations: Array, actions: Array) -> Array:
        """Return log π, ``[users, steps]``."""
        off, log_std, _ = self._standardized(theta, self.inputs(observations), actions)
        each = -0.5 * off**2 - log_std - 0.5 * np.log(2 * np.pi) - np.log(self.spread)
        return np.asarray(each.sum(-1))

    def scores(self, theta: Array, observations: Array, actions: Array) -> Array:
        """Return ∇ log π, ``[users, steps, d]``."""
        return self._gradient(theta, observations, actions, None)

    def weighted_scores(
        self, theta: Array, observations: Array, actions: Array, weights: Array
    ) -> Array:
        """Return Σ_t weight · ∇ log π, ``[users, d]``."""
        return self._gradient(theta, observations, actions, weights)

    def _gradient(
        self, theta: Array, observations: Array, actions: Array, weights: Array | None
    ) -> Array:
        x = self.inputs(observations)
        off, log_std, hidden = self._standardized(theta, x, actions)
        slope = off / np.exp(log_std)
        by_std = off**2 - 1
        if weights is not None:
            slope, by_std = slope * weights[..., None], (by_std * weights[..., None]).sum(1)
        net, _ = self._split(theta)
        mean = self.net.backward(net, x, hidden, slope, total=weights is not None)
        return np.concatenate([mean, by_std], -1) if self.learn_std else mean
