"""Gaussian noise on an integer grid, drawn exactly: round(σξ − f) for a standard normal ξ.

A sum s is divided by the grid's spacing γ, a power of two, and rounded to integers; then integer
noise round(N(0, σ²)) is added. As round(s) + round(N) = round(round(s) + N), what is released is a
post-processing of the Gaussian mechanism over the real numbers, whose accounting therefore holds as
it is: no distance to a Gaussian enters δ. Rounding moves neighbouring sums apart by at most one
more unit in each of d coordinates, so that σ = z(S/γ + √d) in place of zS/γ.

The noise is drawn by inversion. A uniform V in (0, ½), given by 63 random bits and as many further
ones as it takes, and a random sign determine ξ = ±Q(V), where Q(V) = −Φ⁻¹(V). Float64 arithmetic
gives σQ(V) − f with a proven error: a cubic polynomial around the middle of one of 81,920
intervals, taken from Taylor polynomials of Q around the middles of 1,280 wider ones, whose
coefficients come from 100-bit arithmetic. Only additions, multiplications and roundings of IEEE 754
are used on the way. Where the error leaves open to which integer a value rounds (about 4 in a
million), more bits and multiple-precision arithmetic decide. How wide the intervals are decides the
time alone: what is drawn is round(σξ − f) of the stream's bits, to the last digit.

The proof is in ``docs/proofs/floating_point_noise.md``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction

import mpmath
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri

from dprlhf.privacy.randomness import uint64_stream

Integers = NDArray[np.int64]
Array = NDArray[np.float64]

BITS = 30
"""The noise has standard deviation 2³⁰ to 2³¹ in units of the grid, before its margin."""

_BLOCK = 2**15
_TOGETHER = 4  # blocks that a thread draws at once
_BINADES = 20  # V from 2⁻²¹ to ½ by the polynomials; below, by multiple-precision arithmetic
_SPLIT = 6  # 2⁶ wide intervals in a binade
_INTERVALS = _BINADES << _SPLIT
_DEGREE = 7
_FINER = 6  # 2⁶ narrow intervals in a wide one: half of all draws need 4,096 of them, in the cache
_CUBIC = 3
_PRECISION = 100  # binary digits after the point of Q at the intervals' middles

# The bits of a float64 V · 2⁶⁴ without the last 46 number its wide interval, from that of 2⁴³ on;
# those without the last 40 its narrow one.
_DROPPED = 52 - _SPLIT
_FIRST = (1023 + 63 - _BINADES) << _SPLIT
_NARROW = _INTERVALS << _FINER
_NARROW_DROPPED = _DROPPED - _FINER
_NARROW_FIRST = _FIRST << _FINER
_SIGN = np.uint64(2**63)

_MARGIN = 2.0**-32  # of V's last digit; the multiple-precision arithmetic errs by less than 2⁻⁵⁰

_UNIT = 2.0**-53
_ERROR = 8 * _UNIT
"""Bound on the rounding errors of σQ(V) − f beside those of σQ(c), c the middle of the narrow
interval, over σ + 4; the proof shows less than half of it."""


@dataclass(frozen=True)
class Grid:
    """The grid on which a sum is released."""

    spacing: float  # Distance γ of its points, a power of two
    std: Fraction  # Standard deviation σ of the noise before its rounding, in units of γ


@functools.lru_cache(64)
def grid_of(noise_multiplier: float, clip_norm: float, dimension: int) -> Grid:
    """Return the grid for sums of ``dimension`` coordinates, and its noise.

    The noise covers the rounding: sums of neighbours that are at most S apart in L2 norm are at
    most S/γ + √d units apart when each coordinate is rounded, hence σ = z(S/γ + ⌈√d⌉).
    """
    spacing = math.ldexp(1.0, math.frexp(noise_multiplier * clip_norm)[1] - 1 - BITS)
    root = math.isqrt(max(0, dimension - 1)) + 1
    moved = Fraction(clip_norm) / Fraction(spacing) + root
    return Grid(spacing, Fraction(noise_multiplier) * moved)


def rounded_gaussian(
    key: bytes,
    *context: str | int,
    std: Fraction,
    count: int,
    offset: tuple[Integers, int] | None = None,  # [count]
) -> torch.Tensor:
    """Return ``[count]`` exact draws of round(σξ − f), ξ standard normal, as float64 integers."""
    # A stream for each block of 2¹⁵ coordinates; threads take four blocks at once. (In steps over
    # one block they wait for Python's lock.)
    table, noise = _table(std), np.empty(count)
    threads = max(1, min(torch.get_num_threads(), count // (_TOGETHER * _BLOCK)))
    step = _BLOCK * (1 if threads == 1 else _TOGETHER)
    starts = range(0, count, step)

    def draw(first: int) -> list[tuple[int, int]]:
        room, unsure = _Room(min(count, step)), []
        for start in starts[first::threads]:
            part = slice(start, min(count, start + step))
            own = offset and (offset[0][part], offset[1])
            words = room.words[: part.stop - start]
            for place in range(0, len(words), _BLOCK):
                block = words[place : place + _BLOCK]
                block[:] = uint64_stream(key, *context, (start + place) // _BLOCK, count=len(block))
            unsure += [(start + i, word) for i, word in _draw(table, own, noise[part], room)]
        return unsure

    if threads == 1:
        unsure = draw(0)
    else:
        with ThreadPoolExecutor(threads) as pool:
            unsure = [pair for some in pool.map(draw, range(threads)) for pair in some]
    for i, word in unsure:  # mpmath's precision belongs to the process: one thread alone
        block, place = divmod(i, _BLOCK)
        f = Fraction(0) if offset is None else Fraction(int(offset[0][i]), offset[1])
        side = -1 if word >> 63 else 1
        more = _words(key, *context, block, "more", place)
        noise[i] = side * _settle(std, side * f, word % 2**63, more)
    return torch.from_numpy(noise)


class _Room:
    """A thread's memory, ``[count]`` each: asking for it anew takes time, too."""

    def __init__(self, count: int) -> None:
        self.words, self.rest = np.empty((2, count), dtype=np.uint64)
        self.interval = np.empty(count, dtype=np.int64)
        self.v, self.taken, self.value = np.empty((3, count))
        self.unsure, self.outside = np.empty((2, count), dtype=bool)


@dataclass(frozen=True, eq=False)
class _Table:
    """The polynomials of σQ(V), one for each narrow interval of V, from the smallest V on."""

    std: Fraction  # σ
    powers: Array  # [4, intervals]
    slack: Array  # Bound on the error of all float64 arithmetic in the interval, [intervals]


@functools.lru_cache(16)
def _table(std: Fraction) -> _Table:
    exact, x, density = _middles()
    top, bottom = std.numerator, std.denominator << _PRECISION
    whole = [(2 * top * q + bottom) // (2 * bottom) for q in exact[1:]]
    rest = [(top * q - w * bottom) / bottom for q, w in zip(exact[1:], whole, strict=True)]
    sigma, unit = float(std), 2.0**-64 / density
    derivatives = _derivatives(_DEGREE + 1)
    series = [
        sigma * (-1) ** n * derivatives[n - 1](x[1:]) * unit[1:] ** n / math.factorial(n)
        for n in range(1, _DEGREE + 1)
    ]
    # The derivatives in the remainders grow as V falls: in an interval they are below their values
    # at the middle of the wide interval before.
    half = 2.0 ** (np.arange(_INTERVALS) // 2**_SPLIT + 62 - _BINADES - _SPLIT)
    slack = sigma * unit[:-1] + _ERROR * (sigma + 4)
    for degree, reach in ((_DEGREE, half), (_CUBIC, half / 2**_FINER)):
        remainder = derivatives[degree](x[:-1]) * (unit[:-1] * reach) ** (degree + 1)
        slack = slack + sigma * remainder / math.factorial(degree + 1)
    powers = _narrowed(np.stack([np.array(rest), *series]), half)
    powers[0] += np.repeat(np.array(whole, dtype=np.float64), 2**_FINER)
    # σQ(c) is rounded when the integer and the rest are added, and so are the last sum and f.
    return _Table(std, powers, np.repeat(slack, 2**_FINER) + 4 * _UNIT * np.abs(powers[0]))


def _narrowed(powers: Array, half: Array) -> Array:
    """Return the polynomials around the middles of the narrow intervals, without their ends."""
    places = (np.arange(2**_FINER) + 0.5) / 2 ** (_FINER - 1) - 1
    moved = half[:, None] * places  # exact: both are small multiples of powers of two
    intervals = np.empty((_CUBIC + 1, _INTERVALS, 2**_FINER))
    for n in range(_CUBIC + 1):
        value = np.zeros_like(moved)
        for j in range(_DEGREE, n - 1, -1):
            value = value * moved + math.comb(j, n) * powers[j][:, None]
        intervals[n] = value
    return intervals.reshape(_CUBIC + 1, -1)


@functools.cache
def _middles() -> tuple[list[int], Array, Array]:
    """Return Q in units of 2⁻¹⁰⁰, and Q and φ(Q) in float64, at the middles of the intervals."""
    # scipy's Φ⁻¹ is a first guess; one step of Halley's method takes its error to the third power.
    bits = (np.arange(_FIRST - 1, _FIRST + _INTERVALS) << _DROPPED) + (1 << (_DROPPED - 1))
    middles = bits.view(np.float64) * 2.0**-64
    exact, x, density = [], [], []
    with mpmath.workprec(_PRECISION + 20):
        for v, guess in zip(middles.tolist(), (-ndtri(middles)).tolist(), strict=True):
            phi = mpmath.npdf(guess)
            step = (mpmath.ncdf(-guess) - v) / phi
            assert abs(step) < 2.0**-40, "scipy's normal quantile is off"
            q = guess + step * (1 + guess * step / 2)
            exact.append(int(mpmath.nint(mpmath.ldexp(q, _PRECISION))))
            x.append(float(q))
            density.append(float(phi * (1 - guess * step)))
    return exact, np.array(x), np.array(density)


def _derivatives(count: int) -> list[np.polynomial.Polynomial]:
    """Return P₁, …, P_count, with non-negative coefficients: Q⁽ⁿ⁾ = (−1)ⁿ Pₙ(Q) / φ(Q)ⁿ."""
    polynomials = [np.polynomial.Polynomial([1.0])]
    for n in range(1, count):
        polynomials.append(
            polynomials[-1].deriv() + n * np.polynomial.Polynomial([0.0, 1.0]) * polynomials[-1]
        )
    return polynomials


def _draw(
    table: _Table, offset: tuple[Integers, int] | None, noise: Array, room: _Room
) -> list[tuple[int, int]]:
    """Write the draws of ``room.words`` into ``noise``, ``[count]``."""
    count = len(noise)
    words, rest, interval = room.words[:count], room.rest[:count], room.interval[:count]
    v, taken, value = room.v[:count], room.taken[:count], room.value[:count]
    unsure, outside = room.unsure[:count], room.outside[:count]
    np.bitwise_and(words, ~_SIGN, out=rest)
    np.copyto(v, rest.view(np.int64))
    bits = v.view(np.int64)
    np.right_shift(bits, _NARROW_DROPPED, out=interval)
    interval -= _NARROW_FIRST
    middle = taken.view(np.int64)
    np.bitwise_and(bits, -(1 << _NARROW_DROPPED), out=middle)
    middle |= 1 << (_NARROW_DROPPED - 1)
    v -= taken
    np.take(table.powers[_CUBIC], interval, mode="clip", out=value)
    for coefficients in table.powers[-2::-1]:
        value *= v
        value += np.take(coefficients, interval, mode="clip", out=taken)
    np.bitwise_and(words, _SIGN, out=rest)
    bits_of_value = value.view(np.uint64)
    bits_of_value ^= rest  # the sign
    if offset is not None:
        value -= offset[0] / offset[1]
    np.rint(value, out=noise)
    value -= noise
    np.abs(value, out=value)
    np.greater_equal(value, 0.5 - table.slack.max(), out=unsure)
    np.greater_equal(interval.view(np.uint64), _NARROW, out=outside)
    unsure |= outside
    return [
        (i, int(words[i]))
        for i in np.flatnonzero(unsure).tolist()
        if outside[i] or 0.5 - value[i] <= table.slack[interval[i]]
    ]


def _words(key: bytes, *context: str | int) -> Iterator[int]:
    """Yield further random words of a draw, without end."""
    number = 0
    while True:
        yield int(uint64_stream(key, *context, number, count=1)[0])
        number += 1


def _settle(std: Fraction, offset: Fraction, v: int, more: Iterator[int]) -> int:
    """Return round(σQ(V) − f) by multiple-precision arithmetic, from as many bits as it takes."""
    # It is the integer k with Φ(−(k + ½ + f)/σ) ≤ V < Φ(−(k − ½ + f)/σ).
    digits = 64
    while True:
        v, digits = (v << 64) + next(more), digits + 64
        with mpmath.workprec(digits + 64):

            def below(k: int, digits: int = digits) -> mpmath.mpf:
                """Return V · 2^digits where σQ(V) − f = k − ½."""
                edge = (k - Fraction(1, 2) + offset) / std
                cut = mpmath.ncdf(-mpmath.mpf(edge.numerator) / edge.denominator)
                return mpmath.ldexp(cut, digits)

            k = round(
                std * Fraction(-float(ndtri(float(Fraction(2 * v + 1, 2 << digits))))) - offset
            )
            while v > below(k) + _MARGIN:
                k -= 1
            while v + 1 < (low := below(k + 1)) - _MARGIN:
                k += 1
            if low + _MARGIN <= v and v + 1 <= below(k) - _MARGIN:
                return k
