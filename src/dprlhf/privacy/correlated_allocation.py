"""Privacy curve of correlated noise on random allocation, by a certified Monte Carlo bound.

Each user draws its round in secret, and the rounds' noise is correlated by a matrix C with
non-negative entries (:mod:`dprlhf.privacy.correlated_noise`). With c_i the columns of C, the run is
dominated by P = (1/T) Σ_i N(c_i, z² I) against Q = N(0, z² I), also where rounds are adaptive and a
user's contributions point in different directions (``docs/proofs/correlated_random_allocation.md``;
the pair is that of Choquette-Choo et al., arXiv 2410.06266). With L = dP/dQ,

    delta_remove(eps) = E_Q[(L - e^eps)_+],     delta_add(eps) = E_Q[(1 - e^eps L)_+].

No closed form is known for sums of dependent log-normals. Both are expectations of values in a
known interval [0, B] under an importance-sampling proposal with B near δ itself, so that the
empirical Bernstein bound (Maurer & Pontil, arXiv 0907.3740, Theorem 4) states them to a few per
cent with a probability of error of 2⁻⁶⁰. δ is charged for that: 2⁻⁵⁰, enough for 1,024 such bounds.
What is searched for (ε, z, the proposal) is found with other draws than those that certify it. All
draws come from a fixed public key, so that the same terms always give the same ε.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import gammaln, ndtri

from dprlhf.privacy import random_allocation
from dprlhf.privacy.correlated_noise import noise_matrix
from dprlhf.privacy.gaussian import find_root, gaussian_delta, gaussian_epsilon
from dprlhf.privacy.random_allocation import SIDES, Side
from dprlhf.privacy.randomness import uniforms

Array = NDArray[np.float64]

LARGEST_ROUNDS = 128
"""Above it, the draws would take minutes, and the proposal is too far from P for a tight bound."""

CHARGE = 2.0**-50
"""Part of δ that pays for the probability that a bound is wrong."""

_FAILURE = 2.0**-60
_SMALLEST_DELTA = 2.0**-40  # below it, one Gaussian bounds the curve
_LARGEST_EPSILON = 100.0  # the same above it
_SLACK = 1e-9  # relative allowance for float64 and for the 52 bits of a uniform draw

_KEY = b"correlated noise, random alloc. "  # public: the draws are not of anybody's data
_DRAWS = 2**20
CURVE_PART = 4  # as many times fewer are drawn for :func:`curve`
_ROUGH_DRAWS = 2**15
_BLOCK = 2**14
_FOLDS = 6
_COMPONENTS = 50_000

_BELOW = (-0.05, -0.02, -0.01, -0.005)
_NEAR = (-0.002, -0.001, -0.0005, 0.0, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01)
_OFFSETS = (*_BELOW, *_NEAR, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Where the certificate looks, relative to the ε that the search found."""


@dataclass(frozen=True)
class _Proposal:
    """The law that y is drawn from, N(m, z² I) with m drawn from ``shifts``, and its bound."""

    side: Side  # Direction of the curve
    power: float  # Exponent a; the bound on a value comes from the a-th power of L
    folds: int  # Number r of columns whose sum, times a/r, is a shift (remove)
    log_mass: float  # Logarithm of the normalizer Z (remove) or of e^(a s/2 + a² g/2) (add)
    shifts: Array  # Cᵀm/z² of each component, [components, rounds]
    cumulative: Array  # Cumulative probabilities of the components, [components]

    def largest(self, epsilons: Array) -> Array:
        """Return the bound B on a value, at each ε, ``[points]``."""
        logs = [_log_largest(self.side, self.power, self.log_mass, float(e)) for e in epsilons]
        return np.exp(logs)


def _log_largest(side: Side, power: float, log_mass: float, epsilon: float) -> float:
    """Return log B: of Z max_L (L - e^eps) L^-a, or of e^(...) max_L (1 - e^eps L) L^a."""
    a = power
    if side == "remove":
        shape = (a - 1) * math.log1p(-1 / a) - math.log(a) if a > 1 else 0.0
        return log_mass - epsilon * (a - 1) + shape
    shape = a * math.log(a / (a + 1)) - math.log(a + 1) if a > 0 else 0.0
    return log_mass - a * epsilon + shape


@dataclass(frozen=True)
class _Sums:
    """The sums of r columns of C: what the proposals for any z are made of."""

    members: NDArray[np.int64]  # The columns in each sum, [components, r]
    orders: Array  # Logarithm of the number of orders of each, over T^r, [components]
    between: Array  # Squared norm of each sum, [components]
    own: Array  # Sum of the squared norms of its columns, [components]

    def log_masses(self, scale: float, noise: float) -> tuple[float, Array]:
        """Return log Z and the unnormalised log-weights of the proposal's components."""
        # A weight is E_Q[e^(s Σ l_i)] times the number of orders over T^r.
        logs = self.orders + scale * (scale * self.between - self.own) / (2 * noise**2)
        top = float(logs.max())
        return top + math.log(float(np.exp(logs - top).sum())), logs


@functools.lru_cache(16)
def _sums(rounds: int, bands: int, folds: int) -> _Sums:
    columns = noise_matrix(rounds, bands)
    gram = columns.T @ columns
    sums = np.array(list(itertools.combinations_with_replacement(range(rounds), folds)))
    counts = np.stack([(sums == sums[:, [i]]).sum(1) for i in range(folds)], 1)
    # Each distinct element of multiplicity c is met c times: Σ log(c!) / c over all places.
    orders = gammaln(folds + 1) - (gammaln(counts + 1.0) / counts).sum(1)
    between = sum(gram[sums[:, i], sums[:, j]] for i in range(folds) for j in range(folds))
    own = np.diag(gram)[sums].sum(1)
    return _Sums(sums, orders - folds * math.log(rounds), np.asarray(between), own)


def _remove_proposal(noise: float, rounds: int, bands: int, epsilon: float) -> _Proposal:
    """Return the proposal with density ((1/T) Σ_i e^(s l_i))^r / Z to Q, s = a/r at least 1."""
    # By the power-mean inequality the density is at least L^a / Z, so a value is at most B. The
    # power a has the smallest B, r is the largest with few enough sums, or the best s above 1.
    choices = range(1, _FOLDS + 1)
    largest = max(r for r in choices if r == 1 or math.comb(rounds + r - 1, r) <= _COMPONENTS)
    best: tuple[float, int, float] = (math.inf, 1, 1.0)
    for folds in range(largest, 0, -1):
        sums = _sums(rounds, bands, folds)

        def log_bound(log_scale: float, sums: _Sums = sums, folds: int = folds) -> float:
            scale = math.exp(log_scale)
            log_mass = sums.log_masses(scale, noise)[0]
            return min(_log_largest("remove", scale * folds, log_mass, epsilon), 1e6)

        optimum = minimize_scalar(
            log_bound, bounds=(0.0, 5.0), method="bounded", options={"xatol": 1e-3}
        )
        for scale in (1.0, float(f"{math.exp(optimum.x):.4g}")):
            best = min(best, (log_bound(math.log(scale)), folds, scale))
        if best[2] > 1.0:
            break
    _, folds, scale = best
    sums = _sums(rounds, bands, folds)
    log_mass, log_weights = sums.log_masses(scale, noise)
    cumulative = np.cumsum(np.exp(log_weights - log_mass))
    columns = noise_matrix(rounds, bands) / noise
    shifts = scale * (columns.T @ columns)[sums.members].sum(1)
    return _Proposal("remove", scale * folds, folds, log_mass, shifts, cumulative / cumulative[-1])


def _add_proposal(noise: float, rounds: int, bands: int, epsilon: float) -> _Proposal:
    """Return the proposal N(-a c̄, z² I), c̄ the mean column, with the power a of the smallest B."""
    # log L is at least the mean of the l_i, so a value is at most (1 - e^eps L) L^a times e^(a s/2
    # + a² g/2), with s the mean of |c_i|²/z² and g = |c̄|²/z².
    columns = noise_matrix(rounds, bands) / noise
    gram = columns.T @ columns
    spread, square = float(np.diag(gram).mean()), float(gram.mean())

    def log_mass(power: float) -> float:
        return power * spread / 2 + power * power * square / 2

    def log_bound(power: float) -> float:
        return _log_largest("add", power, log_mass(power), epsilon)

    most = 4 * (1 + max(0.0, epsilon - spread / 2) / square)
    optimum = minimize_scalar(
        log_bound, bounds=(0.0, most), method="bounded", options={"xatol": 1e-3}
    )
    power = float(f"{optimum.x:.4g}")
    power = power if log_bound(power) < 0 else 0.0
    shifts = -power * gram.mean(0, keepdims=True)
    return _Proposal("add", power, 1, log_mass(power), shifts, np.ones(1))


@dataclass(frozen=True)
class _Sample:
    """Draws from a proposal: log L, and the logarithm of dQ over the proposal, ``[draws]``."""

    proposal: _Proposal
    log_ratio: Array
    log_weight: Array

    def moments(self, epsilons: Array) -> tuple[Array, Array]:
        """Return the mean of the values at each ε, unbiased estimates of δ, and their deviation."""
        with_, without = np.exp(self.log_ratio + self.log_weight), np.exp(self.log_weight)
        moments = []
        for factor in np.exp(epsilons):
            if self.proposal.side == "remove":
                values = np.maximum(with_ - factor * without, 0.0)
            else:
                values = np.maximum(without - factor * with_, 0.0)
            moments.append((values.mean(), values.std(ddof=1)))
        mean, deviation = zip(*moments, strict=True)
        return np.array(mean), np.array(deviation)

    def bounds(
        self, epsilons: Array, failure: float, draws: int | None = None
    ) -> tuple[Array, Array]:
        """Return lower and upper bounds on δ at each ε, ``[points]`` each."""
        n = draws or len(self.log_ratio)
        log = math.log(4 * len(epsilons) / failure)  # two sides, each with 2 / failure
        largest = self.proposal.largest(epsilons)
        mean, deviation = self.moments(epsilons)
        width = deviation * math.sqrt(2 * log / n) + 7 * largest * log / (3 * (n - 1))
        width += _SLACK * (mean + largest)
        return np.maximum(mean - width, 0.0), np.minimum(mean + width, 1.0)


def _samples(
    noise: float, rounds: int, bands: int, near: Sequence[tuple[float, Side]], use: str, draws: int
) -> list[_Sample]:
    """Draw from the proposals that suit each ε and side; each use has its own draws."""
    # The search compares many z and ε, which is smooth where all see the same draws. What is
    # certified has draws of its own, also where an ε is asked for in view of an earlier answer.
    context: tuple[str | int, ...] = (use, near[0][1])
    if use != "search":
        context += (rounds, bands, float(noise).hex(), float(near[0][0]).hex())
    make = {"remove": _remove_proposal, "add": _add_proposal}
    proposals = [make[side](noise, rounds, bands, at) for at, side in near]
    columns = noise_matrix(rounds, bands) / noise
    half = (columns**2).sum(0) / 2
    samples: list[tuple[list[Array], list[Array]]] = [([], []) for _ in proposals]
    for block in range(0, draws, _BLOCK):
        count = min(_BLOCK, draws - block)
        normals, picks = _normals(context, block, count, rounds)
        along = normals @ columns
        for proposal, (ratios, weights) in zip(proposals, samples, strict=True):
            component = np.searchsorted(proposal.cumulative, picks, side="right")
            component = np.minimum(component, len(proposal.cumulative) - 1)
            logs = along + (proposal.shifts[component] - half)
            top = logs.max(1)
            logs -= top[:, None]
            ratios.append(top + np.log(np.exp(logs).mean(1)))
            if proposal.side == "remove":
                scale = proposal.power / proposal.folds
                power = scale * top + np.log(np.exp(scale * logs).mean(1))
                weights.append(proposal.log_mass - proposal.folds * power)
            else:
                middle = logs.mean(1) + top + half.mean()
                own = proposal.power**2 * float((columns.mean(1) ** 2).sum()) / 2
                weights.append(proposal.power * middle + own)
    return [
        _Sample(proposal, *map(np.concatenate, drawn))
        for proposal, drawn in zip(proposals, samples, strict=True)
    ]


@functools.lru_cache(8)  # of the search, which takes the same again and again
def _normals(
    context: tuple[str | int, ...], block: int, count: int, rounds: int
) -> tuple[Array, Array]:
    """Return standard normals, ``[count, rounds]``, and uniforms, ``[count]``."""
    draws = uniforms(_KEY, *context, block, count=count * (rounds + 1))
    return ndtri(draws[count:]).reshape(count, rounds), draws[:count]


def _usable(noise: float, epsilon: float) -> bool:
    """Return whether the bounds are made for this noise and ε; else one Gaussian bounds the run."""
    in_range = random_allocation.SMALLEST_NOISE <= noise <= random_allocation.LARGEST_NOISE
    return in_range and epsilon <= _LARGEST_EPSILON and 1 / noise**2 < 500


def likely_delta(noise: float, rounds: int, bands: int, epsilon: float, part: int = 1) -> float:
    """Return what is likely to be certified for δ(ε) by one of so many parts of the draws."""
    deltas, at = [], np.array([epsilon])
    for side in SIDES:
        (rough,) = _samples(noise, rounds, bands, [(epsilon, side)], "search", _ROUGH_DRAWS)
        deltas.append(rough.bounds(at, _FAILURE, _DRAWS // part)[1][0])
    return float(max(deltas)) + CHARGE


@functools.lru_cache(1024)
def delta(noise: float, rounds: int, bands: int, epsilon_: float, rough: bool = False) -> float:
    """Return an upper bound on δ at ``epsilon_ >= 0``; ``rough`` ones are looser."""
    single = gaussian_delta(noise, epsilon_)
    if not _usable(noise, epsilon_) or single < _SMALLEST_DELTA:
        return single
    at, draws = np.array([epsilon_]), _ROUGH_DRAWS if rough else _DRAWS
    use = "rough" if rough else "certificate"
    samples = [_samples(noise, rounds, bands, [(epsilon_, s)], use, draws)[0] for s in SIDES]
    return min(single, float(max(s.bounds(at, _FAILURE / 2)[1][0] for s in samples)) + CHARGE)


@functools.lru_cache(64)  # a run's ε and its risk ask for the same
def likely_epsilon(noise: float, rounds: int, bands: int, delta_: float) -> float:
    """Return about the ε at ``delta_`` that the certificate is likely to state."""
    single = gaussian_epsilon(noise, delta_)
    if delta_ < _SMALLEST_DELTA or not _usable(noise, single):
        return single
    return find_root(
        lambda e: likely_delta(noise, rounds, bands, e), 0.0, single, delta_, tolerance=1e-4
    )


def curve(
    noise: float, rounds: int, bands: int, epsilons: Array, reach: float
) -> dict[Side, Array]:
    """Return upper bounds on δ, by side, from draws that suit three ε up to ``reach``."""
    # All points of the draws hold at once, with the probability that CHARGE pays for.
    if not _usable(noise, reach):
        return dict.fromkeys(SIDES, np.ones_like(epsilons))
    near = [(at, side) for side in SIDES for at in (reach, reach / 2, 0.0)]
    samples = _samples(noise, rounds, bands, near, "curve", _DRAWS // CURVE_PART)
    bounds = [sample.bounds(epsilons, _FAILURE / 2)[1] for sample in samples]
    return {
        side: np.min(bounds[i : i + 3], 0) + CHARGE for side, i in zip(SIDES, (0, 3), strict=True)
    }


@functools.lru_cache(1024)
def epsilon(noise: float, rounds: int, bands: int, delta_: float) -> tuple[float, float]:
    """Return an upper and a lower bound on ε at ``delta_``."""
    # The search has draws of its own. The certificate bounds both curves at a few fixed offsets at
    # once, so that the smallest ε that passes needs no correction for having been selected.
    single = gaussian_epsilon(noise, delta_)
    # Without draws: columns with non-negative products cost no less than orthogonal ones of their
    # norms, as independent noise has (proof note).
    shortest = float(np.linalg.norm(noise_matrix(rounds, bands), axis=0).min())
    own = noise / shortest * (1 + 1e-12)
    once = random_allocation.epsilon(own, rounds, delta_, "remove")
    lower = random_allocation.epsilon_lower(own, rounds, delta_, once)
    if single == 0 or delta_ < _SMALLEST_DELTA or not _usable(noise, single):
        return single, min(lower, single)
    guess = likely_epsilon(noise, rounds, bands, delta_)
    near = guess + max(guess, 0.01) * np.array(_OFFSETS)
    points = np.unique([float(f"{max(e, 0.0):.5g}") for e in near])
    (sample,) = _samples(noise, rounds, bands, [(guess, "remove")], "certificate", _DRAWS)
    low, high = sample.bounds(points, _FAILURE / 2)
    # The other side hardly ever decides: few draws show that, or else as many bound it.
    for use, draws in (("few", _DRAWS // 8), ("certificate", _DRAWS)):
        (sample,) = _samples(noise, rounds, bands, [(guess, "add")], use, draws)
        least, most = sample.bounds(points, _FAILURE / 4)
        if not ((high + CHARGE <= delta_) & (most + CHARGE > delta_)).any():
            break
    passed = points[np.maximum(high, most) + CHARGE <= delta_]
    failed = points[np.maximum(low, least) - CHARGE >= delta_]
    upper = min([single, *passed.tolist()])
    return upper, min(upper, max([lower, *failed.tolist()]))


@functools.lru_cache(256)
def noise(rounds: int, bands: int, epsilon_: float, delta_: float, high: float) -> float:
    """Return about the smallest noise multiplier whose certified ε is at most ``epsilon_``."""
    # A proposal, below the noise of one Gaussian; epsilon() certifies it with other draws.
    target = epsilon_ * (1 - 1e-3)  # room for the offsets between which ε is certified

    def value(z: float) -> float:
        usable = _usable(z, target) and delta_ >= _SMALLEST_DELTA
        return likely_delta(z, rounds, bands, target) if usable else gaussian_delta(z, epsilon_)

    low = high / 2
    while low > 1e-3 * high and value(low) <= delta_:
        low /= 2
    return float(f"{find_root(value, low, high, delta_, tolerance=1e-4):.6g}")
