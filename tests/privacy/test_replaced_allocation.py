"""The curve of replace-one on random allocation, against quadrature and sampling."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from dprlhf.privacy import random_allocation, replaced_allocation
from dprlhf.privacy.accounting import Mechanism, delta_of, epsilon, noise_multiplier
from dprlhf.privacy.gaussian import gaussian_epsilon


def sampled(z: float, rounds: int, eps: float, count: int = 200_000) -> tuple[float, float]:
    """Return δ of mean N(e_i) against mean N(−e_i) by sampling the first, and its error."""
    random, sigma, found = np.random.default_rng(0), 1 / z, []
    for _ in range(count // 10_000):
        g = random.standard_normal((10_000, rounds))
        g[:, 0] += sigma
        ratio = np.exp(-sigma * g).sum(1) / np.exp(sigma * g).sum(1)
        found.append(np.maximum(1 - math.exp(eps) * ratio, 0))
    values = np.concatenate(found)
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


@pytest.mark.parametrize(
    ("z", "eps"), [(1.0, 0.5), (1.0, 4.0), (0.5, 6.0), (3.0, 0.2), (8.0, 0.01), (0.5, 2.0)]
)
def test_two_rounds_by_quadrature(z: float, eps: float) -> None:
    nodes, spread = np.linspace(-12, 12, 40_001), 1 / z
    mass = norm.pdf(nodes) * (nodes[1] - nodes[0])
    w = np.exp(spread * nodes - spread**2 / 2)
    w -= math.exp(eps) * np.exp(-spread * nodes - spread**2 / 2)
    # E (w + W)_+ for each w: W grows with the nodes, so the terms that count are the last ones.
    first = np.searchsorted(w, -w)
    heavy, value = (np.append(np.cumsum(v[::-1])[::-1], 0.0)[first] for v in (mass, mass * w))
    true = float(mass @ (w * heavy + value)) / 2
    found = replaced_allocation.delta(z, 2, eps)
    assert true * (1 - 1e-5) <= found <= true * 1.005
    assert true * (1 - 1e-5) <= replaced_allocation.delta(z, 2, eps, rough=True) <= true * 1.2


@pytest.mark.parametrize(
    ("z", "rounds", "eps"),
    [(1.0, 16, 0.5), (1.0, 16, 1.5), (1.0, 100, 0.5), (0.6, 64, 2.0), (2.0, 10, 0.3)],
)
def test_many_rounds_by_sampling(z: float, rounds: int, eps: float) -> None:
    true, error = sampled(z, rounds, eps)
    found = replaced_allocation.delta(z, rounds, eps)
    assert abs(found - true) < 4 * error
    assert true > 15 * error
    # Negative control: another user in the same place costs more than nobody there.
    assert random_allocation.delta(z, rounds, eps, "remove") < true - 10 * error


@pytest.mark.parametrize("case", range(6))
def test_no_other_pair_of_contributions_costs_more(case: int) -> None:
    """Contributions at other angles and norms, in two dimensions, chosen by the last noise."""
    random = np.random.default_rng(case)
    z, rounds, eps, count = 1.0, 4, 0.8, 100_000
    angles, norms = random.uniform(0, math.pi, rounds), random.uniform(0.3, 1, (2, rounds))
    if case == 0:
        angles[:], norms[:] = math.pi, 1.0  # the extremal pair itself
    xi = random.standard_normal((count, rounds, 2)) * z
    total = np.zeros(count)
    turn = np.zeros(count)
    for i in range(rounds):
        sides = []
        for side, angle in ((0, turn), (1, turn + angles[i])):
            along = np.cos(angle) * xi[:, i, 0] + np.sin(angle) * xi[:, i, 1]
            size = norms[side, i]
            sides.append(np.exp((size * along - size**2 / 2) / z**2))
        total += sides[0] - math.exp(eps) * sides[1]
        turn = xi[:, i, 0]  # the next direction follows what was released
    values = np.maximum(total, 0) / rounds
    error = float(values.std() / math.sqrt(count))
    bound = replaced_allocation.delta(z, rounds, eps)
    assert values.mean() <= bound + 4 * error
    assert (abs(values.mean() - bound) < 4 * error) == (case == 0)


@pytest.mark.slow
def test_epsilon_is_within_delta_and_below_two_steps() -> None:
    for z, rounds, before in ((1.0, 100, 1.126), (1.0, 16, 3.117), (0.692, 16, 6.333)):
        mechanism = Mechanism(z, rounds, adjacency="replace-one")
        found = epsilon(mechanism, 1e-5).epsilon
        assert found < 0.8 * before
        assert delta_of(mechanism, found) <= 1e-5
        assert delta_of(mechanism, 0.998 * found) > 1e-5
        assert found < gaussian_epsilon(z / 2, 1e-5)


@pytest.mark.parametrize("target", [1e-3, 1e-7, 1e-9])
def test_small_deltas_keep_their_precision(target: float) -> None:
    found = replaced_allocation.epsilon(1.0, 30, target, 0.0, 5.0)
    assert replaced_allocation.delta(1.0, 30, found) <= target
    assert replaced_allocation.delta(1.0, 30, found) > 0.98 * target


@pytest.mark.slow
@pytest.mark.parametrize("rough", [False, True])
@pytest.mark.parametrize(("z", "rounds"), [(0.8, 30), (0.9, 8), (1.07, 8), (1.5, 8), (3.0, 16)])
def test_delta_falls_until_it_is_negligible(z: float, rounds: int, rough: bool) -> None:
    """A curve that rose again would lead the search for the smallest noise astray."""
    found = [replaced_allocation.delta(z, rounds, e, rough) for e in np.linspace(0.0, 12.0, 25)]
    falling = [(a, b) for a, b in itertools.pairwise(found) if a > 1e-8]
    assert all(b < a for a, b in falling)
    assert max(found[len(falling) :]) < 1e-8
    assert len(falling) > 1


def test_no_noise_is_wasted_at_a_small_delta() -> None:
    terms = {"rounds": 8, "partition": "random-allocation", "adjacency": "replace-one"}
    z, cost = noise_multiplier(5.0, 1e-7, **terms)
    assert 4.99 < cost.epsilon <= 5.0
    assert z < 0.88


def test_where_nothing_can_be_computed_the_other_bounds_are_left() -> None:
    assert replaced_allocation.delta(1.0, 30, 60.0) == 1
    assert replaced_allocation.delta(0.01, 30, 1.0) == 1
    assert replaced_allocation.delta(1.0, 1, 1.0) == 1
    assert replaced_allocation.epsilon(0.01, 30, 1e-5, 1.0, 70.0) == 70.0
    assert replaced_allocation.epsilon(1.0, 30, 1e-5, 0.1, 0.2) == 0.2
