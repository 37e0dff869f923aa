"""Correlated noise on random allocation: the bound against integrals, and the proof's own steps."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from scipy.special import logsumexp

from dprlhf.privacy import correlated_allocation as correlated
from dprlhf.privacy import random_allocation
from dprlhf.privacy.accounting import Mechanism, delta_of, epsilon, noise_multiplier
from dprlhf.privacy.composition import total_epsilon
from dprlhf.privacy.correlated_noise import noise_matrix, square_root
from dprlhf.privacy.gaussian import gaussian_delta, gaussian_epsilon
from dprlhf.privacy.random_allocation import Side

DELTA = 1e-5
SIDES: tuple[Side, Side] = ("remove", "add")


def by_integration(columns: np.ndarray, noise: float, at: float, side: Side) -> float:
    """δ of one side by Simpson's rule over y, ``[T]``, in float64."""
    rounds = len(columns)
    scaled = columns / noise
    grid = np.linspace(-9, 11, {2: 1001, 3: 161}[rounds])
    density = np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi)
    weights = np.ones(len(grid))
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    weights *= density * (grid[1] - grid[0]) / 3
    total = 0.0
    rest = np.stack(np.meshgrid(*[grid] * (rounds - 1), indexing="ij"), -1).reshape(-1, rounds - 1)
    mass = np.prod(np.meshgrid(*[weights] * (rounds - 1), indexing="ij"), axis=0).ravel()
    fixed = rest @ scaled[1:] - (scaled**2).sum(0) / 2
    for y, weight in zip(grid, weights, strict=True):
        ratio = np.exp(fixed + y * scaled[0]).mean(1)
        above = ratio - math.exp(at) if side == "remove" else 1 - math.exp(at) * ratio
        total += weight * float(mass @ np.maximum(above, 0.0))
    return total


@pytest.fixture(autouse=True)
def _fewer_draws(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Draw an eighth as often, for bounds that are as valid."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(correlated, "_DRAWS", 2**17)
    forget()
    yield
    forget()


def forget() -> None:
    for cached in (correlated.delta, correlated.epsilon, correlated.noise, correlated._sums):
        cached.cache_clear()


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put other columns in place of C."""

    def put(new: np.ndarray) -> None:
        monkeypatch.setattr(correlated, "noise_matrix", lambda rounds, bands: new)
        forget()

    return put


@pytest.mark.parametrize(
    ("rounds", "bands", "noise", "at"),
    [(2, 2, 0.8, 3.0), (2, 2, 2.0, 0.5), (3, 2, 1.0, 2.0), (3, 3, 0.9, 0.0)],
)
def test_both_sides_are_bounded_closely_from_above(rounds, bands, noise, at):
    c = noise_matrix(rounds, bands)
    worst = max(by_integration(c, noise, at, side) for side in SIDES)
    for rough, slack in ((False, 1.1), (True, 1.25)):
        found = correlated.delta(noise, rounds, bands, at, rough)
        assert worst * (1 - 1e-4) <= found <= worst * slack
    # The control: what independent noise of the same z costs is too little.
    assert by_integration(np.eye(rounds), noise, at, "remove") < 0.97 * worst


def test_the_add_side_alone_is_bounded_closely() -> None:
    noise, at = 1.0, 1.0
    true = by_integration(noise_matrix(2, 2), noise, at, "add")
    sample = correlated._samples(noise, 2, 2, [(at, "add")], "certificate", 2**18)[0]
    low, high = sample.bounds(np.array([at]), 1e-9)
    assert low[0] < true < high[0] < low[0] * 1.1


@pytest.mark.parametrize(("rounds", "noise"), [(2, 1.0), (8, 1.2)])
def test_with_the_identity_it_is_the_exact_curve(rounds: int, noise: float) -> None:
    upper, lower = correlated.epsilon(noise, rounds, 1, DELTA)
    true = max(random_allocation.epsilon(noise, rounds, DELTA, side) for side in SIDES)
    assert lower * (1 - 1e-3) <= true <= upper <= 1.02 * true
    assert upper < 1.04 * lower


@pytest.mark.parametrize("noise", [1.0, 3.0])
def test_with_all_columns_equal_it_is_one_gaussian(noise: float, columns: Any) -> None:
    columns(np.full((4, 4), 0.5))
    upper, lower = correlated.epsilon(noise, 4, 4, DELTA)
    true = gaussian_epsilon(noise, DELTA)
    assert 0.97 * true < lower <= true * (1 + 1e-6)
    assert upper == pytest.approx(true, rel=0.01)
    at = 0.9 * true
    found = correlated.delta(noise, 4, 4, at)
    assert gaussian_delta(noise, at) * (1 - 1e-9) <= found


@pytest.mark.slow
def test_epsilon_falls_with_the_noise_and_lies_between_known_bounds() -> None:
    costs = [epsilon(Mechanism(z, 6, bands=6), DELTA) for z in (1.0, 1.5, 2.5)]
    for z, cost in zip((1.0, 1.5, 2.5), costs, strict=True):
        assert cost.epsilon_lower <= cost.epsilon <= gaussian_epsilon(z, DELTA)
        assert cost.epsilon > epsilon(Mechanism(z, 6), DELTA).epsilon
        assert cost.epsilon < 1.04 * cost.epsilon_lower
    first, second, third = (cost.epsilon for cost in costs)
    assert first > second > third


def test_the_noise_found_for_an_epsilon_is_certified_and_hardly_more_than_needed() -> None:
    z, cost = noise_multiplier(1.0, DELTA, rounds=4, bands=4)
    assert 0.99 <= cost.epsilon <= 1.0
    assert cost == epsilon(Mechanism(z, 4, bands=4), DELTA)
    assert delta_of(Mechanism(z, 4, bands=4), 1.0) <= DELTA
    assert "2^-50 of delta" in cost.accountant


def test_out_of_range_one_gaussian_bounds_it() -> None:
    for z, at in ((0.02, DELTA), (2.0, 1e-13), (1e5, DELTA)):
        upper, lower = correlated.epsilon(z, 4, 4, at)
        assert upper == gaussian_epsilon(z, at)
        assert lower <= upper
    assert correlated.delta(0.02, 4, 4, 1.0) == gaussian_delta(0.02, 1.0)


def test_delta_pays_for_the_probability_of_a_wrong_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert correlated.CHARGE == 2.0**-50
    free = correlated.delta(1.0, 3, 3, 3.0)
    cost, _ = correlated.epsilon(1.0, 3, 3, DELTA)
    monkeypatch.setattr(correlated, "CHARGE", DELTA / 2)
    forget()
    assert correlated.delta(1.0, 3, 3, 3.0) - free == pytest.approx(DELTA / 2, rel=1e-6)
    assert correlated.epsilon(1.0, 3, 3, DELTA)[0] > cost * 1.01


def test_the_confidence_bound_is_maurer_and_pontil_s() -> None:
    sample = correlated._samples(1.0, 3, 3, [(1.0, "remove")], "search", 5000)[0]
    points = np.array([0.9, 1.0, 1.1])
    mean, deviation = sample.moments(points)
    log = math.log(2 * 2 * 3 / 1e-6)
    width = deviation * np.sqrt(2 * log / 5000)
    width += 7 * sample.proposal.largest(points) * log / (3 * 4999)
    low, high = sample.bounds(points, 1e-6)
    assert high == pytest.approx(mean + width, rel=1e-6)
    assert low == pytest.approx(np.maximum(mean - width, 0), rel=1e-5)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("rounds", "bands", "noise", "at"), [(16, 16, 2.37, 1.0), (5, 2, 0.6, 4.0)]
)
def test_no_value_exceeds_its_bound(side, rounds, bands, noise, at):
    sample = correlated._samples(noise, rounds, bands, [(at, side)], "search", 2**15)[0]
    ratio, weight = np.exp(sample.log_ratio), np.exp(sample.log_weight)
    for e in (0.9 * at, at, 1.3 * at):
        above = ratio - math.exp(e) if side == "remove" else 1 - math.exp(e) * ratio
        largest = sample.proposal.largest(np.array([e]))[0]
        assert (np.maximum(above, 0) * weight).max() <= largest * (1 + 1e-9)


@pytest.mark.parametrize("side", SIDES)
def test_weights_are_those_of_the_proposal(side: Side) -> None:
    """E[dQ/dq] = 1 and E[dP/dq] = 1: the density that values are divided by is what was drawn."""
    sample = correlated._samples(2.0, 6, 3, [(0.2, side)], "certificate", 2**17)[0]
    for logs in (sample.log_weight, sample.log_weight + sample.log_ratio):
        values = np.exp(logs)
        error = values.std() / math.sqrt(len(values))
        assert error < 0.05
        assert abs(values.mean() - 1) < 5 * error


def test_the_certificate_s_draws_are_of_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the ε that is searched for would be the one at which these very draws look best."""
    used: dict[bytes, set[str]] = {}
    seen = correlated._normals

    def watched(context: Any, block: int, count: int, rounds: int) -> Any:
        normals, picks = seen(context, block, count, rounds)
        used.setdefault(normals[:4].tobytes(), set()).add(context[0])
        return normals, picks

    monkeypatch.setattr(correlated, "_normals", watched)
    _, cost = noise_multiplier(2.0, DELTA, rounds=3, bands=3)
    assert cost.epsilon <= 2.0
    assert all(len(uses) == 1 for uses in used.values())
    assert {use for uses in used.values() for use in uses} == {"search", "few", "certificate"}


def test_the_same_terms_give_the_same_epsilon() -> None:
    first = correlated.epsilon(1.25, 4, 3, DELTA)
    forget()
    correlated._normals.cache_clear()
    assert correlated.epsilon(1.25, 4, 3, DELTA) == first
    assert first[0] == pytest.approx(2.482, rel=5e-3)  # stated once, stated always


def adaptive_ratio(c: np.ndarray, noise: float, draws: int, seed: int, turn: bool) -> np.ndarray:
    """L where a user's direction in d = 2 depends on all released before, ``[draws]``."""
    rounds, random = len(c), np.random.default_rng(seed)
    logs = np.zeros((draws, rounds))
    directions = np.zeros((draws, rounds, 2))
    y = np.zeros((draws, 0, 2))
    for t in range(rounds):
        angle = (y.sum((1, 2)) * 3 if turn else np.zeros(draws)) if t else np.zeros(draws)
        directions[:, t] = np.stack([np.cos(angle), np.sin(angle)], 1)
        if turn == "against" and t:  # the opposite of the round before
            directions[:, t] = -directions[:, t - 1]
        row = noise * random.standard_normal((draws, 2))
        along = np.einsum("nid,nd->ni", directions[:, : t + 1], row)
        logs[:, : t + 1] += c[t, : t + 1] * along / noise**2 - c[t, : t + 1] ** 2 / (2 * noise**2)
        y = np.concatenate([y, row[:, None]], 1)
    return np.exp(logsumexp(logs, axis=1) - math.log(rounds))


@pytest.mark.slow
@pytest.mark.parametrize("turn", [True, "against"])
@pytest.mark.parametrize("side", SIDES)
def test_directions_that_turn_cost_no_more(turn: Any, side: Side) -> None:
    noise, at, draws = 0.8, 0.7, 200_000

    def value(c: np.ndarray, turn: Any, seed: int) -> tuple[float, float]:
        ratio = adaptive_ratio(c, noise, draws, seed, turn)
        above = ratio - math.exp(at) if side == "remove" else 1 - math.exp(at) * ratio
        values = np.maximum(above, 0.0)
        return float(values.mean()), float(values.std()) / math.sqrt(draws)

    c = noise_matrix(3, 3)
    same, turned = value(c, False, 1), value(c, turn, 2)
    error = math.hypot(same[1], turned[1])
    assert turned[0] < same[0] + 4 * error
    true = by_integration(c, noise, at, side)
    assert abs(same[0] - true) < 4 * same[1] + 1e-4 * true
    # The control: with a negative entry, turning against the round before costs more.
    if turn == "against":
        c = np.array([[0.6, 0, 0], [-0.8, 0.6, 0], [0, -0.8, 1.0]])
        same, turned = value(c, False, 3), value(c, turn, 4)
        assert turned[0] > same[0] + 4 * math.hypot(same[1], turned[1])


def test_the_columns_are_non_negative_with_norms_of_at_most_one() -> None:
    for rounds, bands in ((1, 1), (5, 2), (16, 16), (64, 7)):
        c = noise_matrix(rounds, bands)
        units = (c * 2**20).astype(object)
        assert (c >= 0).all()
        assert (np.triu(c, 1) == 0).all()
        if bands > 1:
            assert all(sum(int(u) ** 2 for u in column) <= 2**40 for column in units.T)
        banded = square_root(rounds, bands)
        assert all(c[t, t - k] == banded[t, k] for t in range(rounds) for k in range(min(bands, t)))


def test_two_runs_cost_at_least_what_their_joint_loss_does() -> None:
    """Against a Monte Carlo of both runs' dominating pairs."""
    run, at, draws = Mechanism(1.0, 2, bands=2), 2.0, 400_000
    random = np.random.default_rng(5)
    scaled = noise_matrix(2, 2)
    logs = np.zeros(draws)
    for _ in range(2):
        own = scaled.T[random.integers(2, size=draws)] + random.standard_normal((draws, 2))
        logs += logsumexp(own @ scaled - (scaled**2).sum(0) / 2, axis=1) - math.log(2)
    values = np.maximum(-np.expm1(at - logs), 0.0)
    true, error = values.mean(), values.std() / math.sqrt(draws)
    stated = total_epsilon([run, run], float(true - 4 * error)).epsilon
    assert stated >= at
