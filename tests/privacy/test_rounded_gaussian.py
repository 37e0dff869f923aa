"""Rounded Gaussian noise: its law to the last digit, and a grid whose rounding it covers."""

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from dprlhf.privacy import rounded_gaussian as module
from dprlhf.privacy.randomness import uint64_stream
from dprlhf.privacy.rounded_gaussian import grid_of, rounded_gaussian
from helpers.laws import is_standard_normal

KEY = bytes(range(32))
FULL = grid_of(1.5, 0.4, 1000).std
STDS = [Fraction(7, 10), Fraction(33, 10), Fraction(1000), FULL]


def offsets(count: int, denominator: int = 1_000_003) -> tuple[NDArray[np.int64], int]:
    return np.arange(count, dtype=np.int64) * 7919 % denominator, denominator


@pytest.fixture
def only_slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Widen the error bound, so that multiple-precision arithmetic decides every draw."""
    monkeypatch.setattr(module, "_ERROR", 1.0)
    module._table.cache_clear()
    yield
    module._table.cache_clear()


def expected(context: str, std: Fraction, count: int, f: list[Fraction]) -> list[int]:
    """The draws of one block from their definition: ±Q(V) by the inverse of the error function."""
    words = uint64_stream(KEY, context, 0, count=count).tolist()
    found = []
    with mpmath.workdps(60):
        for word, own in zip(words, f, strict=True):
            v = mpmath.mpf(2 * (word % 2**63) + 1) / 2**65  # amid what the 63 bits leave open
            q = mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * v)
            side = -1 if word >> 63 else 1
            y = side * q * std.numerator / std.denominator
            found.append(int(mpmath.nint(y - mpmath.mpf(own.numerator) / own.denominator)))
    return found


@pytest.mark.parametrize("with_offset", [False, True])
@pytest.mark.parametrize("std", STDS, ids=float)
def test_every_draw_is_a_normal_quantile_rounded(std: Fraction, with_offset: bool) -> None:
    offset = offsets(150) if with_offset else None
    f = [Fraction(int(n), offset[1]) for n in offset[0]] if offset else [Fraction(0)] * 150
    drawn = rounded_gaussian(KEY, "one", std=std, count=150, offset=offset)
    assert drawn.dtype == torch.float64
    assert drawn.tolist() == expected("one", std, 150, f)


@pytest.mark.parametrize("with_offset", [False, True])
@pytest.mark.parametrize("std", [Fraction(33, 10), FULL], ids=float)
def test_float64_and_multiple_precision_agree(std, with_offset, request):
    offset = offsets(700) if with_offset else None
    fast = rounded_gaussian(KEY, "both", std=std, count=700, offset=offset)
    request.getfixturevalue("only_slow")
    assert torch.equal(fast, rounded_gaussian(KEY, "both", std=std, count=700, offset=offset))


def test_few_draws_need_multiple_precision_and_they_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(module, "_settle", lambda *_: asked.append(1) or 123_456_789)
    noise = rounded_gaussian(KEY, "few", std=FULL, count=2_000_000)
    assert 0 < len(asked) < 30  # some 4 in a million
    assert (noise.abs() == 123_456_789).sum() == len(asked)


@pytest.mark.parametrize("bit", [0, 1])
@pytest.mark.parametrize("k", [0, 1, 40])
@pytest.mark.parametrize("offset", [Fraction(0), Fraction(1, 3), Fraction(-1, 3)])
def test_bits_are_drawn_until_they_decide(k: int, offset: Fraction, bit: int) -> None:
    """V starts with 256 digits of a cut between two integers; the digits after them decide."""
    std = Fraction(33, 10)
    with mpmath.workprec(500):
        edge = (k + Fraction(1, 2) + offset) / std
        cut = mpmath.ncdf(-mpmath.mpf(edge.numerator) / edge.denominator)
        digits = int(mpmath.floor(cut * 2**256))
    start = digits >> 192
    following = [(digits >> shift) % 2**64 for shift in (128, 64, 0)]
    asked: list[int] = []

    def more() -> Iterator[int]:
        for word in itertools.chain(following, itertools.repeat(bit * (2**64 - 1))):
            asked.append(word)
            yield word

    assert module._settle(std, offset, start, more()) == (k if bit else k + 1)
    assert len(asked) == 4


def test_the_error_of_the_polynomials_is_below_its_bound() -> None:
    """At both ends and inside of narrow intervals, the digits that were not drawn included."""
    table = module._table(FULL)
    rng = np.random.default_rng(1)
    ends = [0, 1, 63, 64, 4095, 4096, module._NARROW - 1]
    worst = 0.0
    for i in [*ends, *rng.integers(0, module._NARROW, 60).tolist()]:
        first = i + module._NARROW_FIRST
        bits = np.array([first, first + 1]) << module._NARROW_DROPPED
        low, high = (int(x) for x in bits.view(np.float64))
        middle = float(low + (high - low) // 2)
        for n in (low, low + (high - low) // 3, high - 1):
            r, value = float(n) - middle, 0.0
            for c in table.powers[::-1, i].tolist():
                value = value * r + c
            with mpmath.workdps(50):
                for end in (n, n + 1):
                    q = mpmath.sqrt(2) * mpmath.erfinv(1 - mpmath.mpf(end) / 2**63)
                    exact = q * FULL.numerator / FULL.denominator
                    error = abs(float(exact - mpmath.mpf(value)))
                    assert error < table.slack[i]
                    worst = max(worst, error / table.slack[i])
    assert worst > 0.3  # the bound is no wider than it need be


@pytest.mark.slow
def test_the_bound_has_room_for_what_the_polynomials_leave_out() -> None:
    """Beside its part for roundings: both remainders and the digits not drawn, by derivatives."""
    table, unit = module._table(FULL), 2.0**-53
    places = np.arange(module._INTERVALS + 1) + module._FIRST
    ends = (places << module._DROPPED).view(np.float64)
    with mpmath.workdps(60):
        for i in (600, 900, 1100, 1200, 1279):
            low, high = (mpmath.ldexp(mpmath.mpf(e), -64) for e in ends[i : i + 2].tolist())
            half = (high - low) / 2
            first, fourth, eighth = (
                abs(mpmath.diff(lambda v: mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * v), low, n))
                for n in (1, 4, 8)
            )
            left_out = first * mpmath.mpf(2) ** -64
            left_out += fourth * (half / 64) ** 4 / 24 + eighth * half**8 / math.factorial(8)
            wanted = float(left_out * FULL.numerator / FULL.denominator)
            for j in (64 * i, 64 * i + 63):
                roundings = 8 * unit * (float(FULL) + 4) + 4 * unit * abs(table.powers[0, j])
                assert wanted <= (table.slack[j] - roundings) * (1 + 1e-9) <= 1.5 * wanted


def test_narrow_polynomials_are_the_wide_ones_around_other_middles() -> None:
    """In exact arithmetic, but for the terms that are cut off: the same values at the same V."""
    rng = np.random.default_rng(2)
    half = 2.0 ** (np.arange(module._INTERVALS) // 64 + 36)
    wide = rng.standard_normal((module._DEGREE + 1, module._INTERVALS))
    wide *= (2.0**-8 / half) ** np.arange(module._DEGREE + 1)[:, None]
    wide[module._CUBIC + 1 :] = 0  # so that nothing is cut off
    narrow = module._narrowed(wide, half)
    for i in (0, 700, module._INTERVALS - 1):
        for k in (0, 31, 63):
            middle = Fraction(2 * k - 63, 64) * Fraction(half[i])
            for at in (Fraction(-1, 64), Fraction(1, 200)):
                r = at * Fraction(half[i])
                one = sum(Fraction(c) * (middle + r) ** n for n, c in enumerate(wide[:, i]))
                other = sum(Fraction(c) * r**n for n, c in enumerate(narrow[:, 64 * i + k]))
                assert float(one) == pytest.approx(float(other), rel=1e-12)


def test_the_knots_are_exact() -> None:
    exact, x, density = module._middles()
    for i in (0, 1, 2, 500, 1279, 1280):
        bits = np.array([module._FIRST - 1 + i << module._DROPPED]) + (1 << (module._DROPPED - 1))
        v = int(bits.view(np.float64)[0] * 2) / mpmath.mpf(2**65)
        with mpmath.workdps(60):
            q = mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * v)
            assert abs(q * mpmath.mpf(2) ** 100 - exact[i]) < 4
            assert x[i] == float(q)
            assert density[i] == pytest.approx(float(mpmath.npdf(q)), rel=1e-15)


def fits(draws: NDArray[np.float64], std: Fraction, f: Fraction, *, rounded: bool = True) -> bool:
    """A chi-squared test against the exact probabilities of cells; or of a discrete Gaussian."""
    reach = int(4 * std) + 1
    cells = range(-reach, reach + 1)
    with mpmath.workdps(30):
        s, shift = (
            mpmath.mpf(std.numerator) / std.denominator,
            mpmath.mpf(f.numerator) / f.denominator,
        )
        if rounded:
            mass = [
                mpmath.ncdf((k + 0.5 + shift) / s) - mpmath.ncdf((k - 0.5 + shift) / s)
                for k in cells
            ]
        else:
            mass = [mpmath.exp(-(((k + shift) / s) ** 2) / 2) for k in cells]
            mass = [m / sum(mass) for m in mass]
    share = np.array([float(m) for m in mass])
    counts = np.array([(draws == k).sum() for k in cells])
    expected = np.append(share, max(1 - share.sum(), 0.0)) * len(draws)
    seen = np.append(counts, len(draws) - counts.sum())
    keep = expected >= 5
    expected = np.append(expected[keep], expected[~keep].sum())
    seen = np.append(seen[keep], seen[~keep].sum())
    if expected[-1] < 5:
        expected[-2] += expected[-1]
        seen[-2] += seen[-1]
        expected, seen = expected[:-1], seen[:-1]
    return bool(stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-4)


@pytest.mark.parametrize("f", [Fraction(0), Fraction(1, 3)], ids=float)
@pytest.mark.parametrize("std", [Fraction(7, 10), Fraction(33, 10)], ids=float)
def test_every_integer_has_its_probability(std: Fraction, f: Fraction) -> None:
    n = 300_000
    offset = (np.full(n, f.numerator, dtype=np.int64), f.denominator)
    draws = rounded_gaussian(KEY, "law", std=std, count=n, offset=offset).numpy()
    assert fits(draws, std, f)
    # The test can fail.
    assert not fits(draws, std * Fraction(101, 100), f)
    assert not fits(draws, std, f + Fraction(1, 20))
    assert not fits(np.abs(draws), std, f)
    if std < 1:
        assert not fits(draws, std, f, rounded=False)


@pytest.fixture(scope="module")
def full() -> NDArray[np.float64]:
    return rounded_gaussian(KEY, "full", std=FULL, count=1_000_000).numpy()


def test_at_full_size_it_is_normal_to_the_tails(full: NDArray[np.float64]) -> None:
    sigma = float(FULL)
    assert is_standard_normal(full / sigma)
    assert not is_standard_normal(full / sigma * 1.01)
    assert not is_standard_normal(np.clip(full / sigma, -3.5, 3.5))


def test_blocks_and_neighbours_are_independent(full: NDArray[np.float64]) -> None:
    n = len(full)
    for lag in (1, 2, module._BLOCK - 1, module._BLOCK, module._BLOCK + 1, n // 2):
        assert abs(np.corrcoef(full[:-lag], full[lag:])[0, 1]) < 4.5 / math.sqrt(n - lag)


def test_the_number_of_threads_does_not_change_what_is_drawn() -> None:
    count = 13 * module._TOGETHER * module._BLOCK + 5  # some 7 of them need multiple precision
    before = torch.get_num_threads()
    try:
        drawn = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            drawn.append(
                rounded_gaussian(KEY, "threads", std=FULL, count=count, offset=offsets(count))
            )
    finally:
        torch.set_num_threads(before)
    assert drawn[0].shape == (count,)
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


def test_another_key_context_or_number_draws_otherwise() -> None:
    n = 20_000
    uses = [(KEY, "a", 1), (KEY, "a", 2), (KEY, "b", 1), (bytes(32), "a", 1), (KEY, "a", 1, 1)]
    rows = [rounded_gaussian(*use, std=FULL, count=n).numpy() for use in uses]  # type: ignore[arg-type]
    assert np.abs(np.corrcoef(rows) - np.eye(len(rows))).max() < 5 / math.sqrt(n)


def distance_squared(a: NDArray[np.float64], b: NDArray[np.float64]) -> Fraction:
    return sum(((Fraction(x) - Fraction(y)) ** 2 for x, y in zip(a, b, strict=True)), Fraction(0))


@settings(max_examples=150, deadline=None)
@given(
    z=st.floats(0.05, 50),
    clip_norm=st.floats(1e-12, 1e12),
    start=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20),
    direction=st.integers(0, 2**32),
    share=st.floats(0, 1),
)
def test_rounded_sums_of_neighbours_are_within_what_the_noise_covers(
    z: float, clip_norm: float, start: list[float], direction: int, share: float
) -> None:
    """In exact arithmetic: ‖round(s/γ) − round(s′/γ)‖ ≤ σ/z wherever ‖s − s′‖ ≤ S."""
    d = len(start)
    grid = grid_of(z, clip_norm, d)
    step = np.random.default_rng(direction).standard_normal(d)
    one = np.array(start) * clip_norm
    other = one + step * (share * clip_norm / np.linalg.norm(step) * (1 - 1e-9))
    if distance_squared(one, other) > Fraction(clip_norm) ** 2:  # by rounding, at huge sums
        return
    rounded = [np.rint(x / grid.spacing) for x in (one, other)]
    assert distance_squared(*rounded) <= (grid.std / Fraction(z)) ** 2
    assert math.frexp(grid.spacing)[0] == 0.5
    assert 2**30 <= float(z * Fraction(clip_norm) / Fraction(grid.spacing)) <= 2**31


def test_without_the_margin_for_rounding_neighbours_would_be_too_far_apart() -> None:
    d, clip_norm = 10_000, 1.0
    grid = grid_of(1.0, clip_norm, d)
    gamma = grid.spacing
    one = np.full(d, 0.49 * gamma)
    steps = math.floor(clip_norm / math.sqrt(d) / gamma - 0.02)
    other = one + (steps + 0.02) * gamma
    moved = distance_squared(one, other)
    assert moved <= Fraction(clip_norm) ** 2
    apart = distance_squared(np.rint(one / gamma), np.rint(other / gamma))
    assert apart > moved / Fraction(gamma) ** 2
    assert apart <= grid.std**2


@pytest.mark.parametrize("dimension", [1, 2, 9, 10, 124_000_000])
def test_the_noise_covers_the_root_of_the_dimension(dimension: int) -> None:
    grid = grid_of(1.5, 0.4, dimension)
    root = grid.std / Fraction(1.5) - Fraction(0.4) / Fraction(grid.spacing)
    assert dimension <= root**2 < dimension + 2 * math.sqrt(dimension) + 1
