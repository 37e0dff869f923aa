"""The best of a random number of runs: exact evaluations of small mechanisms against the bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import integrate, optimize, stats
from typer.testing import CliRunner

from dprlhf import DprlhfError
from dprlhf.cli.app import app
from dprlhf.privacy import selection
from dprlhf.privacy.accounting import Epsilon, Mechanism
from dprlhf.privacy.selection import Repetitions, selection_cost

ETAS = [-0.5, 0.0, 0.3, 1.0, 2.0]
Array = np.ndarray[Any, np.dtype[np.float64]]


def generating(repetitions: Repetitions) -> Callable[[Array], Array]:
    """Return f(x) = E[x^K] from Papernot & Steinke's definition of the distribution."""
    eta, gamma = repetitions.eta, repetitions.gamma
    if eta == 0:
        return lambda x: np.log1p(-(1 - gamma) * x) / math.log(gamma)
    return lambda x: ((1 - (1 - gamma) * x) ** -eta - 1) / (gamma**-eta - 1)


@pytest.mark.parametrize("eta", ETAS)
@pytest.mark.parametrize("mean", [1.5, 10.0])
def test_the_distribution(eta: float, mean: float) -> None:
    repetitions = Repetitions.with_mean(mean, eta)
    assert repetitions.mean == pytest.approx(mean, rel=1e-9)
    k = np.arange(1, 4000)
    p = np.array([repetitions.probability(int(n)) for n in k[:400]])
    x = np.linspace(0.05, 0.95, 7)
    summed = (p[:, None] * x ** k[:400, None]).sum(0)
    np.testing.assert_allclose(summed, generating(repetitions)(x), rtol=1e-6)
    h = 1e-6  # the mean is the slope of f at 1
    f = generating(repetitions)
    slope = (f(np.array(1.0)) - f(np.array(1 - h))) / h
    assert slope == pytest.approx(mean, rel=1e-2)


def test_nearly_logarithmic_is_logarithmic() -> None:
    at, near = Repetitions(0.0, 0.1), Repetitions(1e-9, 0.1)
    assert near.mean == pytest.approx(at.mean, rel=1e-7)
    assert near.probability(3) == pytest.approx(at.probability(3), rel=1e-7)


@pytest.mark.parametrize("eta", [1e-10, 1e-14, 5e-17, 1e-17, -1e-10, -1e-15, -1e-17])
def test_probabilities_add_up_however_small_eta_is(eta: float) -> None:
    """γ^−η − 1 cancels: the sum was 0.999 at 1e-14, 1.5 at 5e-17, and no number at 1e-17."""
    repetitions = Repetitions.with_mean(8.0, eta)
    assert sum(repetitions.probability(k) for k in range(1, 3000)) == pytest.approx(1, abs=1e-8)


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_draws_have_the_distribution(eta: float) -> None:
    repetitions = Repetitions.with_mean(3.0, eta)
    drawn = np.array([repetitions.draw() for _ in range(4000)])
    for k in (1, 2, 5):
        p = repetitions.probability(k)
        assert abs((drawn == k).mean() - p) < 6 * math.sqrt(p * (1 - p) / len(drawn))


class Finite:
    """A run with finitely many outcomes, worst first; its curve is exact."""

    def __init__(self, here: Array, there: Array) -> None:
        self.here, self.there = here, there

    def delta(self, epsilon: float) -> float:
        return max(divergence(self.here, self.there, epsilon),
                   divergence(self.there, self.here, epsilon))  # fmt: skip

    def epsilon(self, delta: float) -> float:
        if self.delta(0.0) <= delta:
            return 0.0
        high = 1.0
        while self.delta(high) > delta:
            high *= 2
        return float(optimize.bisect(lambda e: self.delta(e) - delta, 0.0, high, xtol=1e-12))

    def best(self, repetitions: Repetitions, which: Array) -> Array:
        """Return the exact distribution of the best of K outcomes."""
        below = np.append(0.0, np.cumsum(which))
        return np.diff(generating(repetitions)(np.minimum(below, 1.0)))


def divergence(p: Array, q: Array, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


def stated(runs: list[Finite], repetitions: Repetitions, delta: float) -> float:
    """Return the stated ε, with the finite runs' curves in place of mechanisms'."""
    given = {Mechanism(1.0 + i, 1): run for i, run in enumerate(runs)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "delta_of", lambda m, epsilon: given[m].delta(epsilon))
        patch.setattr(
            selection, "epsilon",
            lambda m, delta: Epsilon(given[m].epsilon(delta), 0.0, delta, "exact", ()),
        )  # fmt: skip
        return selection_cost(list(given), repetitions, delta).epsilon


masses = st.lists(st.floats(0.01, 1.0), min_size=5, max_size=5)


@hypothesis.given(masses, masses, st.sampled_from(ETAS), st.floats(1.1, 30), st.floats(1e-3, 0.3))
@hypothesis.settings(max_examples=150, deadline=None)
def test_no_finite_run_costs_more(
    one: list[float], other: list[float], eta: float, mean: float, delta: float
) -> None:
    here, there = np.array(one) / sum(one), np.array(other) / sum(other)
    run, repetitions = Finite(here, there), Repetitions.with_mean(mean, eta)
    cost = stated([run], repetitions, delta)
    best, other_best = run.best(repetitions, here), run.best(repetitions, there)
    assert best.sum() == pytest.approx(1)
    for p, q in ((best, other_best), (other_best, best)):
        assert divergence(p, q, cost) <= delta + 1e-9


@hypothesis.given(masses, masses, masses, masses, st.sampled_from(ETAS), st.floats(1.1, 30))
@hypothesis.settings(max_examples=50, deadline=None)
def test_no_list_of_finite_runs_costs_more(
    a: list[float], b: list[float], c: list[float], d: list[float], eta: float, mean: float
) -> None:
    """Each run draws one of two settings and releases which: their curves may cross."""
    one, other, third, fourth = (np.array(law) / sum(law) for law in (a, b, c, d))
    repetitions, delta = Repetitions.with_mean(mean, eta), 0.05
    cost = stated([Finite(one, other), Finite(third, fourth)], repetitions, delta)
    here, there = np.concatenate([one, third]) / 2, np.concatenate([other, fourth]) / 2
    run = Finite(here, there)
    for p, q in ((here, there), (there, here)):
        gap = divergence(run.best(repetitions, p), run.best(repetitions, q), cost)
        assert gap <= delta + 1e-9


def test_settings_whose_curves_cross_cost_the_largest_curve_at_each_epsilon() -> None:
    """By δ at 1e-5 the first is the costlier one; the second's best run really costs 3.586.

    That is its exact hockey-stick divergence, from the law of the mean of 1,024 log-normals.
    """
    one = Mechanism(1.9938, 1, "fixed")
    other = Mechanism(0.556, 1024)
    repetitions = Repetitions.with_mean(100, -0.5)
    costs = [selection_cost([m], repetitions, 1e-5) for m in (one, other)]
    assert costs[0].one_run > costs[1].one_run
    assert costs[0].epsilon < 3.586  # the costliest alone does not cover the list
    assert selection_cost([one, other], repetitions, 1e-5).epsilon > 3.586


def test_a_run_that_shouts_rarely() -> None:
    """The best outcome betrays the user: with many runs it is nearly always seen."""
    run = Finite(np.array([0.5, 0.49, 0.01]), np.array([0.5, 0.5, 0.0]))
    repetitions = Repetitions.with_mean(50.0)
    best = run.best(repetitions, run.here)
    assert best[2] > 0.3
    assert divergence(best, run.best(repetitions, run.there), 5.0) > 0.3
    delta = 0.1
    cost = stated([run], repetitions, 0.6)
    assert divergence(best, run.best(repetitions, run.there), cost) <= 0.6
    assert run.delta(0.0) <= delta  # one run has that δ at ε = 0


class TestGaussian:
    """One Gaussian release that is its own score: its exact cost by numerical integration."""

    Z, DELTA = 2.0, 1e-5

    def exact(self, repetitions: Repetitions, epsilon: float) -> float:
        """Return the larger δ of both orders, by quadrature over the released number."""
        f_mean, eta, gamma = repetitions.mean, repetitions.eta, repetitions.gamma

        def density(y: float, at: float) -> float:
            worse_tail = stats.norm.sf(y, at, self.Z)
            slope = f_mean * (gamma / (gamma + (1 - gamma) * worse_tail)) ** (1 + eta)
            return float(stats.norm.pdf(y, at, self.Z) * slope)

        def excess(a: float, b: float) -> float:
            found, _ = integrate.quad(
                lambda y: max(density(y, a) - math.exp(epsilon) * density(y, b), 0.0),
                -30, 30, limit=400, points=[-10, -5, 0, 5, 10],
            )  # fmt: skip
            return float(found)

        return max(excess(0.0, 1.0), excess(1.0, 0.0))

    @pytest.mark.slow
    @pytest.mark.parametrize("eta", [0.0, 1.0])
    @pytest.mark.parametrize("mean", [2.0, 20.0])
    def test_the_bound_holds_and_is_not_far_off(self, eta: float, mean: float) -> None:
        repetitions = Repetitions.with_mean(mean, eta)
        cost = selection_cost([Mechanism(self.Z, 1, "fixed")], repetitions, self.DELTA)
        assert self.exact(repetitions, cost.epsilon) <= self.DELTA
        assert self.exact(repetitions, cost.epsilon / 2.5) > self.DELTA
        # The control: one run's ε does not do for the best of several.
        assert self.exact(repetitions, cost.one_run) > self.DELTA

    @pytest.mark.parametrize("eta", [0.0, 1.0])
    def test_it_is_below_the_renyi_bound(self, eta: float) -> None:
        """Papernot & Steinke, Theorem 2, with the Gaussian's Rényi curve λ/(2z²)."""
        mean = 10.0
        repetitions = Repetitions.with_mean(mean, eta)

        def converted(order: float, other: float) -> float:
            of_best = (
                order / (2 * self.Z**2)
                + (1 + eta) * (1 - 1 / other) * other / (2 * self.Z**2)
                + (1 + eta) * math.log(1 / repetitions.gamma) / other
                + math.log(mean) / (order - 1)
            )
            return of_best + math.log(1 / self.DELTA) / (order - 1) + math.log1p(-1 / order)

        renyi = min(
            converted(order, other)
            for order in np.geomspace(1.5, 200, 150)
            for other in np.geomspace(1, 200, 150)
        )
        ours = selection_cost([Mechanism(self.Z, 1, "fixed")], repetitions, self.DELTA).epsilon
        assert ours < renyi
        assert ours > renyi / 2  # the same thing is meant


def test_one_run_is_one_run() -> None:
    cost = selection_cost([Mechanism(1.0, 1, "fixed")], Repetitions.with_mean(1.0), 1e-5)
    assert cost.epsilon == pytest.approx(cost.one_run, rel=1e-6)
    assert Repetitions(1.0, 1.0).draw() == 1


def test_more_runs_cost_more_and_far_less_than_their_sum() -> None:
    mechanism = Mechanism(4.0, 1, "fixed")
    costs = [
        selection_cost([mechanism], Repetitions.with_mean(mean), 1e-5).epsilon
        for mean in (1.0, 3.0, 10.0, 100.0)
    ]
    assert costs == sorted(costs)
    assert costs[-1] < 3 * costs[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Repetitions(-1.0, 0.5), "eta must be above -1"),
        (lambda: Repetitions(1.0, 0.0), r"gamma in \(0, 1\]"),
        (lambda: Repetitions.with_mean(0.5), "the mean must be from 1"),
        (lambda: Repetitions.with_mean(1e5, -0.999), "too close to -1"),
        (lambda: Repetitions.with_mean(8, 1e17), "too large for a mean of 8"),
        (lambda: Repetitions.with_mean(8, 1e308), "too large for a mean of 8"),
        (lambda: selection_cost([], Repetitions(1.0, 0.5), 1e-5), "one run or more"),
    ],
)
def test_refusals(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(DprlhfError, match=message):
        call()


def test_the_command() -> None:
    words = ["privacy", "selection", "--users", "1500", "--rounds", "1", "--partition", "fixed"]
    words += ["--noise-multiplier", "4", "--delta", "1e-5", "--runs", "10"]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, ended.output
    cost = selection_cost([Mechanism(4.0, 1, "fixed")], Repetitions.with_mean(10.0), 1e-5)
    assert f"{cost.epsilon:.3f}" in ended.stdout
    assert "secret" in ended.stdout
    ended = CliRunner().invoke(app, [*words, "--noise-multiplier", "5"])
    assert f"{cost.epsilon:.3f}" in ended.stdout  # the larger one
    ended = CliRunner().invoke(app, [*words, *3 * ["--partition", "fixed"], "--rounds", "1"])
    assert "once for each of the settings" in str(ended.exception)


@pytest.mark.parametrize("eta", [-0.5, 0.0, 1.0, 3.0])
def test_a_mean_next_to_one(eta: float) -> None:
    assert Repetitions.with_mean(1.0000001, eta).mean == pytest.approx(1.0000001, rel=1e-12)


@pytest.mark.parametrize("eta", [-0.5, 1e-310, 1.0, 100.0])
def test_probabilities_of_many_runs_are_those_of_the_recurrence(eta: float) -> None:
    made = Repetitions.with_mean(5_000, eta)
    expected = made.probability(1)
    for runs in range(1, 20_000):
        expected *= (1 - made.gamma) * (runs + eta) / (runs + 1)
    assert made.probability(20_000) == pytest.approx(expected, rel=1e-7)
    large = Repetitions.with_mean(1e6, eta)
    assert 0 <= large.probability(1_000_000) < 1e-5
