"""Tight privacy curve of one-out-of-T random allocation with Gaussian noise.

Each user takes part in one of T rounds, drawn uniformly and in secret. By Feldman & Shenfeld
(arXiv 2502.08202, Theorem 3.1; arXiv 2602.17284) the run is dominated, under add/remove, by
P = (1/T) Σ_i N(e_i, z² I) against Q = N(0, z² I). With X_1..X_T independent and log-normal,
log X ~ N(-1/(2z²), 1/z²), and S = ΣX_i, the two curves are

    delta_remove(eps) = E[(S/T - e^eps)_+],     delta_add(eps) = E[(1 - e^eps S/T)_+].

Both are computed here as rigorous upper bounds: X is rounded to a lattice so that mass and mean
of every cell are kept (which can only raise a convex expectation), the T-fold sum is taken by an
exponentially tilted FFT, and what is cut off, wrapped around or rounded is bounded and added.
``docs/proofs/random_allocation_accounting.md`` has the argument, step by step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import fft
from scipy.optimize import brentq
from scipy.special import ndtr

from dprlhf.privacy.gaussian import find_root, gaussian_delta, gaussian_epsilon

Side = Literal["remove", "add"]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LARGEST_NOISE = 1e4
"""Above this noise multiplier the lattice would need more than double precision."""
SMALLEST_NOISE = 0.03
"""Below it, epsilon is in the hundreds and the mass that decides it lies out of the lattice."""
LARGEST_EPSILON = 500.0
"""Above this epsilon one Gaussian bounds the curve.

``e^eps`` leaves the range of double precision above 709, and its square above 354. The lattice
forms ``T e^eps`` but squares nothing of that size, so there is room for every T.
"""

FINE, MEDIUM, ROUGH = 1e-5, 1e-4, 1e-3
"""Estimated relative rise of epsilon that the lattice may cause. The bounds are rigorous at each;
FINE is for what is reported, the others are for finding it."""

_UNIT = 2.0**-53
_WEIGHT_ERROR = 1e-10  # relative error of a lattice weight: quadrature, exp, log and tilting
_TAIL_ERROR = 1e-10  # relative error of the closed-form tail
_REACH = 37.0  # standard deviations of log X kept; the normal density underflows past 38
_PIECE = 0.02  # longest quadrature interval, in standard deviations of log X
_CUT = 25.0  # the payoff is summed up to where its exponential weight has fallen to e^-25
_SPREAD = 8.0  # standard deviations of the tilted sum that the window keeps on the other side
_SIZES = [2**k for k in range(10, 20)]
_GAUSS_NODES, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(6)
_NODES, _NODE_WEIGHTS = (_GAUSS_NODES + 1) / 2, _GAUSS_WEIGHTS / 2  # on [0, 1]


@dataclass(frozen=True)
class Bracket:
    """Certified bounds on one value of a privacy curve."""

    upper: float  # Upper bound on δ(ε)
    lower: float  # Lower bound on δ at epsilon_lower
    epsilon_lower: float


@dataclass(frozen=True)
class _Lattice:
    """The distribution of X rounded to multiples of ``step``: atoms and their weights."""

    step: float
    atoms: Ints
    weights: Floats
    shift: float  # with `scale`, for lower bounds: (X' - shift) / (1 + scale) lies below X
    scale: float


def _lattice(sigma: float, step: float, top: int) -> _Lattice:
    """Move X, up to ``top * step``, to the ends of its cells, keeping each cell's mass and mean."""
    # Cells are one step wide near zero and grow in proportion to X further out.
    growth = 0.003 * min(sigma, 1.0)
    reach = [sigma * (s * _REACH - sigma / 2) - math.log(step) for s in (-1, 1)]
    first = max(1, min(top, int(math.exp(min(reach[0], 40.0)))))
    last = max(first, min(top, math.ceil(math.exp(min(reach[1], 40.0)))))
    bend = max(first, math.ceil(1 / growth))  # cells to the left of it are one step wide
    if last <= bend:
        edges = np.arange(first, last + 1)
    else:
        count = math.ceil(math.log(last / bend) / growth)
        far = np.rint(bend * np.exp(growth * np.arange(1, count))).astype(np.int64)
        edges = np.concatenate([np.arange(first, bend + 1), far[far < last], [last]])
        edges = edges[np.append(True, edges[1:] > edges[:-1])]  # it is sorted: far > bend
    left, width = edges[:-1], np.diff(edges)
    relative = width / left
    start = np.log(left * step) / sigma + sigma / 2
    span = np.log1p(relative) / sigma
    pieces = np.ceil(span / _PIECE).astype(np.int64)
    cell = np.repeat(np.arange(len(left)), pieces)
    begin = np.cumsum(pieces) - pieces
    part = (span / pieces)[cell]
    along = (np.arange(len(cell)) - begin[cell] + _NODES[:, None]) * part  # [node, piece]
    density = np.exp(-0.5 * (start[cell] + along) ** 2) * (_NODE_WEIGHTS[:, None] * part)
    density /= math.sqrt(2 * math.pi)
    fraction = np.minimum(np.expm1(sigma * along) / relative[cell], 1.0)

    def per_cell(values: Floats) -> Floats:
        summed = values.sum(axis=0)
        return np.add.reduceat(summed, begin) if len(begin) else summed

    # The first cell, [0, edges[0]], reaches down to zero: closed form.
    t = math.log(first * step) / sigma + sigma / 2
    mass, mean = float(ndtr(t)), float(ndtr(t - sigma))
    up = min(mass, mean / (first * step))
    weights = np.zeros(len(edges) + 1)
    weights[0], weights[1] = mass - up, up
    weights[1:-1] += per_cell(density * (1 - fraction))
    weights[2:] += per_cell(density * fraction)

    # How far each cell must move down so that the split lies below X again (see `_Lattice.shift`).
    gap = np.append(mean, step * width * per_cell(density * fraction * (1 - fraction)))
    right = np.append(t, start + span)
    with np.errstate(divide="ignore", invalid="ignore"):
        need = gap / ndtr(-right)
    need = np.fmin(need, step * np.append(first, width))
    near = np.append(0, left) < bend
    ratio = float((need[~near] / (step * left[~near[1:]])).max()) if not near.all() else 0.0
    scale = ratio / (1 - ratio)
    shift = (1 + scale) * float(need[near].max())
    return _Lattice(step, np.append(0, edges), weights, shift, scale)


@dataclass(frozen=True)
class _Plan:
    """The tilt and the window for one evaluation, in units of the threshold C."""

    tilt: float
    reach: float  # distance beyond C over which the payoff is summed
    window: float
    size: int


def _plan(
    sigma: float, rounds: int, threshold: float, cap: float, side: Side, precision: float
) -> _Plan:
    """Choose the tilt, the window and the FFT length from a rough quadrature of X."""
    # Every choice gives a valid bound, a good one a tight bound: rough values are enough.
    sign = 1.0 if side == "remove" else -1.0
    top = min(_REACH, math.log(cap) / sigma + sigma / 2)
    bottom = max(-_REACH, min(top, sigma) - 45.0) if side == "remove" else -_REACH
    t = np.linspace(bottom, top, 1500)
    y = np.exp(sigma * (t - sigma / 2) - math.log(threshold))
    log_weight = -0.5 * t * t + math.log((t[1] - t[0]) / math.sqrt(2 * math.pi))

    def tilted(theta: float) -> Floats:
        w = log_weight + sign * theta * y
        w = np.exp(w - w.max())
        return w / w.sum()  # type: ignore[no-any-return]

    def slope(log_theta: float) -> float:
        theta = math.exp(log_theta)
        return sign * (rounds * float(tilted(theta) @ y) - 1) - 2 / theta

    low, high = math.log(1e-3), math.log(1e8)
    if slope(high) <= 0:
        theta = math.exp(high)
    elif slope(low) >= 0:
        theta = math.exp(low)
    else:
        theta = math.exp(brentq(slope, low, high, xtol=1e-3, rtol=1e-3))
    if side == "remove":
        # The full tilt makes large jumps likely, and sums of several would wrap around.
        theta *= 0.75
    w = tilted(theta)
    center = rounds * float(w @ y)
    spread = _SPREAD * math.sqrt(rounds * float(w @ (y - w @ y) ** 2))
    if side == "remove":
        reach = _CUT / theta
        window = reach + 1 - max(0.0, min(center, 1.0) - spread)
    else:
        reach = min(1.0, _CUT / theta)
        window = reach + max(center + 1.2 * spread - 1, 0.0)
    window *= 1.001  # room for the positions at both ends
    # The lattice adds `extra` variance to the sum, which costs theta * extra / 2 in epsilon.
    epsilon = abs(math.log(threshold / rounds))
    allowed = 2 * precision * max(epsilon, 0.02) / theta
    for size in _SIZES[0 if precision >= ROUGH else 4 :]:
        h = window / size
        if rounds * float(w @ np.minimum(h * h / 6, h * y)) <= allowed:
            break
    return _Plan(theta, reach, window, size)


def power(base: npt.NDArray[np.complex128], exponent: int) -> npt.NDArray[np.complex128]:
    """Return ``base ** exponent``, with a relative error of at most 5 · exponent units."""
    result = np.ones_like(base)
    while exponent:
        if exponent & 1:
            result *= base
        exponent >>= 1
        if exponent:
            base = base * base
    return result


def _payoff(
    lattice: _Lattice, rounds: int, threshold: float, plan: _Plan, side: Side, lower: bool
) -> tuple[float, float, float]:
    """Return E[(S' - C)_+] (remove) or E[(C - S')_+] (add) over the lattice atoms, divided by C."""
    sign = 1.0 if side == "remove" else -1.0
    n, theta, h = plan.size, plan.tilt, lattice.step / threshold
    y = lattice.atoms * h
    with np.errstate(divide="ignore"):
        log_weights = np.log(lattice.weights)

    def log_moment(tilt: float) -> float:
        w = log_weights + tilt * y
        top = float(w.max())
        return top + math.log(float(np.exp(w - top).sum()))

    log_m = log_moment(sign * theta)
    tilted = np.exp(log_weights + sign * theta * y - log_m)
    folded = np.bincount(lattice.atoms % n, weights=tilted, minlength=n)
    total = fft.irfft(power(fft.rfft(folded), rounds), n)
    if side == "remove":
        positions = np.arange(math.ceil(1 / h), math.ceil((1 + plan.reach) / h) + 1)
    else:
        positions = np.arange(max(0, math.floor((1 - plan.reach) / h)), math.floor(1 / h) + 1)
    positions = positions[:n] if side == "remove" else positions[-n:]
    excess = np.maximum(sign * (positions * h - 1), 0.0)
    payoff = excess * np.exp(-theta * excess)
    value = float(total[positions % n] @ payoff)

    per_fft = 8 * _UNIT * math.log2(n)
    error = (1.01 * rounds * (per_fft + 10 * _UNIT) + per_fft) * math.sqrt(float(folded @ folded))
    rounding = error * math.sqrt(float(payoff @ payoff)) + 16 * _UNIT
    peak = 1 / (math.e * theta)  # the largest weight y e^(-theta y)
    reached = float(excess.max(initial=0.0))
    # Sums beyond the last position: their weight, if it is on the falling side, is at most this.
    beyond = reached * math.exp(-theta * reached) if reached * theta >= 1 else peak
    if side == "add" and positions[0] == 0:
        beyond = 0.0

    wrapped = 0.0
    if lower:
        wrapped = _chernoff(log_moment, rounds, theta, 1 + plan.window, 1.0)
        if 1 + plan.reach - plan.window > 0:
            wrapped += _chernoff(log_moment, rounds, theta, 1 + plan.reach - plan.window, -1.0)
    log_front = rounds * log_m - sign * theta
    if log_front > 600:  # a useless bound, and out of range
        return math.inf, 0.0, math.inf
    front = math.exp(log_front)
    slack = math.expm1(2 * rounds * _WEIGHT_ERROR)
    value = max(value, 0.0)
    return (
        front * value,
        front * (rounding + beyond + slack * value),
        front * (rounding + peak * wrapped + slack * value),
    )


def _chernoff(
    log_moment: Callable[[float], float], rounds: int, tilt: float, bound: float, direction: float
) -> float:
    """Bound P(S' beyond bound) under the law tilted by ``tilt``; direction +1 above, -1 below."""
    best, log_m = 0.0, log_moment(tilt)
    for step in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2):
        extra = direction * step * tilt
        best = min(best, rounds * (log_moment(tilt + extra) - log_m) - extra * bound)
    return math.exp(best)


def _log_tail(sigma: float, bound: float | Floats) -> tuple[Floats, Floats]:
    """Return P(X > bound) and E[X; X > bound]."""
    t = np.log(bound) / sigma + sigma / 2
    return ndtr(-t), ndtr(sigma - t)


def _jumps(
    sigma: float, rounds: int, threshold: float, cap: float | Floats
) -> tuple[Floats, Floats]:
    """Return E[S - C; some X_i > cap] in closed form, and its rounding error."""
    p, q = _log_tail(sigma, cap)
    p, q = np.minimum(p, 1 - 1e-16), np.minimum(q, 1 - 1e-16)
    mean = -rounds * np.expm1(np.log1p(-q) + (rounds - 1) * np.log1p(-p))
    cost = -threshold * np.expm1(rounds * np.log1p(-p))
    return mean - cost, _TAIL_ERROR * (mean + cost)


def bracket(
    noise: float,
    rounds: int,
    epsilon: float,
    side: Side,
    precision: float = FINE,
    *,
    lower: bool = True,
) -> Bracket:
    """Bound one point of the privacy curve of one-out-of-``rounds`` random allocation."""
    sigma = 1 / noise
    if side == "add":
        threshold = rounds * math.exp(-epsilon)
        plan = _plan(sigma, rounds, threshold, threshold, side, precision)
        step = plan.window * threshold / plan.size
        lattice = _lattice(sigma, step, math.ceil(threshold / step))
        value, plus, _ = _payoff(lattice, rounds, threshold, plan, side, lower=False)
        return Bracket(min(1.0, value + plus + 1e-280), 0.0, -math.inf)  # e^eps * C / T = 1
    threshold = rounds * math.exp(epsilon)
    # Past `cap` one X_i all but decides that S > C, and the payoff is linear: closed form.
    log_second = math.log(rounds - 1) + sigma * sigma
    second = math.exp(min(log_second, 1300.0) / 2)  # root of (T - 1) E[X²]
    cap = min(threshold, threshold - (rounds - 1) + 9 * second)
    cap = min(cap, math.exp(min(sigma * (_REACH - sigma / 2), 700.0)))
    plan = _plan(sigma, rounds, threshold, cap, side, precision)
    step = plan.window * threshold / plan.size
    top = math.ceil(cap / step)
    cap = top * step
    lattice = _lattice(sigma, step, top)
    value, plus, minus = _payoff(lattice, rounds, threshold, plan, side, lower)
    jump, jump_error = (float(x) for x in _jumps(sigma, rounds, threshold, cap))
    # (S - C)_+ = (S - C) + (C - S)_+, and the last term is small given a jump past the cap.
    short = max(threshold - cap, 0.0)
    distance = rounds - 1 - short
    if short and distance > 0:
        ratio = distance / second
        short = min(short, second / (math.e * ratio) * math.exp(-ratio * ratio / 2))
    missed = rounds * float(_log_tail(sigma, cap)[0]) * short
    c = threshold / rounds
    upper = c * (value + plus) + (jump + jump_error + missed) / rounds + 1e-280
    if not lower:
        return Bracket(min(1.0, upper), 0.0, -math.inf)
    least = c * (value - minus) + (jump - jump_error) / rounds
    return Bracket(min(1.0, upper), *_lower(least, c, rounds, lattice))


def _lower(value: float, c: float, rounds: int, lattice: _Lattice) -> tuple[float, float]:
    """Return a lower bound on δ from ``value <= E[(S'/T - c)_+]``, and the ε where it holds."""
    if value <= 0:
        return 0.0, -math.inf
    # Either every cell moves down by `shift`, or the narrow cells' rounding D, whose T terms have
    # mean zero and range `step`, is cut at `a` by Hoeffding's bound at a cost of E[(D - a)_+].
    root = lattice.step / (2 * math.sqrt(rounds))  # of the variance proxy of D / T
    a = root * math.sqrt(2 * math.log(max(math.e, root / (math.e * 1e-3 * value))))
    if lattice.shift <= a:
        room, cost = c - lattice.shift, 0.0
    else:
        room, cost = c - a, root * root / (math.e * a) * math.exp(-a * a / (2 * root * root))
    room /= 1 + lattice.scale
    lower = (value - cost) / (1 + lattice.scale)
    return lower, math.log(room) if room > 0 else -math.inf


@functools.lru_cache(2**14)  # a run and its total ask for the same points of one curve
def delta(noise: float, rounds: int, epsilon: float, side: Side, precision: float = FINE) -> float:
    """Return an upper bound on δ of one side at ``epsilon >= 0``, at any noise multiplier."""
    # Both payoffs are convex in S/T, so a single Gaussian release is never cheaper.
    single = gaussian_delta(noise, epsilon)
    if _only_single(noise, rounds) or epsilon > LARGEST_EPSILON or single < 1e-200:
        return single
    return min(single, bracket(noise, rounds, epsilon, side, precision, lower=False).upper)


def epsilon(noise: float, rounds: int, delta_: float, side: Side) -> float:
    """Return an upper bound on ε of one side at ``delta_``; 0 where δ(0) <= ``delta_`` already."""
    high = gaussian_epsilon(noise, delta_)
    if _only_single(noise, rounds) or high == 0:
        return high
    low = _single_jump(noise, rounds, delta_) if side == "remove" else 0.0
    if low > LARGEST_EPSILON:
        return high
    if low == 0 and delta(noise, rounds, 0.0, side) <= delta_:
        return 0.0
    # Past this ε the curve is that of the single Gaussian, far above what comes before.
    if high > LARGEST_EPSILON and delta(noise, rounds, LARGEST_EPSILON, side) <= delta_:
        high = LARGEST_EPSILON
    return find_root(
        lambda e: delta(noise, rounds, e, side),
        low,
        high,
        delta_,
        rough=lambda e: delta(noise, rounds, e, side, ROUGH),
    )


def _only_single(noise: float, rounds: int) -> bool:
    """Return whether the only bound available is the curve of a single Gaussian release."""
    return rounds == 1 or not SMALLEST_NOISE <= noise <= LARGEST_NOISE


def _single_jump(noise: float, rounds: int, delta_: float) -> float:
    """Return a lower bound on ε of the remove side: S >= X_1 gives δ(ε) >= G(ε + ln T) / T."""
    if rounds * delta_ >= 1:
        return 0.0
    return max(0.0, gaussian_epsilon(noise, rounds * delta_) * (1 - 1e-7) - math.log(rounds))


def epsilon_lower(noise: float, rounds: int, delta_: float, upper: float) -> float:
    """Return a certified lower bound on ε at ``delta_``, given the upper bound ``upper``."""
    best = _single_jump(noise, rounds, delta_)
    if _only_single(noise, rounds) or not 0 < upper <= LARGEST_EPSILON:
        return min(best, upper)
    back = 1e-4
    while back < 0.1:
        point = bracket(noise, rounds, upper * (1 - back), "remove", FINE / 10)
        if point.lower >= delta_:
            return max(best, point.epsilon_lower)
        back *= 2
    return best


SIDES: tuple[Side, Side] = ("remove", "add")


@dataclass(frozen=True)
class Curves:
    """Upper bounds on both sides' privacy curves, δ as a function of ε, and their inverses.

    The side ``remove`` compares the run with a user to the run without it, ``add`` the other way.
    """

    delta: Callable[[float, Side, bool], float]  # of epsilon, side, rough
    epsilon: Callable[[float, Side], float]  # of delta, side
