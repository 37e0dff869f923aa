"""The total of several runs against independent evaluations of the same two expectations."""

import functools
import math
from typing import Any

import networkx
import numpy as np
import pytest
from scipy.special import ndtr

from dprlhf import DprlhfError
from dprlhf.privacy import composition
from dprlhf.privacy import composition as privacy_filter
from dprlhf.privacy.accounting import Mechanism, delta_of, epsilon
from dprlhf.privacy.composition import filter_share, total_epsilon
from dprlhf.privacy.gaussian import gaussian_epsilon, gaussian_noise_multiplier
from dprlhf.privacy.losses import Composed, Losses
from dprlhf.privacy.random_allocation import SIDES

DELTA = 1e-5
GAUSSIAN = Mechanism(2.0, 5, "fixed", "zero-out")
ALLOCATED = Mechanism(1.0, 2)


def call(mean: np.ndarray, spread: float, strike: np.ndarray) -> np.ndarray:
    """E[(mean · X − strike)_+], log X ~ N(−spread²/2, spread²); all strikes."""
    with np.errstate(divide="ignore", invalid="ignore"):
        d = (np.log(mean / strike) + spread**2 / 2) / spread
        value = mean * ndtr(d) - strike * ndtr(d - spread)
    return np.where(strike > 0, value, mean - strike)


def golden(z_allocated: float, z_gaussian: float, eps: float) -> float:
    """δ of 1-out-of-2 allocation followed by one Gaussian, the larger side, by quadrature.

    Under Q both losses are functions of three independent normals: L = (X₁ + X₂)/2 · Y with
    log-normal X₁, X₂ (spread 1/z_allocated) and Y (1/z_gaussian). E[(L − e^ε)_+] and
    E[(1 − e^ε L)_+] are a closed form in X₁ inside a sum over X₂ and Y.
    """
    grid = np.linspace(-9, 9, 1001)
    mass = np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi) * (grid[1] - grid[0])
    a, g = 1 / z_allocated, 1 / z_gaussian
    x2 = np.exp(a * grid - a * a / 2)[:, None]
    # E[(Y (X1 + X2)/2 − c)_+] = E[Y E[(X1/2 − (c/Y − X2/2))_+]].
    y = np.exp(g * grid - g * g / 2)[None, :]
    weight = mass[:, None] * mass[None, :]
    c = math.exp(eps)
    remove = (weight * y * call(np.array(0.5), a, c / y - x2 / 2)).sum()
    # (1 − cL)_+ = (1 − cL) + c (L − 1/c)_+, and E[L] = 1.
    add = 1 - c + c * (weight * y * call(np.array(0.5), a, 1 / (c * y) - x2 / 2)).sum()
    return float(max(remove, add))


@pytest.mark.slow
def test_allocation_then_gaussian_equals_the_quadrature() -> None:
    gaussian = Mechanism(2.0, 5, "fixed", "zero-out")
    allocated = Mechanism(1.0, 2, adjacency="zero-out")
    found = total_epsilon([allocated, gaussian], DELTA).epsilon
    assert golden(1.0, 2.0, found) <= DELTA * (1 + 1e-6)  # an upper bound ...
    assert golden(1.0, 2.0, found * 0.999) > DELTA  # ... and no looser than 0.1%
    alone = [epsilon(m, DELTA).epsilon for m in (allocated, gaussian)]
    assert max(alone) < found < 0.8 * sum(alone)


def test_the_quadrature_itself_knows_one_gaussian_and_one_allocation() -> None:
    one = gaussian_epsilon(2.0, DELTA)
    assert golden(1e3, 2.0, one) == pytest.approx(DELTA, rel=0.02)
    single = epsilon(ALLOCATED, DELTA).epsilon
    assert golden(1.0, 1e3, single) == pytest.approx(DELTA, rel=0.02)


def test_gaussians_compose_in_closed_form() -> None:
    runs = [Mechanism(z, 3, "fixed", "replace-one") for z in (3.0, 4.0)]
    assert total_epsilon(runs, DELTA).epsilon == pytest.approx(gaussian_epsilon(1.2, DELTA))


@pytest.mark.slow
def test_poisson_runs_compose_too() -> None:
    """Rounds of one rate cost the same in two runs as in one, and sampling hides nobody at 1."""
    run, both = (Mechanism(1.0, t, "poisson", participations=t // 2) for t in (4, 8))
    as_one = epsilon(both, DELTA).epsilon
    assert as_one * (1 - 1e-3) <= total_epsilon([run, run], DELTA).epsilon <= 1.01 * as_one
    everybody = Mechanism(2.0, 4, "poisson", participations=4)
    found = total_epsilon([everybody, everybody], DELTA).epsilon
    assert found == pytest.approx(gaussian_epsilon(2.0 / 8**0.5, DELTA), rel=2e-3)
    mixed = total_epsilon([Mechanism(1.0, 8, "poisson"), Mechanism(1.0, 8)], DELTA)
    alone = gaussian_epsilon(8**-0.5, DELTA)  # all rounds together, were membership known
    assert mixed.epsilon_lower <= mixed.epsilon < alone
    assert mixed.epsilon > epsilon(Mechanism(1.0, 8), DELTA).epsilon


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
@pytest.mark.parametrize("partition", ["random-allocation", "fixed"])
def test_a_total_counts_all_releases_of_a_round(partition: Any, adjacency: Any) -> None:
    """Four releases with twice the noise cost what one does."""
    beside = Mechanism(1.0, 8, adjacency=adjacency)
    one = Mechanism(1.0, 8, partition, adjacency)
    four = Mechanism(2.0, 8, partition, adjacency, releases_per_round=4)
    totals = [total_epsilon([run, beside], DELTA).epsilon for run in (one, four)]
    assert totals[1] == pytest.approx(totals[0], rel=1e-6)
    assert totals[0] > epsilon(one, DELTA).epsilon


def test_disjoint_users_pay_for_the_dearest_run_only() -> None:
    cheap, dear, other = (Mechanism(z, 4, "fixed", "zero-out") for z in (3.0, 1.0, 2.0))
    apart = [[i == j for j in range(3)] for i in range(3)]
    found = total_epsilon([cheap, dear, other], DELTA, apart)
    assert found.epsilon == epsilon(dear, DELTA).epsilon
    assert "parallel" in found.accountant
    assert delta_of(dear, found.epsilon) <= DELTA
    # cheap and other share users; dear has others.
    mixed = [[True, False, True], [False, True, False], [True, False, True]]
    together = total_epsilon([cheap, other], DELTA).epsilon
    assert total_epsilon([cheap, dear, other], DELTA, mixed).epsilon == pytest.approx(
        max(together, found.epsilon)
    )


def test_more_sets_of_runs_than_can_be_looked_at_cost_what_covers_them_all() -> None:
    """Thirty pairs of disjoint runs: 2³⁰ sets of thirty runs may have one user in common."""
    runs = [GAUSSIAN] * 60
    shared = [[i == j or i // 2 != j // 2 for j in range(60)] for i in range(60)]
    found = total_epsilon(runs, DELTA, shared).epsilon
    assert gaussian_epsilon(2.0 / 30**0.5, DELTA) <= found
    assert found == pytest.approx(gaussian_epsilon(2.0 / 60**0.5, DELTA))
    few = [row[:8] for row in shared[:8]]  # 2⁴ sets of four runs are looked at one by one
    exact = total_epsilon(runs[:8], DELTA, few).epsilon
    assert exact == pytest.approx(gaussian_epsilon(2.0 / 4**0.5, DELTA))


def test_the_sets_of_runs_are_the_maximal_cliques() -> None:
    """Against networkx, on relations of every density."""
    for seed in range(60):
        graph = networkx.gnp_random_graph(seed % 9 + 1, seed / 60, seed=seed)
        shared = networkx.to_numpy_array(graph).astype(bool).tolist()
        found = composition._groups(len(shared), shared)
        assert sorted(found) == sorted(map(sorted, networkx.find_cliques(graph)))


def test_a_pair_that_either_side_calls_shared_is_shared() -> None:
    half = [[True, True, False], [False, True, True], [True, False, True]]  # each of the next
    found = total_epsilon([GAUSSIAN] * 3, DELTA, half).epsilon
    assert found == pytest.approx(gaussian_epsilon(2.0 / 3**0.5, DELTA))


@pytest.mark.slow
def test_a_run_that_was_made_several_times_counts_as_often() -> None:
    repeated = total_epsilon([ALLOCATED, Mechanism(2.0, 4)], DELTA, times=[3, 1]).epsilon
    one_by_one = total_epsilon([ALLOCATED] * 3 + [Mechanism(2.0, 4)], DELTA).epsilon
    assert repeated == pytest.approx(one_by_one, rel=1e-9)
    gaussians = total_epsilon([GAUSSIAN], DELTA, times=[4]).epsilon
    assert gaussians == pytest.approx(gaussian_epsilon(1.0, DELTA))
    # Other users do not pay for it.
    apart = [[True, False], [False, True]]
    dear = Mechanism(1.2, 5, "fixed", "zero-out")
    assert total_epsilon([GAUSSIAN, dear], DELTA, apart, [2, 1]).epsilon == pytest.approx(
        gaussian_epsilon(1.2, DELTA)
    )
    many = total_epsilon([GAUSSIAN], DELTA, times=[64])  # no list of all their subsets
    assert many.epsilon == pytest.approx(gaussian_epsilon(0.25, DELTA))


@pytest.mark.slow
def test_runs_of_earlier_versions_under_add_remove_count_as_zero_out() -> None:
    old = Mechanism(1.0, 2, adjacency="add-remove")
    apart = [[True, False], [False, True]]
    for shared in (None, apart):
        found = total_epsilon([old, GAUSSIAN], DELTA, shared)
        assert found == total_epsilon([ALLOCATED, GAUSSIAN], DELTA, shared)
        assert any("zero-out" in line for line in found.assumptions)
    assert total_epsilon([old], DELTA).epsilon == epsilon(ALLOCATED, DELTA).epsilon


def test_runs_for_different_neighbours_have_no_total() -> None:
    replaced = Mechanism(2.0, 5, "fixed", "replace-one")
    with pytest.raises(DprlhfError, match=r"replace-one and zero-out.*privacy\.adjacency"):
        total_epsilon([ALLOCATED, replaced], DELTA)
    with pytest.raises(DprlhfError, match="no run"):
        total_epsilon([], DELTA)


def test_hardly_any_noise_costs_what_one_run_of_it_does() -> None:
    tiny = Mechanism(1e-160, 2, "fixed")
    assert total_epsilon([tiny, Mechanism(1.0, 2, "fixed")], 1e-6).epsilon >= 1e300


def worst(menu: list[Mechanism], side: Any, epsilon_at: Any, allowed: Any) -> float:
    """Return δ of the worst way to choose runs in view of the privacy loss so far.

    Dynamic programming over how often each was made, (i, j), and the loss, on a grid that the
    dominating pairs' losses are rounded to; ``epsilon_at(i, j)`` is claimed when it ends there.
    """
    step, half = 0.02, 600
    at = step * np.arange(-half, half + 1)
    kernels = []
    for mechanism in menu:
        reach = {s: mechanism.spec.pair.reach(mechanism, 1e-12, s) for s in SIDES}
        losses = composition.losses_of(mechanism, mechanism.spec.pair, step, reach)[side]
        kernel = np.zeros(2 * half + 1)
        kernel[half + losses.places] = losses.masses
        kernels.append(kernel)

    @functools.cache
    def value(i: int, j: int) -> np.ndarray:
        best = np.maximum(-np.expm1(epsilon_at(i, j) - at), 0.0)
        for kernel, then in zip(kernels, ((i + 1, j), (i, j + 1)), strict=True):
            if allowed(*then):
                padded = np.pad(value(*then), half, mode="edge")
                best = np.maximum(best, np.correlate(padded, kernel, "valid"))
        return best

    return float(value(0, 0)[half])


@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES)
def test_no_choice_in_view_of_results_exceeds_a_budget(side: Any) -> None:
    """The best of all strategies, found exactly; what settled plans cost is no bound on them."""
    menu = [Mechanism(4.0, 1, "fixed"), Mechanism(1.0, 16)]
    budget, delta = 2.5, 1e-3

    def share(i: int, j: int) -> float:
        return filter_share({m: n for m, n in zip(menu, (i, j), strict=True) if n}, budget, delta)

    found = worst(menu, side, lambda i, j: budget, lambda i, j: share(i, j) <= 1)
    assert delta / 50 < found <= delta
    assert share(1, 1) < 1 < share(1, 20)
    # The control: a claim after each run, of what the runs so far would have cost if settled.
    claims = lambda i, j: composition._sequential([menu[0]] * i, delta).epsilon if i else 0.0  # noqa: E731
    assert worst(menu, side, claims, lambda i, j: j == 0 and i <= 30) > 1.5 * delta


@pytest.mark.parametrize("last", [3, 5_000, 2**20 + 100, 2**21 + 100])
def test_losses_beyond_the_window_of_a_sum_and_infinite_ones_count(last: int) -> None:
    one = Losses(1e-3, np.array([0, last]), np.array([0.7, 0.2]), 0.1)
    for at in (0.0, 0.001, 0.09995, 4.0):
        exact = 2 * 0.1 - 0.1**2  # of the infinite ones
        for probability, loss in ((0.28, last), (0.04, 2 * last)):
            exact += probability * max(0.0, -math.expm1(at - 1e-3 * loss))
        assert exact <= Composed(((one, 2),)).delta(at) <= 1


@pytest.mark.parametrize("noise", [1.0, 30.0])
def test_a_runs_moment_is_an_upper_bound_and_tight(noise: float) -> None:
    """At order 2 it is known; of a run that costs little, a small error would be all of it."""
    run = Mechanism(noise, 4)
    exact = math.log1p(math.expm1(noise**-2) / 4)
    found = privacy_filter._renyi(run, 2.0, privacy_filter._tailed(run, 1e-12)["remove"][0])
    assert exact * (1 - 1e-6) <= found <= exact * 1.01


@pytest.mark.slow
def test_one_round_in_secret_takes_up_less_than_its_gaussian() -> None:
    """One run of z = 1 over 100 rounds fits in ε = 1.3, four in 1.7; one Gaussian costs 4.4."""
    run = Mechanism(1.0, 100)
    assert filter_share({run: 1}, 1.3, DELTA) < 1 < filter_share({run: 1}, 0.9, DELTA)
    assert filter_share({run: 4}, 1.7, DELTA) < 1 < filter_share({run: 40}, 1.7, DELTA)
    assert total_epsilon([run], DELTA, times=[4]).epsilon < 1.7


@pytest.mark.slow
def test_passes_take_up_as_much_as_runs() -> None:
    passes, run = Mechanism(1.0, 64, participations=4), Mechanism(1.0, 16)
    found = [filter_share(made, 4.0, DELTA) for made in ({passes: 1}, {run: 4})]
    assert found[0] == pytest.approx(found[1], rel=1e-2)
    assert found[0] < 1


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_gaussians_take_up_what_they_add_to_a_gaussian(adjacency: Any) -> None:
    runs = {Mechanism(8.0, 3, "fixed", adjacency): 2, Mechanism(4.0, 3, "stream", adjacency): 1}
    share = filter_share(runs, 4.0, DELTA)
    shift = 1 if adjacency == "zero-out" else 2
    together = shift * math.sqrt(2 / 64 + 1 / 16)
    exact = (together * gaussian_noise_multiplier(4.0, DELTA)) ** 2
    assert exact < share < 1.1 * exact
    assert filter_share({m: 2 * n for m, n in runs.items()}, 4.0, DELTA) == pytest.approx(2 * share)


def test_extremes_of_a_filter() -> None:
    tiny, endless = Mechanism(1e-160, 2, "fixed"), Mechanism(math.inf, 2, "fixed")
    assert filter_share({}, 1.0, DELTA) == filter_share({endless: 1}, 1.0, DELTA) == 0
    assert filter_share({tiny: 1, GAUSSIAN: 1}, 1.0, DELTA) == math.inf
    assert filter_share({GAUSSIAN: 1}, 1e17, DELTA) < 1
    with pytest.raises(DprlhfError, match="different neighbours"):
        filter_share({ALLOCATED: 1, Mechanism(2.0, 5, "fixed", "replace-one"): 1}, 1.0, DELTA)
