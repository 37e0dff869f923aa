"""The figures of a comparison against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dprlhf.worth.statistics import agreement, break_even, equal_kl, share, standard_error


def same(value: float, seeds: int = 3) -> np.ndarray:
    return np.full(seeds, value)


def test_break_even_is_linear_in_the_logarithm_of_epsilon() -> None:
    even = break_even({0.5: same(-0.3), 2.0: same(0.1), 8.0: same(0.5)})
    # Three quarters of the way from log 0.5 to log 2.
    assert even.value == pytest.approx(math.exp(math.log(0.5) + 0.75 * math.log(4)))
    # Seeds that agree leave no doubt.
    assert (even.low, even.high) == pytest.approx((even.value, even.value))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.1, 0.2, 0.3], 0.0),
        ([-0.3, -0.2, -0.1], math.inf),
        ([0.1, -0.2, -0.1], math.inf),
        ([-0.1, 0.1, 0.2], math.sqrt(0.5)),
        # Only the last crossing leaves nothing but positive values above it.
        ([-0.1, 0.1, -0.1], math.inf),
        ([0.1, -0.1, 0.1], math.sqrt(2.0)),
        # No gain over public prompts is no value.
        ([0.0, 0.0, 0.0], math.inf),
    ],
)
def test_break_even_outside_of_the_grid_and_with_several_crossings(
    values: list[float], expected: float
) -> None:
    found = break_even({e: same(v) for e, v in zip((0.5, 1.0, 2.0), values, strict=True)})
    assert found.value == pytest.approx(expected)


def test_the_interval_of_break_even_says_when_it_leaves_the_grid() -> None:
    spread = np.array([-1.0, -0.5, 0.4, 0.6, 0.9])
    found = break_even({1.0: spread - 0.2, 2.0: spread})
    assert (found.low, found.high) == (0.0, math.inf)
    single = break_even({1.0: same(-1.0, 1), 2.0: same(1.0, 1)})
    assert single.value == pytest.approx(math.sqrt(2.0))
    assert math.isnan(single.low)


@pytest.mark.parametrize(("value", "expected"), [(0.1, 0.0), (-0.1, math.inf)])
def test_a_single_epsilon_is_above_or_below_break_even(value: float, expected: float) -> None:
    found = break_even({1.0: same(value)})
    assert (found.value, found.low, found.high) == (expected, expected, expected)


def test_the_share_is_a_ratio_of_means_and_pairs_seeds() -> None:
    plain = np.array([1.0, 2.0, 4.0])
    found = share(0.9 * plain, plain)
    assert found.value == pytest.approx(0.9)
    # Paired: every resample has the same ratio, however much seeds differ.
    assert (found.low, found.high) == pytest.approx((0.9, 0.9))
    other = share(0.9 * plain[::-1], plain)
    assert other.value == pytest.approx(0.9)
    assert other.low < 0.5
    assert other.high > 1.3


def test_a_single_seed_has_no_error() -> None:
    assert math.isnan(standard_error(same(1.0, 1)))
    assert standard_error(np.array([1.0, 3.0])) == pytest.approx(1.0)


def test_equal_kl_compares_at_the_distance_that_all_reached() -> None:
    quick = [(0.5, 1.0), (1.0, 1.5)]
    slow = [(1.0, 0.5), (3.0, 3.0)]
    reach, gains = equal_kl({"quick": [quick, quick], "slow": [slow]})
    assert reach == 1.0
    assert gains["quick"] == pytest.approx([1.5, 1.5])
    assert gains["slow"] == pytest.approx([0.5])
    # The end of the run alone would say that the slow one is better.
    halfway = equal_kl({"quick": [quick], "short": [[(0.25, 0.1)]]})
    assert halfway[0] == 0.25
    assert halfway[1]["quick"] == pytest.approx([0.5])


def test_agreement_in_sign_and_rank() -> None:
    proxy = {name: np.array([v, v]) for name, v in (("a", -1.0), ("b", 0.5), ("c", 2.0))}
    gold = {name: np.array([v, v]) for name, v in (("a", -9.0), ("b", 0.1), ("c", 0.2))}
    assert agreement(proxy, gold) == (1.0, pytest.approx(1.0))
    other = {**gold, "c": np.array([-0.2, -0.3])}
    five = {name: np.array([float(place)]) for place, name in enumerate("abcde")}
    swapped = {**five, "b": five["c"], "c": five["b"]}
    assert agreement(five, swapped)[1] == 0.9  # not below a goal of 0.9 by a rounding
    signs, ranks = agreement(proxy, other)
    assert signs == pytest.approx(2 / 3)
    assert ranks < 1
    same = {name: np.zeros(2) for name in proxy}
    assert math.isnan(agreement(proxy, same)[1])
