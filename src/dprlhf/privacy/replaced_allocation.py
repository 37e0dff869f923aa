"""Privacy curve of one-out-of-T random allocation where one user is replaced by another.

The pair P = (1/T) Σ_i N(e_i, z² I) against Q = (1/T) Σ_i N(−e_i, z² I) dominates every run in which
a user's contribution of norm at most 1 is replaced by another, adaptively chosen rounds included
(``docs/proofs/random_allocation_accounting.md``, step 9). With σ = 1/z, g_i independent standard
normal, c = e^ε and W = e^{σg − σ²/2} − c e^{−σg − σ²/2},

    delta(eps) = E[(W_1 + … + W_T)_+] / T.

It is computed as a rigorous upper bound in the way of :mod:`dprlhf.privacy.random_allocation`: W up
to a bound B is rounded to a lattice so that mass and mean of every cell are kept, the T-fold sum is
taken by an exponentially tilted FFT, and what is cut off, wrapped around or rounded is added.

Any mechanism's curves with a user against one without bound a replacement, too, as a removal and an
addition (:func:`replace_one_epsilon`).
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt
from scipy import fft
from scipy.optimize import brentq, minimize_scalar
from scipy.special import ndtr

from dprlhf.privacy.gaussian import gaussian_delta
from dprlhf.privacy.random_allocation import Curves, Floats, Side, power

LARGEST_EPSILON = 50.0
"""Above this ε nothing is computed: the other bounds are taken."""

_UNIT = 2.0**-53
_WEIGHT_ERROR = 1e-10  # relative error of a lattice weight: quadrature, exp and tilting
_TAIL_ERROR = 1e-10  # relative error of the closed-form tail
_PIECE = 0.02  # longest quadrature interval, in standard deviations of g
_CUT = 25.0  # the payoff is summed up to where its exponential weight has fallen to e^-25
_MOST_CELLS = 2**21
_GAUSS_NODES, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(6)
_NODES, _NODE_WEIGHTS = (_GAUSS_NODES + 1) / 2, _GAUSS_WEIGHTS / 2  # on [0, 1]


@functools.lru_cache(2**14)  # a run and its total ask for the same points of one curve
def delta(noise: float, rounds: int, epsilon: float, rough: bool = False) -> float:
    """Return an upper bound on δ(ε), at most 1; 1 where nothing can be computed."""
    sigma = 1 / noise
    if not 0 <= epsilon <= LARGEST_EPSILON or not 0.05 <= sigma <= 8 or rounds < 2:
        return 1.0
    c, size = math.exp(epsilon), 2**14 if rough else 2**17
    bound = _bound(sigma, c, rounds)
    theta, width = _tilt(sigma, c, rounds, bound)
    step = width / size
    left = min(40 / theta, 0.8 * width)
    cells = (bound + left) / step
    if cells > _MOST_CELLS:
        step *= cells / _MOST_CELLS
    atoms, weights = _lattice(sigma, c, step, math.ceil(left / step), math.ceil(bound / step))
    summed = _payoff(atoms, weights, step, theta, rounds, size)
    bound = float(atoms[-1]) * step
    return min(1.0, (summed + _jumps(sigma, c, rounds, bound)) / rounds)


def epsilon(
    noise: float, rounds: int, delta_: float, low: float, high: float, rough: bool = False
) -> float:
    """Return an ε in [low, high] whose δ is at most ``delta_``; ``high`` where none is found."""
    if not low < high <= LARGEST_EPSILON:
        return high

    def excess(e: float) -> float:
        return math.log(max(delta(noise, rounds, e, rough), 1e-300) / delta_)

    if excess(low) <= 0:
        return low
    # Far past the crossing, δ is too small for the lattice: look for the crossing from below.
    below, above = low, low
    for part in range(1, 13):
        below, above = above, low + part / 12 * (high - low)
        if excess(above) <= 0:
            break
    else:
        return high
    near = float(brentq(excess, below, above, xtol=1e-5 * above))
    for slack in (0.0, 2e-5, 1e-4, 1e-3):
        tried = near * (1 + slack)
        if tried < high and excess(tried) <= 0:
            return tried
    return high


def curve(noise: float, rounds: int, epsilons: Floats) -> Floats:
    """Return upper bounds on δ that, reflected to negative ε, are convex in e^ε."""
    # P and Q are mirror images, so H_{e^-t}(P‖Q) = 1 − e^-t + e^-t H_{e^t}(P‖Q). The true curve is
    # convex in e^ε, so the lower convex hull of the bounds is a bound: the sharper one near ε = 0,
    # and loss distributions of bounds that are not convex would gain mass (proof note, step 10).
    given = [(delta(noise, rounds, e, rough=True), gaussian_delta(noise / 2, e)) for e in epsilons]
    deltas, t = np.min(given, axis=1), epsilons[:0:-1]
    bounds = np.concatenate([-np.expm1(-t) + np.exp(-t) * deltas[:0:-1], deltas])
    corners: list[int] = []
    places = np.exp(np.concatenate([-t, epsilons]))
    for new in range(len(places)):
        while len(corners) > 1:
            before, last = corners[-2:]
            rise, run = bounds[[last, new]] - bounds[before], places[[last, new]] - places[before]
            if rise[0] * run[1] < rise[1] * run[0]:
                break
            corners.pop()
        corners.append(new)
    hull = np.interp(places[len(t) :], places[corners], bounds[corners])
    # Chords that end near 1, at negative ε, are rounded by units of 1, not of what they bound.
    lower: Floats = np.minimum(deltas, hull * (1 + 16 * _UNIT) + 8 * _UNIT)
    return lower


def _g_of(sigma: float, c: float, w: Floats) -> Floats:
    """Return g as a function of W, which grows with it."""
    scaled = w * math.exp(sigma**2 / 2)
    root = np.sqrt(scaled**2 + 4 * c)
    x = np.where(scaled >= 0, (scaled + root) / 2, 2 * c / (root - np.minimum(scaled, 0)))
    value: Floats = np.log(x) / sigma
    return value


def _bound(sigma: float, c: float, rounds: int) -> float:
    """Choose B: the least of a grid past which the bound on jumps is sharp; none is invalid."""
    mean = (rounds - 1) * (c - 1)
    p, q = _tails(sigma, c, mean)
    least = q - mean * p  # E(W − mean)_+, which is at most E(S)_+ by Jensen's inequality
    bound = mean + c
    for _ in range(60):
        p, _ = _tails(sigma, c, bound)
        if rounds * p * _below(sigma, c, rounds, bound) <= 1e-5 * least:
            break
        bound *= 1.3
    return bound


def _tails(sigma: float, c: float, bound: float) -> tuple[float, float]:
    """Return P(W > bound) and E[W; W > bound]."""
    g = float(_g_of(sigma, c, np.array(bound)))
    return float(ndtr(-g)), float(ndtr(sigma - g)) - c * float(ndtr(-sigma - g))


def _below(sigma: float, c: float, rounds: int, bound: float) -> float:
    """Return an upper bound on E(M − bound)_+, where M = −(W_2 + … + W_T)."""
    # Var W, with Var X = Var Y = e^{σ²} − 1 and Cov(X, Y) = e^{−σ²} − 1.
    variance = (1 + c * c) * math.expm1(sigma**2) - 2 * c * math.expm1(-(sigma**2))
    room = bound - (rounds - 1) * (c - 1)
    square = (rounds - 1) * variance / (4 * room)  # (y)_+ ≤ (y + d)²/4d
    # M ≤ c ΣY, and the mean of several Y is below one Y in convex order.
    k = bound / (c * (rounds - 1))
    g = math.log(k) / sigma + sigma / 2
    one = float(ndtr(sigma - g)) - k * float(ndtr(-g))
    return min(square, c * (rounds - 1) * (max(one, 0.0) + _TAIL_ERROR * float(ndtr(sigma - g))))


def _tilt(sigma: float, c: float, rounds: int, bound: float) -> tuple[float, float]:
    """Choose the tilt and the window's width from a rough quadrature; no choice is invalid."""
    # Up to B, however unlikely that is: near it the tilted mass may be largest.
    g = np.linspace(-9, float(_g_of(sigma, c, np.array(bound))), 4000)
    w = np.exp(sigma * g - sigma**2 / 2) - c * np.exp(-sigma * g - sigma**2 / 2)
    log_mass = -(g**2) / 2

    def log_moment(theta: float) -> float:
        exponents = log_mass + theta * w
        top = float(exponents.max())
        return top + math.log(float(np.exp(exponents - top).sum()))

    low, high = 1e-3 / bound, 1e4 / bound
    optimum = minimize_scalar(
        lambda t: log_moment(math.exp(t)),
        bounds=(math.log(low), math.log(high)),
        method="bounded",
    )
    theta = math.exp(float(optimum.x))
    tilted = np.exp(log_mass + theta * w - log_moment(theta))
    tilted /= tilted.sum()
    centre = float(tilted @ w)
    spread = math.sqrt(rounds * float(tilted @ (w - centre) ** 2))
    return theta, 2 * max(_CUT / theta, 10 * spread + rounds * abs(centre))


def _lattice(
    sigma: float, c: float, step: float, left: int, right: int
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Return the atoms, in steps, and weights of W ≤ ``right`` steps, moved to its cells' ends."""
    # Mass and mean of every cell are kept; what is below −left steps is moved up to it.
    atoms = np.arange(-left, right + 1)
    edges = _g_of(sigma, c, np.multiply(atoms, step, dtype=np.float64))
    begin, span = edges[:-1], np.diff(edges)
    pieces = np.maximum(np.ceil(span / _PIECE).astype(np.int64), 1)
    cell = np.repeat(np.arange(len(begin)), pieces)
    first = np.cumsum(pieces) - pieces
    part = (span / pieces)[cell]
    along = (np.arange(len(cell)) - first[cell] + _NODES[:, None]) * part
    start = begin[cell]
    density = np.exp(-0.5 * (start + along) ** 2) * (_NODE_WEIGHTS[:, None] * part)
    density /= math.sqrt(2 * math.pi)
    # W(g) − W(start of the cell), as a sum of two positive terms.
    risen = np.exp(sigma * start - sigma**2 / 2) * np.expm1(sigma * along)
    risen -= c * np.exp(-sigma * start - sigma**2 / 2) * np.expm1(-sigma * along)
    fraction = np.clip(risen / step, 0.0, 1.0)
    up = np.add.reduceat((density * fraction).sum(0), first)
    down = np.add.reduceat((density * (1 - fraction)).sum(0), first)
    weights = np.zeros(len(atoms))
    weights[1:] += up
    weights[:-1] += down
    weights[0] += float(ndtr(edges[0]))
    return atoms, weights


def _payoff(
    atoms: npt.NDArray[np.int64],
    weights: Floats,
    step: float,
    theta: float,
    rounds: int,
    size: int,
) -> float:
    """Return an upper bound on E[(S')_+] over the lattice atoms, errors included."""
    y = atoms * step
    with np.errstate(divide="ignore"):
        log_weights = np.log(weights) + theta * y
    top = float(log_weights.max())
    log_m = top + math.log(float(np.exp(log_weights - top).sum()))
    log_front = rounds * log_m
    if log_front > 600:
        return math.inf
    folded = np.bincount(atoms % size, weights=np.exp(log_weights - log_m), minlength=size)
    total = fft.irfft(power(fft.rfft(folded), rounds), size)
    last = min(math.ceil(_CUT / theta / step), size - 1)
    positions = np.arange(1, last + 1)
    payoff = positions * step * np.exp(-theta * step * positions)
    value = max(float(total[positions] @ payoff), 0.0)
    per_fft = 8 * _UNIT * math.log2(size)
    error = (1.01 * rounds * (per_fft + 10 * _UNIT) + per_fft) * math.sqrt(float(folded @ folded))
    rounding = error * math.sqrt(float(payoff @ payoff)) + 16 * _UNIT * step * last
    reached = theta * step * last
    beyond = max(step * last, 1 / theta) * math.exp(-max(reached, 1.0))
    slack = math.expm1(2 * rounds * _WEIGHT_ERROR)
    return math.exp(log_front) * (1 + slack) * (value + rounding + beyond)


def _jumps(sigma: float, c: float, rounds: int, bound: float) -> float:
    """Return an upper bound on E[(S)_+; some W_i > bound]."""
    p, q = _tails(sigma, c, bound)
    rest = (rounds - 1) * math.log1p(-p)
    gained, lost = q * math.exp(rest), (c - 1) * -math.expm1(rest)
    g = float(_g_of(sigma, c, np.array(bound)))
    mean = gained - lost + _TAIL_ERROR * (float(ndtr(sigma - g)) + lost)
    return rounds * max(mean + p * _below(sigma, c, rounds, bound), 0.0)


def replace_one_epsilon(curves: Curves, delta: float) -> float:
    """Smallest e1 + e2 found with delta_remove(e1) + e^e1 delta_add(e2) <= delta."""
    best, share = math.inf, 0.5
    for _ in range(3):
        # The factor keeps the rounded sum of the two shares below delta.
        first = curves.epsilon(share * delta * (1 - 1e-12), "remove")
        rest = (1 - share) * delta * math.exp(-first) * (1 - 1e-12) if first < 500 else 0.0
        if rest < 1e-250:
            break
        second = curves.epsilon(rest, "add")
        best = min(best, first + second)
        # Where the log-curves have slopes a and b, the best odds are (1 + b) / a.
        odds = (1 + _slope(curves, second, "add")) / _slope(curves, first, "remove")
        share = min(max(odds / (1 + odds), 1e-3), 1 - 1e-3)
    return best


def _slope(curves: Curves, epsilon: float, side: Side) -> float:
    """How fast log delta falls with epsilon."""
    step = 1e-2 * epsilon + 1e-6
    near, far = (curves.delta(e, side, False) for e in (epsilon, epsilon + step))
    return max(math.log(max(near, 1e-290) / max(far, 1e-290)) / step, 1e-6)


def replace_one_delta(curves: Curves, epsilon: float, rough: bool) -> float:
    """Smallest delta_remove(e1) + e^e1 delta_add(e2) found with e1 + e2 = epsilon; at most 1."""
    if epsilon > 500:
        return 1.0

    def total(first: float, rough: bool) -> float:
        return curves.delta(first, "remove", rough) + math.exp(first) * curves.delta(
            epsilon - first, "add", rough
        )

    optimum = minimize_scalar(
        lambda share: math.log(max(total(share * epsilon, True), 1e-290)),
        bounds=(0.0, 1.0),
        method="bounded",
        options={"xatol": 3e-3},
    )
    return min(1.0, total(float(optimum.x) * epsilon, rough))
