"""The accountant of non-Gaussian rounds, against enumeration of every outcome."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dprlhf.errors import DprlhfError
from dprlhf.privacy.pure import Mechanism, delta_of, epsilon, round_epsilon

Array = NDArray[np.float64]
Pair = tuple[Array, Array]  # one round's law with the user, and without


def response(e0: float, d0: float = 0.0) -> Pair:
    """Leaky randomised response: only with the user, only without, yes, no."""
    yes = (1 - d0) * math.exp(e0) / (1 + math.exp(e0))
    no = (1 - d0) / (1 + math.exp(e0))
    return np.array([d0, 0, yes, no]), np.array([0, d0, no, yes])


def hockey_stick(p: Array, q: Array, eps: float) -> float:
    return float(np.maximum(p - math.exp(eps) * q, 0).sum())


def allocated(pairs: list[Pair]) -> Pair:
    """The joint laws of all rounds when the user is in a uniformly random one, and in none."""

    def joint(laws: list[Array]) -> Array:
        return np.array([math.prod(x) for x in itertools.product(*laws)])

    without = [q for _, q in pairs]
    rounds = range(len(pairs))
    users = [joint([pairs[t][0] if t == i else without[t] for t in rounds]) for i in rounds]
    return np.mean(users, axis=0), joint(without)


def worst(p: Array, q: Array, eps: float) -> float:
    return max(hockey_stick(p, q, eps), hockey_stick(q, p, eps))


@pytest.mark.parametrize("d0", [0.0, 1e-3, 0.2])
@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
def test_delta_equals_the_enumeration_of_randomised_response(rounds: int, d0: float) -> None:
    for e0, eps in itertools.product([0.2, 1.0, 3.0], [0.0, 0.1, 0.7, 1.5]):
        if eps >= e0:
            continue
        exact = worst(*allocated([response(e0, d0)] * rounds), eps)
        found = delta_of(Mechanism(e0, rounds, delta=d0), eps)
        assert exact <= found <= exact * (1 + 1e-8) + 1e-38


@pytest.mark.parametrize(("rounds", "eps"), [(20, 0.5), (300, 0.2)])
def test_delta_agrees_with_monte_carlo(rounds: int, eps: float) -> None:
    e0, samples = 2.0, 400_000
    high = np.random.default_rng(1).binomial(rounds, 1 / (1 + math.exp(e0)), samples)
    ratio = (high * math.exp(e0) + (rounds - high) * math.exp(-e0)) / rounds
    sides = np.maximum(ratio - math.exp(eps), 0), np.maximum(1 - math.exp(eps) * ratio, 0)
    mean, error = max((x.mean(), x.std() / math.sqrt(samples)) for x in sides)
    found = delta_of(Mechanism(e0, rounds), eps)
    assert abs(found - mean) < 5 * error
    assert error < 0.05 * mean  # the comparison can fail


weights = st.lists(st.floats(0.01, 1), min_size=3, max_size=3)


def pure_pair(a: list[float], b: list[float]) -> tuple[Pair, float]:
    p, q = np.array(a) / sum(a), np.array(b) / sum(b)
    return (p, q), float(np.abs(np.log(p / q)).max())


@settings(max_examples=60, derandomize=True, deadline=None)
@given(weights, weights, weights, weights, st.floats(0, 1))
def test_no_pure_mechanism_costs_more(
    a: list[float], b: list[float], c: list[float], d: list[float], share: float
) -> None:
    (first, e1), (second, e2) = pure_pair(a, b), pure_pair(c, d)
    e0 = max(e1, e2, 1e-3)
    p, q = allocated([first, second, first])
    assert worst(p, q, share * e0) <= delta_of(Mechanism(e0, 3), share * e0) + 1e-12


@settings(max_examples=60, derandomize=True, deadline=None)
@given(weights, weights, weights, weights, weights, weights, st.floats(0, 1))
def test_no_adaptive_choice_of_rounds_costs_more(
    a: list[float],
    b: list[float],
    c: list[float],
    d: list[float],
    e: list[float],
    f: list[float],
    share: float,
) -> None:
    # The second round's mechanism depends on what the first released.
    first, e0 = pure_pair(a, b)
    later = [pure_pair(c, d), pure_pair(e, f), pure_pair(d, e)]
    e0 = max(e0, *(x for _, x in later), 1e-3)
    p1, q1 = first
    p = np.concatenate(
        [0.5 * p1[i] * later[i][0][1] + 0.5 * q1[i] * later[i][0][0] for i in range(3)]
    )
    q = np.concatenate([q1[i] * later[i][0][1] for i in range(3)])
    assert worst(p, q, share * e0) <= delta_of(Mechanism(e0, 2), share * e0) + 1e-12


@settings(max_examples=20, derandomize=True, deadline=None)
@given(weights, weights, weights, st.floats(0, 2))
def test_replacing_a_user(a: list[float], b: list[float], c: list[float], share: float) -> None:
    (one, e1), (other, e2) = pure_pair(a, b), pure_pair(c, b)
    e0 = max(e1, e2, 1e-3)
    p, _ = allocated([one, one])
    other_p, _ = allocated([other, other])
    found = delta_of(Mechanism(e0, 2, "random-allocation", "replace-one"), share * e0)
    assert worst(p, other_p, share * e0) <= found + 1e-12


def test_replacing_a_user_in_leaky_rounds_is_two_leaks() -> None:
    # One user's law, nobody's and another's, each (e0, d0)-indistinguishable from the next.
    e0, d0 = 1.0, 0.01
    leak = d0 * (1 + math.exp(e0))
    laws = [np.array([x, 1 - x]) for x in (leak, d0, 0.0)]
    for near, far in itertools.pairwise(laws):
        assert worst(near, far, e0) <= d0 * (1 + 1e-12)
    spent = worst(laws[0], laws[2], 2 * e0)
    found = delta_of(Mechanism(e0, 1, "random-allocation", "replace-one", d0), 2 * e0)
    assert spent * (1 - 1e-12) <= found <= spent * (1 + 1e-6)


@pytest.mark.parametrize("rounds", [2, 6])
def test_replacement_is_the_best_of_two_steps_and_one(rounds: int) -> None:
    e0, eps = 1.0, 0.9
    p, q = allocated([response(e0)] * rounds)
    steps = [
        hockey_stick(p, q, first) + math.exp(first) * hockey_stick(q, p, eps - first)
        for first in np.linspace(0, eps, 101)
    ]
    best = min(*steps, hockey_stick(*response(2 * e0), eps))
    found = delta_of(Mechanism(e0, rounds, "random-allocation", "replace-one"), eps)
    assert found == pytest.approx(best, rel=1e-8)


def test_a_pure_run_is_pure() -> None:
    for rounds in (1, 7):
        assert epsilon(Mechanism(1.5, rounds), 0.0).epsilon == 1.5
        assert delta_of(Mechanism(1.5, rounds), 1.5) == 0.0
        assert delta_of(Mechanism(1.5, rounds), 1.5 - 1e-6) > 0.0
    assert epsilon(Mechanism(1.5, 7, adjacency="replace-one"), 0.0).epsilon == 3.0


@pytest.mark.slow
def test_the_returned_epsilon_keeps_its_delta_and_is_tight() -> None:
    for mechanism in (
        Mechanism(1.0, 100),
        Mechanism(3.0, 1000, adjacency="zero-out"),
        Mechanism(1.0, 4, "fixed", "replace-one"),
        Mechanism(0.5, 200, delta=1e-7),
        Mechanism(1.0, 10, adjacency="replace-one"),
    ):
        cost = epsilon(mechanism, 1e-5)
        assert 0 < cost.epsilon <= 2 * mechanism.epsilon
        assert delta_of(mechanism, cost.epsilon) <= 1e-5
        assert delta_of(mechanism, cost.epsilon * 0.999) > 1e-5


def test_allocation_amplifies_and_the_usual_shortcut_does_not_hold() -> None:
    costs = [epsilon(Mechanism(1.0, t), 1e-5).epsilon for t in (1, 100, 1000)]
    assert costs == sorted(costs, reverse=True)
    assert costs[2] < 0.15
    # Amplification of one subsampled round, ln(1 + (e^e0 - 1)/T), is no bound for all T rounds.
    shortcut = math.log1p(math.expm1(1.0) / 100)
    assert delta_of(Mechanism(1.0, 100), shortcut) > 1e-2


@pytest.mark.slow
def test_round_epsilon_meets_the_budget() -> None:
    for rounds, adjacency in ((1, "zero-out"), (100, "add-remove"), (5, "replace-one")):
        e0, cost = round_epsilon(1.0, 1e-5, rounds=rounds, adjacency=adjacency)  # type: ignore[arg-type]
        mechanism = Mechanism(e0, rounds, adjacency=adjacency)  # type: ignore[arg-type]
        assert delta_of(mechanism, 1.0) <= 1e-5
        assert cost.epsilon <= 1.0
        more = Mechanism(e0 * 1.001, rounds, adjacency=adjacency)  # type: ignore[arg-type]
        assert delta_of(more, 1.0) > 1e-5
    assert round_epsilon(1.0, 0.0, rounds=1, adjacency="zero-out")[0] == pytest.approx(1.0)
    leaky, _ = round_epsilon(1.0, 1e-5, rounds=100, round_delta=1e-6)
    assert leaky < round_epsilon(1.0, 1e-5, rounds=100)[0]


@pytest.mark.slow
@pytest.mark.parametrize("e0", [300.0, 354.0, 356.0, 500.0])
@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_rounds_whose_exponents_overflow_when_squared_still_have_a_cost(
    e0: float, adjacency: Any
) -> None:
    mechanism = Mechanism(e0, 10, adjacency=adjacency)
    most = 2 * e0 if adjacency == "replace-one" else e0
    assert 0.99 * most < epsilon(mechanism, 1e-5).epsilon <= most
    assert 1e-5 < delta_of(mechanism, 0.9 * most) <= 1.0


@pytest.mark.parametrize("epsilon_", [0.0, 0.7, 1.9, 2.0])
def test_a_replacement_in_one_round_is_randomised_response_at_twice_epsilon(
    epsilon_: float,
) -> None:
    once = Mechanism(2.0, 1, "fixed", "replace-one", delta=0.01)
    replaced = Mechanism(1.0, 1, adjacency="replace-one", delta=0.01 / (1 + math.e))
    assert delta_of(replaced, epsilon_) <= delta_of(once, epsilon_) * (1 + 1e-8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Mechanism(0.0, 4), "epsilon of a round"),
        (lambda: Mechanism(math.inf, 4), "epsilon of a round"),
        (lambda: Mechanism(1.0, 0), "rounds"),
        (lambda: Mechanism(1.0, 4, delta=1.0), "delta of a round"),
        (lambda: Mechanism(1.0, 4, "poisson"), "random-allocation, fixed or stream"),
        (lambda: Mechanism(1.0, 4, "fixed", "add-remove"), "zero-out"),
        (lambda: epsilon(Mechanism(1.0, 4), 1.0), "delta must be"),
        (lambda: epsilon(Mechanism(1.0, 4, delta=1e-4), 1e-5), "delta of a round"),
        (lambda: delta_of(Mechanism(1.0, 4), -1.0), "epsilon must be"),
        (lambda: round_epsilon(1.0, 1e-6, rounds=4, round_delta=1e-5), "raise delta"),
        (lambda: round_epsilon(0.0, 1e-6, rounds=4), "positive"),
    ],
)
def test_out_of_range(call: object, message: str) -> None:
    with pytest.raises(DprlhfError, match=message):
        call()  # type: ignore[operator]


@pytest.mark.parametrize("partition", ["fixed", "stream"])
@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_known_batches_cost_one_whole_round(partition: Any, adjacency: Any) -> None:
    """Whoever knows a user's round sees one pure release; other rounds hide nothing of it."""
    for rounds, e0, share in itertools.product((1, 4, 100), (0.5, 2.0), (0.0, 0.3, 0.9)):
        answer = math.exp(e0) / (1 + math.exp(e0))  # randomised response: the dominating pair
        exact = answer - math.exp(share * e0) * (1 - answer)
        found = delta_of(Mechanism(e0, rounds, partition, adjacency), share * e0)
        assert exact <= found <= exact * (1 + 1e-6)
