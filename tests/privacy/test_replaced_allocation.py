"""The curve of replace-one on random allocation, against quadrature and sampling."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from dprlhf.privacy import random_allocation, replaced_allocation
from dprlhf.privacy.accounting import Mechanism, delta_of, epsilon
from dprlhf.privacy.composition import total_epsilon
from dprlhf.privacy.gaussian import gaussian_epsilon
from dprlhf.privacy.losses import Composed, loss_distribution


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


def by_quadrature(z: float, eps: float) -> float:
    """Return δ of two rounds to about six digits."""
    nodes, spread = np.linspace(-12, 12, 40_001), 1 / z
    mass = norm.pdf(nodes) * (nodes[1] - nodes[0])
    w = np.exp(spread * nodes - spread**2 / 2)
    w -= math.exp(eps) * np.exp(-spread * nodes - spread**2 / 2)
    # E (w + W)_+ for each w: W grows with the nodes, so the terms that count are the last ones.
    first = np.searchsorted(w, -w)
    heavy, value = (np.append(np.cumsum(v[::-1])[::-1], 0.0)[first] for v in (mass, mass * w))
    return float(mass @ (w * heavy + value)) / 2


@pytest.mark.parametrize(
    ("z", "eps"), [(1.0, 0.5), (1.0, 4.0), (0.5, 6.0), (3.0, 0.2), (8.0, 0.01), (0.5, 2.0)]
)
def test_two_rounds_by_quadrature(z: float, eps: float) -> None:
    true = by_quadrature(z, eps)
    found = replaced_allocation.delta(z, 2, eps)
    assert true * (1 - 1e-5) <= found <= true * 1.005
    assert true * (1 - 1e-5) <= replaced_allocation.delta(z, 2, eps, rough=True) <= true * 1.2


@pytest.mark.parametrize("z", [0.7, 1.5, 4.0])
def test_a_whole_curve_by_quadrature(z: float) -> None:
    epsilons = 0.02 * np.arange(100)
    true = np.array([by_quadrature(z, e) for e in epsilons])
    found = replaced_allocation.curve(z, 2, epsilons)
    assert (found >= true * (1 - 1e-5) - 1e-12).all()
    assert (found <= true * 1.01 + 1e-9).all()
    # Bounds that are not convex, reflected at 0, would make a loss distribution of mass above 1.
    losses = Composed(((loss_distribution(0.02, found, found, np.arange(len(found))), 1),))
    assert losses.delta(0.0) == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize(("z", "rounds"), [(4.0, 16), (1.0, 50)])
def test_a_curve_is_sharp_where_the_lattice_is_not(z: float, rounds: int) -> None:
    """At ε = 0 the payoff has no decay for a tilt to use; a chord across 0 bounds it."""
    true, error = sampled(z, rounds, 0.0)
    (found, *_) = replaced_allocation.curve(z, rounds, 0.01 * np.arange(50))
    assert true - 4 * error <= found <= 1.01 * true + 4 * error
    assert replaced_allocation.delta(z, rounds, 0.0, rough=True) > 2 * found


@pytest.mark.slow
@pytest.mark.parametrize(("z", "rounds", "k", "eps"), [(1.5, 8, 2, 1.0), (2.0, 12, 3, 1.2)])
def test_several_passes_by_sampling(z: float, rounds: int, k: int, eps: float) -> None:
    """Independent blocks: their losses under the first of the pair add up."""
    random, slots, count = np.random.default_rng(3), rounds // k, 400_000
    loss = np.zeros(count)
    for _ in range(k):
        g = random.standard_normal((count, slots))
        g[:, 0] += 1 / z
        loss += np.log(np.exp(g / z).sum(1) / np.exp(-g / z).sum(1))
    values = np.maximum(1 - np.exp(eps - loss), 0)
    true, error = float(values.mean()), float(values.std() / math.sqrt(count))
    found = delta_of(Mechanism(z, rounds, adjacency="replace-one", participations=k), eps)
    assert true - 4 * error <= found <= 1.01 * true + 4 * error
    assert true > 100 * error
    # Negative control: one block fewer costs visibly less.
    if k == 2:
        assert replaced_allocation.delta(z, slots, eps) < true - 10 * error


@pytest.mark.slow
def test_two_runs_cost_what_one_run_of_two_passes_does() -> None:
    run = Mechanism(1.5, 8, adjacency="replace-one")
    both = Mechanism(1.5, 16, adjacency="replace-one", participations=2)
    together = total_epsilon([run, run], 1e-5).epsilon
    assert together == pytest.approx(epsilon(both, 1e-5).epsilon, rel=2e-3)


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


def test_a_fixed_batch_beside_next_to_nothing_costs_what_it_costs_alone() -> None:
    fixed = Mechanism(5.0, 16, "fixed", "replace-one")
    little = Mechanism(19.0, 1000, adjacency="replace-one")
    alone = epsilon(fixed, 1e-5).epsilon
    assert alone < total_epsilon([fixed, little], 1e-5).epsilon < 1.01 * alone


@pytest.mark.slow
def test_without_a_pair_for_replacements_two_steps_are_stated(monkeypatch):
    """A partition of one's own may lack it: the cost of a removal alone would be too little."""
    runs = [Mechanism(3.0, 16, adjacency="replace-one")] * 2
    removal = total_epsilon([Mechanism(3.0, 16)] * 2, 1e-5).epsilon
    found = total_epsilon(runs, 1e-5).epsilon
    lacking = dataclasses.replace(runs[0].spec, replaced=None)
    monkeypatch.setattr(Mechanism, "spec", property(lambda self: lacking))
    two_steps = total_epsilon(runs, 1e-5).epsilon
    assert 1.5 * removal < found < two_steps < 2.2 * removal


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


def test_where_nothing_can_be_computed_the_other_bounds_are_left() -> None:
    assert replaced_allocation.delta(1.0, 30, 60.0) == 1
    assert replaced_allocation.delta(0.01, 30, 1.0) == 1
    assert replaced_allocation.delta(1.0, 1, 1.0) == 1
    assert replaced_allocation.epsilon(0.01, 30, 1e-5, 1.0, 70.0) == 70.0
    assert replaced_allocation.epsilon(1.0, 30, 1e-5, 0.1, 0.2) == 0.2
