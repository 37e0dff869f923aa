"""Privacy accounting against ground truth that shares no code with it.

Ground truth: quadrature for T = 2, importance sampling with confidence intervals for larger T,
the pld-accounting library, and closed forms of one Gaussian from its two tail probabilities.
"""

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld.pld_pmf import DensePLDPmf
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import ndtr

from dprlhf.errors import DprlhfError
from dprlhf.privacy import random_allocation
from dprlhf.privacy.accounting import (
    Adjacency,
    Mechanism,
    Partition,
    delta_of,
    epsilon,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_noise_multiplier,
    noise_multiplier,
)
from dprlhf.privacy.composed_allocation import block, compose_blocks
from dprlhf.privacy.composition import total_epsilon
from dprlhf.privacy.gaussian import gaussian_deltas
from dprlhf.privacy.partitions import poisson
from dprlhf.privacy.random_allocation import SIDES, Side


def call(strike: float, s: float) -> float:
    """E[(X - strike)_+] for log X ~ N(-s²/2, s²)."""
    if strike <= 0:
        return 1 - strike
    d = -math.log(strike) / s
    return float(ndtr(d + s / 2) - strike * ndtr(d - s / 2))


def put(strike: float, s: float) -> float:
    """E[(strike - X)_+]."""
    if strike <= 0:
        return 0.0
    d = math.log(strike) / s
    return float(strike * ndtr(d + s / 2) - ndtr(d - s / 2))


def two_rounds(z: float, eps: float, side: Side) -> float:
    """T = 2: the first X by quadrature over its normal, the second in closed form."""
    s = 1 / z

    def integrand(g: float) -> float:
        x = math.exp(s * g - s * s / 2)
        weight = math.exp(-g * g / 2) / math.sqrt(2 * math.pi)
        if side == "remove":
            return weight * call(2 * math.exp(eps) - x, s) / 2
        return weight * math.exp(eps) * put(2 * math.exp(-eps) - x, s) / 2

    edges = np.linspace(-13, 13 + s, 60)
    return sum(quad(integrand, a, b, epsrel=1e-10)[0] for a, b in itertools.pairwise(edges))


def sampled(z, rounds, eps, side, tilt, samples):
    """Mean and standard error of the defining expectation, by importance sampling.

    All normals are shifted by ``tilt``. On the remove side the largest X is integrated in closed
    form given the others (Asmussen & Kroese), so that a single jump has no variance.
    """
    rng, s, c = np.random.default_rng(11), 1 / z, math.exp(eps)
    values = []
    for _ in range(math.ceil(samples * rounds / 2e6)):
        count = int(2e6 / rounds)
        drawn = rounds - 1 if side == "remove" else rounds
        g = rng.standard_normal((count, drawn)) + tilt
        weight = np.exp(drawn * tilt**2 / 2 - tilt * g.sum(1))
        x = np.exp(s * g - s * s / 2)
        if side == "remove":
            missing = rounds * c - x.sum(1)
            t = np.log(np.maximum(x.max(1), missing)) / s + s / 2
            values.append(weight * (ndtr(s - t) - missing * ndtr(-t)))
        else:
            values.append(weight * np.maximum(1 - c * x.mean(1), 0))
    v = np.concatenate(values)
    return float(v.mean()), float(v.std() / math.sqrt(len(v)))


@pytest.mark.parametrize(("eps", "z"), [(1, 3.7306), (2, 1.9938), (4, 1.0812), (8, 0.6002)])
def test_one_gaussian_needs_the_known_noise(eps: float, z: float) -> None:
    assert gaussian_noise_multiplier(eps, 1e-5) == pytest.approx(z, abs=6e-5)


def test_fixed_partition_is_one_gaussian() -> None:
    zero_out = epsilon(Mechanism(1.0, 100, "fixed", "zero-out"), 1e-5)
    replace = epsilon(Mechanism(1.0, 100, "stream", "replace-one"), 1e-5)
    assert zero_out.epsilon == pytest.approx(4.377, abs=5e-4)
    assert replace.epsilon == pytest.approx(9.997, abs=5e-4)
    assert zero_out.epsilon_lower <= zero_out.epsilon < zero_out.epsilon_lower * (1 + 1e-6)


@given(st.floats(0.05, 50), st.floats(0, 30))
@settings(max_examples=200, deadline=None)
def test_gaussian_delta_is_rounded_up_and_tight(z: float, eps: float) -> None:
    import mpmath

    with mpmath.workdps(60):
        a, b = (mpmath.mpf(i) / (2 * mpmath.mpf(z)) - mpmath.mpf(eps) * z for i in (1, -1))
        true = mpmath.ncdf(a) - mpmath.exp(mpmath.mpf(eps)) * mpmath.ncdf(b)
        if true > 1e-280:
            for found in (gaussian_delta(z, eps), gaussian_deltas(z, np.array([eps])).item()):
                assert true * (1 - 1e-15) <= found <= true * (1 + 1e-8)


@given(st.floats(-170, 300), st.floats(-300, -0.3))
@settings(max_examples=300, deadline=None)
def test_gaussian_epsilon_is_verified_or_infinite(log_z: float, log_delta: float) -> None:
    """At such noises a bound that holds on paper is undone by its own rounding."""
    z, delta = 10**log_z, 10**log_delta
    eps = gaussian_epsilon(z, delta)
    assert gaussian_delta(z, eps) <= delta or (math.isinf(eps) and z < 1e-149)
    if 1e-3 < z < 1e10 and delta > 1e-14 and eps > 0:
        assert gaussian_delta(z, eps * (1 - 1e-7)) > delta


# Required noise at delta = 1e-5, T = 16, 64, 100, 200; each is confirmed by sampling below.
REQUIRED = {
    1: (1.289, 0.945, 0.873, 0.783),
    2: (0.953, 0.762, 0.718, 0.659),
    4: (0.691, 0.592, 0.566, 0.531),
    8: (0.471, 0.427, 0.415, 0.398),
}


@pytest.mark.parametrize("eps", REQUIRED)
def test_required_noise(eps: int) -> None:
    for rounds, z in zip((16, 64, 100, 200), REQUIRED[eps], strict=True):
        found, _ = noise_multiplier(eps, 1e-5, rounds=rounds)
        assert found == pytest.approx(z, abs=6e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "eps", "tilt"), [(16, 1, 0.3), (200, 2, 0.03), (100, 4, 0.0)])
def test_required_noise_is_confirmed_by_sampling(rounds: int, eps: int, tilt: float) -> None:
    z, _ = noise_multiplier(eps, 1e-5, rounds=rounds)
    mean, error = sampled(z, rounds, eps, "remove", tilt, 400_000)
    assert error < 0.004 * mean
    assert abs(mean - 1e-5) < 4 * error + 1e-3 * mean  # calibration is good to 1e-4 in z


@pytest.mark.parametrize("z", [0.3, 1.0, 5.0, 30.0])
@pytest.mark.parametrize("side", ["remove", "add"])
def test_two_rounds_against_quadrature(z: float, side: Side) -> None:
    for share in (0.0, 0.3, 0.6):
        eps = share * gaussian_epsilon(z, 1e-5)
        true = two_rounds(z, eps, side)
        found = random_allocation.bracket(z, 2, eps, side)
        assert true * (1 - 1e-9) <= found.upper <= true * (1 + 1e-3)
        if side == "remove":
            assert found.lower <= two_rounds(z, max(found.epsilon_lower, 0.0), side) * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("z", "rounds", "eps", "side", "tilt"),
    [
        (2.0, 40, 0.25, "remove", 0.25),
        (0.4, 30, 8.0, "remove", 0.0),
        (0.8, 2000, 0.1, "remove", 0.02),
        (1.0, 16, 0.6, "add", -0.7),
        (5.0, 5, 0.3, "add", -1.5),
        (1.0, 500, 0.1, "add", -0.12),
    ],
)
def test_curves_against_sampling(z, rounds, eps, side, tilt):
    mean, error = sampled(z, rounds, eps, side, tilt, 40_000)
    assert error < 0.03 * mean
    assert abs(random_allocation.bracket(z, rounds, eps, side).upper - mean) < 4 * error


@pytest.mark.slow
@given(st.floats(0, 4), st.floats(math.log10(0.2), math.log10(8)), st.floats(-9, -3))
@settings(max_examples=40, deadline=None)
def test_bounds_are_within_one_percent(log_t: float, log_z: float, log_delta: float) -> None:
    cost = epsilon(Mechanism(10**log_z, round(10**log_t)), 10**log_delta)
    assert cost.epsilon_lower <= cost.epsilon
    if 0.05 <= cost.epsilon <= 20:
        assert cost.epsilon <= 1.01 * cost.epsilon_lower


@pytest.mark.slow
@given(st.integers(1, 300), st.floats(0.3, 5), st.floats(1.001, 2), st.floats(-9, -3))
@settings(max_examples=12, deadline=None)
def test_epsilon_falls_with_noise_rounds_and_delta(rounds, z, factor, log_delta):
    delta = 10**log_delta
    base = epsilon(Mechanism(z, rounds), delta)
    assert epsilon(Mechanism(z * factor, rounds), delta).epsilon_lower <= base.epsilon
    assert epsilon(Mechanism(z, 2 * rounds), delta).epsilon_lower <= base.epsilon
    assert epsilon(Mechanism(z, rounds), delta * factor / 2.5).epsilon >= base.epsilon_lower
    assert base.epsilon <= gaussian_epsilon(z, delta)
    if base.epsilon > 0:
        assert delta_of(Mechanism(z, rounds), base.epsilon) <= delta
        assert delta_of(Mechanism(z, rounds), base.epsilon * 0.99) > delta


@pytest.mark.parametrize(("z", "eps"), [(1.0, 1.0), (5.0, 0.3)])
def test_negative_control_rounding_down_falls_below_the_truth(z, eps, monkeypatch):
    original: Callable[..., random_allocation._Lattice] = random_allocation._lattice

    def floor(sigma: float, step: float, top: int) -> random_allocation._Lattice:
        lattice = original(sigma, step, top)
        with np.errstate(divide="ignore"):
            below = ndtr(np.log(lattice.atoms * step) / sigma + sigma / 2)
        weights = np.append(np.diff(below), 0.0)  # each cell's mass on its left end
        return random_allocation._Lattice(step, lattice.atoms, weights, 0.0, 0.0)

    true = two_rounds(z, eps, "remove")
    assert random_allocation.bracket(z, 2, eps, "remove").upper >= true
    monkeypatch.setattr(random_allocation, "_lattice", floor)
    assert random_allocation.bracket(z, 2, eps, "remove").upper < true * (1 - 1e-6)


def test_lattice_keeps_mass_and_mean() -> None:
    for z, step, top in [(1.0, 0.01, 700), (0.2, 5.0, 10**7), (30.0, 1e-4, 11_000), (3, 0.9, 4)]:
        lattice = random_allocation._lattice(1 / z, step, top)
        cap, s = top * step, 1 / z
        mass = ndtr(math.log(cap) / s + s / 2)
        mean = ndtr(math.log(cap) / s - s / 2)
        assert (lattice.weights >= 0).all()
        assert lattice.weights.sum() == pytest.approx(mass, rel=1e-12)
        assert (lattice.weights * lattice.atoms * step).sum() == pytest.approx(mean, rel=1e-12)


def test_extreme_noise_never_crashes() -> None:
    for partition in ("random-allocation", "poisson"):
        for z in (1e-160, 1e-3, 0.02, 1e6, 1e12, math.inf):
            for k in (1, 5):
                cost = epsilon(Mechanism(z, 100, partition, participations=k), 1e-6)
                assert 0 <= cost.epsilon_lower <= cost.epsilon
                assert not math.isnan(cost.epsilon)
                assert cost.epsilon > 1000 or z > 0.1
                if z > 1e6:
                    assert cost.epsilon < 1e-3
    for z in (0.01, 0.029, 0.031, 0.05):  # T delta above 1: no single-jump bound to start from
        assert 100 < epsilon(Mechanism(z, 1000), 0.01).epsilon <= gaussian_epsilon(z, 0.01)
    assert epsilon(Mechanism(math.inf, 100), 1e-6).epsilon == 0
    assert epsilon(Mechanism(1e-160, 100), 1e-6).epsilon == math.inf


def test_replace_one_under_random_allocation() -> None:
    # A user's gradient turned to its opposite, P = mean N(e_i) against Q = mean N(-e_i), T = 4.
    z, rounds, eps = 1.0, 4, 3.0
    rng = np.random.default_rng(3)
    noise = z * rng.standard_normal((1_000_000, rounds))
    noise[:, 0] += 1
    loss = np.log(np.exp(noise / z**2).sum(1)) - np.log(np.exp(-noise / z**2).sum(1))
    v = np.maximum(1 - np.exp(eps - loss), 0)
    true, error = v.mean(), v.std() / 1000
    assert true > 20 * error
    assert delta_of(Mechanism(z, rounds, adjacency="replace-one"), eps) >= true - 4 * error
    # Negative control: the add/remove curve does not cover it.
    assert delta_of(Mechanism(z, rounds), eps) < true - 10 * error


def test_releases_per_round_are_one_gaussian_with_less_noise() -> None:
    for partition, adjacency in [("random-allocation", "add-remove"), ("fixed", "replace-one")]:
        four = epsilon(Mechanism(2.0, 50, partition, adjacency, releases_per_round=4), 1e-5)
        one = epsilon(Mechanism(1.0, 50, partition, adjacency), 1e-5)
        assert four.epsilon == pytest.approx(one.epsilon, rel=1e-9)


def test_composition_of_whole_gaussians_is_exact() -> None:
    # One round per pass: k passes are k Gaussians, that is one with noise z / sqrt(k).
    composed = compose_blocks(3.0, 1, 10, rough=False)
    true = gaussian_epsilon(3.0 / math.sqrt(10), 1e-6)
    for side in ("remove", "add"):
        found = composed[side].epsilon(1e-6, gaussian_epsilon(0.5, 1e-6))
        assert true * (1 - 1e-6) <= found <= true * 1.001


@pytest.mark.slow
def test_two_passes_of_two_rounds_against_sampling() -> None:
    z, eps = 1.5, 1.5
    rng, s = np.random.default_rng(4), 1 / z
    g = rng.standard_normal((1_000_000, 2, 2))
    g[:, :, 0] += s
    loss = np.log(np.exp(s * g - s * s / 2).mean(2)).sum(1)
    v = np.maximum(1 - np.exp(eps - loss), 0)
    found = delta_of(Mechanism(z, 4, participations=2), eps)
    assert abs(found - v.mean()) < 4 * v.std() / 1000 + 1e-3 * found


@pytest.mark.parametrize("side", SIDES)
def test_each_side_of_several_passes_against_sampling(side: Side) -> None:
    """Both neighbours' losses: zero-out states the larger side, and replace-one adds the two."""
    z, slots, passes, eps = 0.7, 4, 8, 1.0
    rng, s = np.random.default_rng(5), 1 / z
    g = rng.standard_normal((100_000, passes, slots))
    if side == "remove":
        g[:, :, 0] += s
    loss = np.log(np.exp(s * g - s * s / 2).mean(2)).sum(1) * (1 if side == "remove" else -1)
    v = np.maximum(1 - np.exp(eps - loss), 0)
    found = compose_blocks(z, slots, passes, rough=True)[side].delta(eps)
    assert abs(found - v.mean()) < 4 * v.std() / math.sqrt(len(v)) + 2e-3 * found


@pytest.mark.slow
@pytest.mark.parametrize("delta", [1e-8, 1e-12, 1e-14])
def test_no_epsilon_rests_on_what_an_fft_rounds(delta: float) -> None:
    """At a rate of one the truth is one Gaussian; the library's δ errs by 2e-13 here."""
    z, rounds = 1000.0, 20_000
    stated = epsilon(Mechanism(z, rounds, "poisson", participations=rounds), delta)
    true = gaussian_epsilon(z / math.sqrt(rounds), delta)
    assert gaussian_delta(z / math.sqrt(rounds), stated.epsilon) <= delta
    assert stated.epsilon_lower <= true <= stated.epsilon * (1 + 1e-12)
    assert stated.epsilon <= 1.001 * true


@pytest.mark.slow
def test_many_sampled_rounds_keep_their_grid_in_a_total() -> None:
    """At 20,000 rounds what FFTs may round is above the tail that a total leaves to its grid."""
    run = Mechanism(8.0, 20_000, "poisson", participations=200)
    two = total_epsilon([run, run], 1e-6).epsilon
    both = Mechanism(8.0, 40_000, "poisson", participations=400)  # the same rounds as one run
    alone = epsilon(both, 1e-6)
    assert alone.epsilon_lower <= two <= 1.03 * alone.epsilon


@pytest.mark.parametrize("delta", [1e-5, 1e-10, 1e-15])
def test_a_small_delta_keeps_what_secret_rounds_save(delta: float) -> None:
    """Each tail of the grids follows no δ, and an FFT's rounding is small beside δ itself."""
    passes = epsilon(Mechanism(1.0, 400, participations=4), delta).epsilon
    runs = total_epsilon([Mechanism(1.0, 100)], delta, times=[4]).epsilon
    assert passes == pytest.approx(runs, rel=2e-3)
    assert passes < 0.4 * gaussian_epsilon(0.5, delta)
    sampled = epsilon(Mechanism(1.0, 400, "poisson", participations=4), delta).epsilon
    assert sampled < 0.1 * gaussian_epsilon(0.05, delta)


def test_poisson_at_rate_one_is_the_composed_gaussian() -> None:
    cost = epsilon(Mechanism(2.0, 8, "poisson", participations=8), 1e-5)
    true = gaussian_epsilon(2.0 / math.sqrt(8), 1e-5)
    assert true * (1 - 1e-3) < cost.epsilon_lower <= cost.epsilon <= true * (1 + 1e-8)


@pytest.mark.slow
def test_poisson_with_little_noise_keeps_its_grid_small(monkeypatch: pytest.MonkeyPatch) -> None:
    z = 0.1
    real, sizes = DensePLDPmf.__init__, []

    def spied(self: Any, step: float, lower: int, masses: Any, *rest: Any) -> None:
        sizes.append(len(masses))
        real(self, step, lower, masses, *rest)

    monkeypatch.setattr(DensePLDPmf, "__init__", spied)
    cost = epsilon(Mechanism(z, 4, "poisson"), 1e-5)
    assert 50_000 < max(sizes) < 4 * 2 * 200_000  # four rounds, both signs
    assert gaussian_epsilon(z, 1e-5) < cost.epsilon < gaussian_epsilon(z / 2, 1e-5)
    assert cost.epsilon_lower <= cost.epsilon <= 1.01 * cost.epsilon_lower
    for z in (1e100, 1.34e154, sys.float_info.max):  # some squares are no floats
        cost = epsilon(Mechanism(z, 1, "poisson"), 1e-5)
        assert cost.epsilon < 1e-9
        assert cost.epsilon_lower == 0


def test_a_replaced_user_costs_no_more_where_one_gaussian_does() -> None:
    """At a tiny δ the ε of one Gaussian is beyond what is looked for, and that of the pair not."""
    assert block.epsilon(0.06, 64, 1e-110, "add") < 200 < 500 < gaussian_epsilon(0.06, 1e-110)
    costs = [
        epsilon(Mechanism(z, 64, adjacency="replace-one"), 1e-5).epsilon for z in (0.06, 0.064)
    ]
    assert costs[0] < 1.2 * costs[1]


@pytest.mark.parametrize("delta", [1e-3, 1e-9])
def test_poisson_with_too_little_noise_for_a_grid_counts_the_joins(delta: float) -> None:
    """The stated ε holds for a sampled run, and is not that of a user who joins every round."""
    z, rounds, k = 0.05, 20, 2
    stated = epsilon(Mechanism(z, rounds, "poisson", participations=k), delta).epsilon
    assert stated < 0.7 * gaussian_epsilon(z / math.sqrt(rounds), delta)
    assert delta_of(Mechanism(z, rounds, "poisson", participations=k), stated) <= delta
    rng, q = np.random.default_rng(5), k / rounds
    joins = rng.random((400_000, rounds)) < q
    x = (z * rng.standard_normal((400_000, rounds)) + joins - 0.5) / z**2
    loss = np.logaddexp(np.log1p(-q), math.log(q) + x).sum(1)
    for here in (stated, stated / 2):
        found = delta_of(Mechanism(z, rounds, "poisson", participations=k), here)
        v = -np.expm1(np.minimum(here - loss, 0.0))
        assert found >= v.mean() - 4 * v.std() / math.sqrt(len(v))
    assert found < 3 * v.mean()  # the bound gives away that a user hides in a round


@pytest.mark.slow
def test_poisson_against_sampling() -> None:
    z, rounds, k, eps = 1.0, 20, 2, 1.5
    rng, q = np.random.default_rng(5), k / rounds
    x = z * rng.standard_normal((400_000, rounds)) + (rng.random((400_000, rounds)) < q)
    loss = np.log1p(q * np.expm1((x - 0.5) / z**2)).sum(1)
    v = np.maximum(1 - np.exp(eps - loss), 0)
    found = delta_of(Mechanism(z, rounds, "poisson", participations=k), eps)
    assert abs(found - v.mean()) < 4 * v.std() / math.sqrt(len(v)) + 1e-3 * found


@pytest.mark.slow
def test_calibrate_then_account() -> None:
    rng = np.random.default_rng(0)
    kinds: list[tuple[Partition, Adjacency]] = [
        ("random-allocation", "add-remove"),
        ("random-allocation", "zero-out"),
        ("fixed", "zero-out"),
        ("stream", "replace-one"),
    ]
    for i in range(40):
        partition, adjacency = kinds[i % 4]
        rounds = round(10 ** rng.uniform(0, 2.5))
        eps, delta = 10 ** rng.uniform(math.log10(0.05), math.log10(20)), 10 ** rng.uniform(-9, -3)
        z, cost = noise_multiplier(
            eps, delta, rounds=rounds, partition=partition, adjacency=adjacency
        )
        again = epsilon(Mechanism(z, rounds, partition, adjacency), delta)
        assert cost == again
        assert 0.999 * eps <= again.epsilon <= eps, (partition, rounds, eps, delta)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 10), "noise_multiplier must be above 0, not 0.0"),
        ((math.nan, 10), "noise_multiplier must be above 0, not nan"),
        ((1.0, 0), "rounds must be a whole number of at least 1, not 0"),
        ((1.0, 2.5), "rounds must be a whole number of at least 1, not 2.5"),
        ((1.0, 10**13), "rounds must be at most 1,000,000,000"),
        ((1.0, 10, "random-allocation", "add-remove", 0), "participations must be .* not 0"),
        ((1.0, 10, "random-allocation", "add-remove", 11), "participations 11 exceeds rounds 10"),
        ((1.0, 10, "random-allocation", "add-remove", 3), "rounds 10 must be a multiple of .* 3"),
        ((1.0, 10, "random-allocation", "add-remove", 1, 0), "releases_per_round must be .* not 0"),
        ((1.0, 10, "fixed", "add-remove"), "fixed does not carry .*later batch.*zero-out"),
        ((1.0, 10, "stream", "add-remove"), "stream does not carry .*later batch.*zero-out"),
        ((1.0, 10, "stream", "zero-out", 2), "participations must be 1 with partition stream"),
        ((1.0, 10, "poisson", "replace-one"), "poisson does not carry adjacency replace-one: use"),
        ((1.0, 10, "shuffle"), "partition 'shuffle' is unknown: use one of random-allocation"),
        ((1.0, 10, "fixed", "add"), "adjacency 'add' is unknown: use one of add-remove"),
    ],
)
def test_refusals_name_the_key_and_the_value(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(DprlhfError, match=message) as refused:
        epsilon(Mechanism(*arguments), 1e-5)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_poisson_states_no_lower_bound_where_rounding_is_as_large_as_delta() -> None:
    # Exact at T = 2, q = 1/2, z = 1, by quadrature: the δ of ε = 8.937049 is 0.99945e-12.
    assert epsilon(Mechanism(1.0, 2, "poisson"), 1e-12).epsilon_lower < 8.937049
    assert epsilon(Mechanism(1.0, 2, "poisson"), 1e-6).epsilon_lower > 1


def test_hardly_any_noise_in_several_passes_is_composed() -> None:
    found = epsilon(Mechanism(0.04, 4, participations=2), 1e-5).epsilon
    assert found >= gaussian_epsilon(0.04 / 2**0.5, 1e-5) * (1 - 1e-7)  # nothing is amplified there


def test_the_lower_bound_of_poisson_is_rounded_down() -> None:
    run = Mechanism(1.0, 8, "poisson")
    optimistic = poisson._optimistic(1.0, 1 / 8, 8).get_epsilon_for_delta(1e-5)
    assert epsilon(run, 1e-5).epsilon_lower <= float(optimistic)
