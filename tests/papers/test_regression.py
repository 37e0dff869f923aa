"""Private least squares: ground truth without noise, sensitivities, the exponential mechanism's
law, and what the printed constants really spend."""

import itertools
import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import integrate, optimize, stats

from dprlhf.errors import DprlhfError
from dprlhf.privacy.gaussian import gaussian_epsilon
from dprlhf.privacy.randomness import uniforms
from dprlhf.updates.oracles import Contribution
from helpers.laws import is_standard_normal
from papers.regression import (
    ISSP,
    Exponential,
    ImproperBatchSGD,
    Oracle,
    ProjectedSGD,
    SufficientStatistics,
    fit,
    in_memory,
    issp,
)
from papers.regression.exponential import UNITS, choose, exponent, total_units
from papers.regression.in_memory import InMemoryRelease

Array = NDArray[np.float64]
KEY = bytes(range(32))
ADJACENCIES = ("add-remove", "zero-out", "replace-one")


def problem(users: int = 300, d: int = 3, seed: int = 0) -> tuple[Array, Array, Array]:
    """Unit features, targets of a linear function with noise, within ±2; and w*."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(users, d))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    w = rng.normal(size=d)
    w /= np.linalg.norm(w)
    return x, x @ w + rng.uniform(-0.5, 0.5, users), w


def exact(oracle: Oracle, x: Any, y: Any) -> Array:
    # A user's contribution knows nothing of how many rows of zeros fill its micro-batch.
    with mock.patch.object(in_memory, "_MICRO_BATCH", 256):
        found = fit(oracle, x, y, epsilon=math.inf, key=KEY)
    assert math.isinf(found.guarantee.epsilon)
    assert not found.guarantee.pure
    return found.w.numpy()


def constrained(x: Array, y: Array, radius: float) -> Array:
    """argmin ‖Xw − y‖ over ‖w‖ ≤ radius, by the multiplier of the constraint."""
    gram, vector = x.T @ x, x.T @ y

    def at(multiplier: float) -> Array:
        return np.linalg.solve(gram + multiplier * np.eye(len(gram)), vector)

    if np.linalg.norm(at(0.0)) <= radius:
        return at(0.0)
    return at(optimize.brentq(lambda v: np.linalg.norm(at(v)) - radius, 0.0, 1e9, xtol=1e-12))


@pytest.mark.slow
@pytest.mark.parametrize(
    "oracle",
    [
        SufficientStatistics(1, 2, 5),
        ProjectedSGD(1, 2, 150, radius=5),
        ImproperBatchSGD(1, 2, 150),
        ISSP(1, 2, leverage=5, ridge=1e-14),
    ],
    ids=lambda oracle: type(oracle).__name__,
)
def test_without_noise_each_is_least_squares(oracle: Oracle) -> None:
    x, y, _ = problem(users=200)
    truth = np.linalg.lstsq(x, y)[0]
    np.testing.assert_allclose(exact(oracle, x, y), truth, rtol=1e-9, atol=1e-9)
    # A user without data, and one row of lists, change nothing.
    padded = np.vstack([x, np.zeros(3)]).tolist(), [*y.tolist(), 0.0]
    np.testing.assert_allclose(exact(oracle, *padded), truth, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_projected_descent_is_constrained_least_squares() -> None:
    x, y, _ = problem(users=200)
    for radius in (0.3, 0.8):
        found = exact(ProjectedSGD(1, 2, 150, radius=radius), x, y)
        np.testing.assert_allclose(found, constrained(x, y, radius), rtol=1e-9)
        assert np.linalg.norm(found) == pytest.approx(radius)


def test_sufficient_statistics_are_projected() -> None:
    x, y, _ = problem()
    truth = np.linalg.lstsq(x, y)[0]
    found = exact(SufficientStatistics(1, 2, 0.3), x, y)
    np.testing.assert_allclose(found, truth * 0.3 / np.linalg.norm(truth), rtol=1e-9)


@pytest.mark.parametrize("radius", [None, 0.4])
def test_descent_is_the_stated_algorithm(radius: float | None) -> None:
    x, y, _ = problem()
    x, y = 3 * x, 3 * y  # bounds bind: features at 2, targets and predictions at 0.9
    bound, most, steps, step = 2.0, 0.9, 5, 0.7
    short = x * np.minimum(1, bound / np.linalg.norm(x, axis=1))[:, None]
    w, iterates = np.zeros(3), []
    for _ in range(steps):
        residual = np.clip(short @ w, -most, most) - np.clip(y, -most, most)
        w = w - step / bound**2 * (short * residual[:, None]).mean(0)
        if radius is not None:
            w = w * min(1, radius / np.linalg.norm(w))
        iterates.append(w)
    expected = np.mean(iterates[2:], axis=0)
    if radius is None:
        found = exact(ImproperBatchSGD(bound, most, steps, step), x, y)
    else:
        found = exact(ProjectedSGD(bound, most, steps, step, radius=radius), x, y)
    # The bound keeps a share for the rounding of the sum.
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_more_users_than_the_rounding_margin_covers_are_refused() -> None:
    x, y = torch.zeros(2**16 + 2, 1), torch.zeros(2**16 + 2)
    for users in (1000.0, 2.0**16):
        release = InMemoryRelease(x, y, 1.0, users, KEY)
        if users > 2**15:
            assert release(lambda features, _: features, 1.0).shape == (1,)
        else:
            with pytest.raises(DprlhfError, match="more than 65536 users"):
                release(lambda features, _: features, 1.0)


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_the_guarantee_of_gaussian_oracles(adjacency: Any) -> None:
    x, y, _ = problem()
    for oracle in (SufficientStatistics(1, 2, 5), ProjectedSGD(1, 2, 7, radius=5)):
        seen: list[float] = []

        class Spy(InMemoryRelease):
            def __call__(self, contribution: Contribution, bound: float) -> torch.Tensor:
                seen.append(self.noise_multiplier)  # noqa: B023
                return super().__call__(contribution, bound)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("papers.regression.in_memory.InMemoryRelease", Spy)
            found = fit(
                oracle, x, y, epsilon=1.5, delta=1e-5, adjacency=adjacency, users=300, key=KEY
            )
        assert len(seen) == oracle.releases
        distance = 2.0 if adjacency == "replace-one" else 1.0
        spent = gaussian_epsilon(seen[0] / math.sqrt(len(seen)) / distance, 1e-5)
        assert spent <= found.guarantee.epsilon <= 1.5
        assert spent > 1.499  # and no noise is wasted
        assert found.guarantee.adjacency == adjacency
        assert not found.guarantee.pure


def test_the_noise_has_the_stated_scale() -> None:
    x = torch.zeros(5, 20_000, dtype=torch.float64)
    release = InMemoryRelease(x, torch.zeros(5, dtype=torch.float64), 1.7, 9.0, KEY)
    draws = [release(lambda f, _: f, 0.3).numpy() * 9 / (1.7 * 0.3) for _ in range(2)]
    for draw in draws:
        assert stats.kstest(draw, "norm").pvalue > 1e-3
        assert stats.kstest(1.1 * draw, "norm").pvalue < 1e-3  # the control
    assert abs(np.corrcoef(*draws)[0, 1]) < 0.03


def test_the_guarantee_of_the_exponential_mechanism_is_pure() -> None:
    x, y, _ = problem()
    found = fit(Exponential(np.eye(3), 2), x, y, epsilon=0.5)
    assert found.guarantee.pure
    assert found.guarantee.epsilon == 0.5
    assert found.prediction_bound == 2


number = st.one_of(
    st.floats(-3, 3),
    st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1e300, -1e-300, 1e-160, 5e-324, 1e8]),
)
row = st.tuples(number, number, number)  # two features and a target
GAUSSIAN: list[SufficientStatistics | ProjectedSGD | ImproperBatchSGD] = [
    SufficientStatistics(0.5, 3.0, 2.0),
    ProjectedSGD(0.5, 3.0, 3, 8.0, radius=2.0),
    ImproperBatchSGD(0.5, 3.0, 3, 8.0),
]


class Recorder:
    """Answers with exact sums of clipped contributions, or with those of another run."""

    noise_multiplier = 0.0
    expected_batch_size = 1.0

    def __init__(self, rows: Array, answers: list[torch.Tensor] | None = None) -> None:
        self.rows, self.answers = torch.from_numpy(rows), answers
        self.sums: list[torch.Tensor] = []
        self.bounds: list[float] = []

    def __call__(self, contribution: Contribution, bound: float) -> torch.Tensor:
        release = InMemoryRelease(self.rows[:, :2], self.rows[:, 2], 0.0, 1.0, KEY)
        with mock.patch.object(in_memory, "_MICRO_BATCH", 16):
            self.sums.append(release(contribution, bound))
        self.bounds.append(bound)
        # Neighbours are compared at the same released history.
        return self.sums[-1] if self.answers is None else self.answers[len(self.sums) - 1]


def moves(oracle: Any, rows: Array, neighbour: Array) -> list[float]:
    """How far each release moves, in units of its bound."""
    one = Recorder(rows)
    oracle.solve(one, 2)
    other = Recorder(neighbour, one.sums)
    oracle.solve(other, 2)
    pairs = zip(one.sums, other.sums, one.bounds, strict=True)
    return [float((a - b).norm()) / bound for a, b, bound in pairs]


@pytest.mark.slow
@pytest.mark.parametrize("oracle", GAUSSIAN, ids=lambda oracle: type(oracle).__name__)
@settings(max_examples=40, derandomize=True, deadline=None)
@given(rows=st.lists(row, min_size=1, max_size=5), new=row)
def test_sensitivity(oracle: Any, rows: list[Any], new: Any) -> None:
    data, replaced = np.array(rows), np.array([new, *rows[1:]])
    zeroed = np.array([(0.0, 0.0, 0.0), *rows[1:]])
    assert max(moves(oracle, data, data[1:])) <= 1
    assert max(moves(oracle, data, zeroed)) <= 1
    assert max(moves(oracle, data, replaced)) <= 2


@pytest.mark.parametrize("oracle", GAUSSIAN, ids=lambda oracle: type(oracle).__name__)
def test_the_sensitivity_is_reached(oracle: Any) -> None:
    worst = np.array([[0.5, 0.0, 3.0], [0.5, 0.0, -3.0]])
    assert max(moves(oracle, worst[:1], worst[:0])) > 0.999


@pytest.mark.parametrize("oracle", GAUSSIAN[1:], ids=lambda oracle: type(oracle).__name__)
def test_a_step_is_bounded_by_what_w_can_predict(oracle: Any) -> None:
    """B (R + min(R, B‖w‖)), which the user of the worst target along w reaches at every step."""
    B, R = oracle.feature_bound, oracle.target_bound
    step = oracle.step_size / B**2
    released = [torch.tensor([-length / step, 0.0]).double() for length in (4.0, 1.5, 100.0)]
    worst = np.array([[B, 0.0, -R]])
    recorder = Recorder(worst, released)
    oracle.solve(recorder, 2)
    lengths = [0.0, 4.0, 5.5]  # of w before each answer
    if isinstance(oracle, ProjectedSGD):
        lengths = [min(length, oracle.radius) for length in lengths]
    assert recorder.bounds == pytest.approx([B * (R + min(R, B * w)) for w in lengths])
    assert recorder.bounds[1] < recorder.bounds[2] or isinstance(oracle, ProjectedSGD)
    norms = [float(total.norm()) for total in recorder.sums]
    assert norms == pytest.approx(recorder.bounds, rel=1e-5)


def test_the_clip_is_no_substitute_for_bounds() -> None:
    """Contributions keep their bound by themselves: the clip of a release does not cut them."""
    x = torch.tensor([[30.0, 40.0]], dtype=torch.float64)
    y = torch.tensor([-7.0], dtype=torch.float64)
    statistics = GAUSSIAN[0]
    assert isinstance(statistics, SufficientStatistics)
    assert float(statistics.statistics(x, y).norm()) == pytest.approx(1, rel=1e-12)
    seen: list[float] = []

    class Unclipped:
        noise_multiplier, expected_batch_size = 0.0, 1.0

        def __call__(self, contribution: Contribution, bound: float) -> torch.Tensor:
            seen.append(float(contribution(x, y).norm()) / bound)
            return -x[0]  # the next prediction is at its bound

    for oracle in GAUSSIAN[1:]:
        oracle.solve(Unclipped(), 2)
    assert max(seen) == pytest.approx(1, rel=1e-12)


def test_a_row_that_is_not_finite_is_an_absent_user() -> None:
    x, y, _ = problem()
    broken_x, broken_y = x.copy(), y.copy()
    broken_x[3, 1], broken_x[5], broken_y[7], broken_y[8] = math.nan, math.inf, math.nan, math.inf
    zeroed_x, zeroed_y = x.copy(), y.copy()
    zeroed_x[[3, 5, 7, 8]], zeroed_y[[3, 5, 7, 8]] = 0, 0
    oracles: list[Oracle] = [*GAUSSIAN, Exponential(np.eye(3), 2), ISSP(1, 2, leverage=5)]
    for oracle in oracles:
        np.testing.assert_array_equal(
            exact(oracle, broken_x, broken_y), exact(oracle, zeroed_x, zeroed_y)
        )


def test_losses_of_candidates_do_not_depend_on_the_place_of_a_row() -> None:
    random = torch.Generator().manual_seed(0)
    features = torch.randn(17, 257, generator=random, dtype=torch.float64)
    candidates = torch.randn(5, 257, generator=random, dtype=torch.float64)
    oracle, none = Exponential(candidates, 20.0), torch.zeros(17, dtype=torch.float64)
    there = oracle.losses(features, none)
    assert torch.equal(oracle.losses(features.roll(3, 0), none), there.roll(3, 0))
    torch.testing.assert_close(there, (features @ candidates.mT).clamp(-20.0, 20.0).square())
    assert oracle.losses(features[:0], none[:0]).shape == (0, 5)


def law(losses: Array, c: float) -> Array:
    """P(w) ∝ exp(−c L(w)), by enumeration."""
    weights = np.exp(-c * (losses - losses.min()))
    return np.asarray(weights / weights.sum())


def log_ratio(p: Array, q: Array) -> float:
    return float(np.abs(np.log(p / q)).max())


@pytest.mark.slow
def test_frequencies_match_the_law() -> None:
    x, y, _ = problem(users=12)
    candidates = 1.5 * np.random.default_rng(2).normal(size=(8, 3))
    bound, epsilon, draws = 0.8, 2.0, 10_000  # targets and predictions go beyond ±0.8
    oracle = Exponential(candidates, bound)
    units = total_units(oracle.losses(torch.from_numpy(x), torch.from_numpy(y)), 4 * bound**2)
    errors = np.clip(x @ candidates.T, -bound, bound) - np.clip(y, -bound, bound)[:, None]
    total = (errors**2).sum(0)
    for adjacency, c in (
        ("replace-one", epsilon / (8 * bound**2)),
        ("zero-out", epsilon / (4 * bound**2)),
    ):
        chosen = [choose(units, epsilon, adjacency, KEY, i) for i in range(draws)]  # type: ignore[arg-type]
        counts = np.bincount(chosen, minlength=8)
        assert stats.chisquare(counts, draws * law(total, c)).pvalue > 1e-3
        # The control: a tenth more or less in the exponent is seen.
        for wrong in (0.9 * c, 1.1 * c):
            assert stats.chisquare(counts, draws * law(total, wrong)).pvalue < 1e-3


def test_improbable_candidates_can_be_drawn() -> None:
    """Gumbel draws reach past what 53 bits allow, and follow their law in both tails."""
    from papers.regression.exponential import _gumbel

    draws = _gumbel(KEY, count=200_000)
    assert stats.kstest(draws, "gumbel_r").pvalue > 1e-3
    assert stats.kstest(draws + 0.01, "gumbel_r").pvalue < 1e-3
    stream = "papers.regression.exponential.uint64_stream"
    for leading in (0, 1, 3):  # words that happen to be all zeros, or all ones
        last = 64 * leading + 1  # u, or 1 - u, is 2 to the power of minus this
        u = 2.0**-last
        for word, expected in (
            (0, -math.log(-math.log1p(-u))),
            (2**64 - 1, -math.log(last * math.log(2))),
        ):
            words = np.full(4, 2**63, dtype=np.uint64)
            words[4 - leading :] = word
            with mock.patch(stream, lambda *_, words=words, **__: words):
                assert _gumbel(KEY, count=1)[0] == pytest.approx(expected)


sample = st.tuples(st.floats(-1, 1), st.floats(-1, 1), st.floats(-4, 4))


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(sample, min_size=1, max_size=4), sample, st.floats(0.1, 5))
def test_neighbours_keep_the_pure_epsilon(rows: list[Any], new: Any, epsilon: float) -> None:
    candidates = [(a, b) for a in (-3.0, 0.0, 3.0) for b in (-3.0, 0.0, 3.0)]
    oracle = Exponential(torch.tensor(candidates), 1.5)

    def losses(data: list[Any]) -> Array:
        t = torch.tensor(data, dtype=torch.float64).reshape(-1, 3)
        return total_units(oracle.losses(t[:, :2], t[:, 2]), oracle.largest_loss).numpy()

    here = losses(rows)
    for adjacency, neighbour in (
        ("replace-one", [new, *rows[1:]]),
        ("zero-out", [(0, 0, 0), *rows[1:]]),
        ("add-remove", rows[1:]),
    ):
        there = losses(neighbour)
        c = (epsilon / 2 if adjacency == "replace-one" else epsilon) / UNITS
        assert log_ratio(law(here, c), law(there, c)) <= epsilon * (1 + 1e-12)


def test_the_zero_out_exponent_does_not_serve_replacement() -> None:
    oracle = Exponential(torch.tensor([*[[-1.0]] * 1_000_000, [1.0]]), 1.0)
    ones = torch.ones(1, 1, dtype=torch.float64)
    units = [
        total_units(oracle.losses(ones, a * ones[:, 0]), 4.0).numpy() / UNITS for a in (1.0, -1.0)
    ]
    assert log_ratio(law(units[0], 1.0), law(units[1], 1.0)) == pytest.approx(2.0, rel=1e-4)


def test_sums_of_losses_are_exact_in_any_order() -> None:
    losses = torch.from_numpy(np.random.default_rng(0).uniform(0, 3, size=(999, 7)))
    whole = total_units(losses, 3.0)
    parts = [total_units(part, 3.0) for part in losses.flip(0).split(10)]
    assert torch.equal(whole, torch.stack(parts).sum(0))
    assert torch.equal(whole, whole.round())
    assert not torch.equal(losses.sum(0), losses.flip(0).sum(0))  # which plain sums are not
    extremes = torch.tensor([[math.nan, 1.0], [9.0, -1.0]])
    assert total_units(extremes, 3.0).tolist() == [UNITS, 0]


def small_setup(k: int = 3, room: float = 34.0) -> issp.Setup:
    """The least room that LARGEST_GROWTH leaves, so that filters bite on few users."""
    lowest = 1 / (room + 1.25 * (2 * k + 1) + k)
    constants = issp.proof_constants(lowest, k)
    return issp.Setup(k, lowest, constants[0], (0.0,) * (k + 1), 0.0)


def reference(x: Array, y: Array, setup: issp.Setup, bound: float, ridge: float) -> Any:
    """The filters as they are described, one level at a time: score and weights."""
    k, n, d = setup.k, len(y), x.shape[1]
    score, weights = k, np.zeros(n)
    for level in range(2 * k + 2):
        kept = list(range(n))
        while True:
            inverse = np.linalg.inv(x[kept].T @ x[kept] + ridge * np.eye(d))
            inside = [i for i in kept if x[i] @ inverse @ x[i] <= setup.leverage_bound(level)]
            if inside == kept:
                break
            kept = inside
        while kept:
            matrix = x[kept].T @ x[kept] + ridge * np.eye(d)
            residuals = np.abs(y[kept] - x[kept] @ np.linalg.solve(matrix, x[kept].T @ y[kept]))
            if residuals.max() <= bound * setup.growth**level:
                break
            kept.pop(int(residuals.argmax()))
        if n - len(kept) < k:
            score = min(score, max(n - len(kept), level))
            if k < level <= 2 * k:
                weights[kept] += 1 / k
    return score, weights


def outlying(rng: np.random.Generator, users: int = 150) -> tuple[Array, Array]:
    """Users of whom a few are near or past the first bounds on leverage and residual."""
    x = np.concatenate([rng.choice([-1.0, 1.0], (users, 1)), rng.normal(size=(users, 1))], axis=1)
    x[:, 1] = np.clip(x[:, 1], -1, 1)
    y = x @ np.array([0.5, -0.3]) + rng.uniform(-0.8, 0.8, users)
    for i in range(rng.integers(0, 4)):
        if rng.random() < 0.5:
            y[i] += rng.choice([-1, 1]) * rng.uniform(0.5, 3)
        else:
            x[i] *= rng.uniform(1.2, 3)
    return x, y


def found(x: Array, y: Array, setup: issp.Setup) -> issp.FilteredWeights:
    return issp.find_weights(torch.from_numpy(x), torch.from_numpy(y), setup, 1.0, 1e-6)


def test_the_filters_are_those_described() -> None:
    rng = np.random.default_rng(0)
    setup, scores = small_setup(), set()
    for _ in range(40):
        x, y = outlying(rng)
        score, weights = reference(x, y, setup, 1.0, 1e-6)
        here = found(x, y, setup)
        scores.add(score)
        assert here.score == score
        if score < setup.k:
            np.testing.assert_allclose(here.weights, weights, atol=1e-12)
    assert scores == {0, 1, 2, 3}


def test_one_user_moves_score_weights_and_solution_as_proved() -> None:
    rng = np.random.default_rng(1)
    k = 3
    setup = small_setup(k)
    constants = issp.proof_constants(setup.lowest_leverage, k)
    assert constants is not None
    _, leverage, shift = constants
    moved = {"score": 0, "weights": 0.0, "solution": 0.0, "trace": 0.0}
    for trial in range(120):
        x, y = outlying(rng)
        user = 0 if trial % 2 else int(rng.integers(len(y)))
        x2, y2 = x.copy(), y.copy()
        x2[user], y2[user] = 0, 0
        one, other = found(x, y, setup), found(x2, y2, setup)
        removed = found(np.delete(x, user, 0), np.delete(y, user), setup)
        assert removed.score == other.score  # an emptied slot is an absent user
        moved["score"] = max(moved["score"], abs(one.score - other.score))
        if max(one.score, other.score) >= k:
            continue
        others = torch.arange(len(y)) != user
        np.testing.assert_allclose(removed.weights, other.weights[others], atol=1e-12)
        gap = float((one.weights - other.weights)[others].abs().sum() + one.weights[user])
        systems = [
            issp.System.of(torch.from_numpy(a), torch.from_numpy(b), c.weights, 1e-6)
            for a, b, c in ((x, y, one), (x2, y2, other))
        ]
        step = systems[0].solution - systems[1].solution
        size = float((systems[0].cholesky.mT @ step).norm())
        left = torch.linalg.solve_triangular(systems[0].cholesky, systems[1].cholesky, upper=False)
        eigenvalues = torch.linalg.eigvalsh(left @ left.mT)
        for name, value in (
            ("weights", gap),
            ("solution", size / shift),
            ("trace", float((eigenvalues - 1).abs().sum()) / (2 * leverage)),
        ):
            moved[name] = max(moved[name], value)
    assert moved["score"] == 1
    assert 1 <= moved["weights"] < 2
    assert 0.1 < moved["solution"] <= 1
    assert 0.1 < moved["trace"] <= 1


@pytest.mark.parametrize("k", [1, 3, 20])
def test_levels_rise_as_the_proof_asks(k: int) -> None:
    setup = small_setup(k, room=12.0 * k**2)
    constants = issp.proof_constants(setup.lowest_leverage, k)
    assert constants is not None
    growth, leverage, shift = constants
    bounds = [setup.leverage_bound(level) for level in range(2 * k + 2)]
    assert len(bounds) == setup.levels
    assert bounds[0] == pytest.approx(setup.lowest_leverage)
    for low, high in itertools.pairwise(bounds):
        assert high > low / (1 - low)  # leverage after the removal of one user
    assert leverage == pytest.approx(bounds[-1] / (1 - k * bounds[-1]))  # of k more
    assert growth > 1 / (1 - k * leverage)
    residual = growth ** (2 * k + 1) * (1 + k * leverage)
    assert shift == pytest.approx(2 * residual * math.sqrt(leverage * (1 + 2 * leverage)))


@pytest.mark.parametrize("delta", [1e-14, 1e-6])
@pytest.mark.parametrize("epsilon", [0.05, 0.5, 4.0, 40.0])
def test_fail_probabilities_are_indistinguishable(epsilon: float, delta: float) -> None:
    fail = issp.fail_probabilities(epsilon, delta, 1e4)
    assert fail[0] == 0
    assert fail[-1] == 1
    exact = [Fraction(q) for q in fail]
    assert all((q * 2**52).denominator == 1 for q in exact)  # so P(draw ≤ q) is exactly q
    growth, slack = Fraction(math.exp(epsilon)) * (1 - Fraction(1, 2**51)), Fraction(delta)

    def holds(pairs: Iterable[tuple[Fraction, Fraction]], slack: Fraction) -> bool:
        return all(
            a <= growth * b + slack
            for q, r in pairs
            for a, b in ((q, r), (r, q), (1 - q, 1 - r), (1 - r, 1 - q))
        )

    assert holds(itertools.pairwise(exact), slack)
    assert not holds(itertools.pairwise(exact), slack / 4)
    # Skipping a score, a rise twice as fast, is no longer indistinguishable.
    assert not holds(itertools.pairwise(exact[::2]), slack)
    assert issp.fail_probabilities(epsilon, delta, len(fail) - 2) is None


def test_the_release_of_issp_has_the_stated_noise() -> None:
    x, y, _ = problem(users=4000)
    x[:, 1] *= 0.1  # noise follows the features: larger where they are small
    oracle, (epsilon, delta) = ISSP(1, 2, 0.75, leverage=4), (6.0, 1e-6)
    given: Any = {"users": 4000, "epsilon": epsilon, "delta": delta, "adjacency": "zero-out"}
    data = torch.from_numpy(x), torch.from_numpy(y)
    none = torch.zeros(3, dtype=torch.float64)
    plain, failed = oracle.solve(*data, uniform=0.5, normals=none, **given)
    assert not failed
    np.testing.assert_allclose(plain, np.linalg.lstsq(x, y)[0], rtol=1e-3)
    setup = issp.make_setup(4 * 3 / 4000, epsilon, delta)
    rows = [
        oracle.solve(*data, uniform=0.5, normals=unit, **given)[0] - plain
        for unit in torch.eye(3, dtype=torch.float64)
    ]
    covariance = sum(torch.outer(r, r) for r in rows)
    gram = x.T @ x + 1e-6 * 4000 * np.eye(3)
    np.testing.assert_allclose(covariance, (setup.noise * 0.75) ** 2 * np.linalg.inv(gram))
    # One outlier takes the score to 1, whose failure has the probability that the setup says.
    data[1][0] = -2 * float((data[0][0] @ plain).sign())
    q = setup.fail_probability[1]
    assert 0 < q < 1
    assert oracle.solve(*data, uniform=q - 2.0**-53, normals=none, **given)[1]
    assert not oracle.solve(*data, uniform=q + 2.0**-53, normals=none, **given)[1]


def test_each_normal_draw_is_a_sum_of_four() -> None:
    # One inverse-CDF draw could be inverted from the sum by whoever guesses the value.
    u = uniforms(KEY, "regression", 1, 0, count=4 * 5).reshape(4, 5)
    expected = stats.norm.ppf(u).sum(0) / 2
    np.testing.assert_allclose(in_memory.normals(KEY, 5), expected, rtol=1e-12)
    draws = in_memory.normals(KEY, 100_000).numpy()
    assert is_standard_normal(draws)
    assert not is_standard_normal(1.02 * draws)
    assert len(np.unique(draws)) == len(draws)  # which float32 has not


def test_issp_spends_its_budget_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spent: dict[str, list[tuple[float, float]]] = {"test": [], "release": []}
    fail, noise = issp.fail_probabilities, issp.release_noise

    def fails(epsilon: float, delta: float, most: float) -> Any:
        spent["test"].append((epsilon, delta))
        return fail(epsilon, delta, most)

    def noises(leverage: float, epsilon: float, delta: float) -> Any:
        spent["release"].append((epsilon, delta))
        test = spent["test"][-1]
        assert test[0] + epsilon == pytest.approx(3.0)
        assert test[1] + delta == pytest.approx(1e-6)
        return noise(leverage, epsilon, delta)

    monkeypatch.setattr(issp, "fail_probabilities", fails)
    monkeypatch.setattr(issp, "release_noise", noises)
    setup = issp.make_setup.__wrapped__(1e-4, 3.0, 1e-6)
    assert spent["release"]
    # The noise is the bound on the move, at the multiplier of the release.
    constants = issp.proof_constants(1e-4, setup.k)
    assert setup.growth == constants[0]
    options = [noise(constants[1], e, d) for e, d in spent["release"]]
    assert any(o is not None and setup.noise == constants[2] * o for o in options)
    epsilon, delta = issp._one_step(3.0, 1e-6, "replace-one")
    assert 2 * epsilon == pytest.approx(3.0)
    assert delta * (1 + math.exp(epsilon)) == pytest.approx(1e-6)
    assert issp._one_step(3.0, 1e-6, "zero-out") == (3.0, 1e-6)


@pytest.mark.parametrize("move", [1.0, -1.0])
def test_the_release_keeps_its_delta(move: float) -> None:
    """One dimension, integrated: N(0, c²) against N(1, c²/λ), with λ as far as the trace allows."""
    leverage, epsilon, delta = 0.0005, 1.0, 1e-4
    noise = issp.release_noise(leverage, epsilon, delta)
    assert noise is not None
    lam = 1 + move * 2 * leverage

    def worst(noise: float) -> float:
        p, q = stats.norm(0, noise), stats.norm(1, noise / math.sqrt(lam))
        return max(
            integrate.quad(
                lambda x, a=a, b=b: max(a.pdf(x) - math.exp(epsilon) * b.pdf(x), 0.0),
                -12 * noise, 12 * noise, limit=500, points=[-3 * noise, 0, 3 * noise],
            )[0]
            for a, b in ((p, q), (q, p))
        )  # fmt: skip

    assert worst(noise) <= delta
    assert worst(0.9 * noise) > delta


@pytest.mark.parametrize("trace", [0.002, 0.2])
def test_the_change_of_covariance_keeps_its_tail(trace: float) -> None:
    delta = 1e-7
    epsilon = issp.covariance_epsilon(trace, math.log(delta))
    for lam in (1 + trace, 1 - trace):
        # L = −½ ln λ + ½ (λ − 1) g², g normal.
        edge = (epsilon + 0.5 * math.log(lam)) / (0.5 * (lam - 1))
        tail = stats.chi2.sf(edge, 1) if lam > 1 else stats.chi2.cdf(max(edge, 0), 1)
        assert tail <= delta
    small = issp.covariance_epsilon(trace, math.log(delta)) / 2
    edge = (small + 0.5 * math.log1p(trace)) / (0.5 * trace)
    assert stats.chi2.sf(edge, 1) > delta


def test_a_failed_test_releases_nothing_of_the_data() -> None:
    x, y, _ = problem(users=4000)
    y[:2000] = 2
    y[2000:] = -2
    out = fit(ISSP(1, 2, 0.01), x, y, epsilon=8, delta=1e-6, adjacency="zero-out")
    assert out.failed
    assert torch.equal(out.w, torch.zeros(3, dtype=torch.float64))
    assert out.guarantee.epsilon == 8


def test_no_data_breaks_issp() -> None:
    """An error would tell about the data: rank one, huge, tiny and empty all give an answer."""
    oracle = ISSP(1, 2)
    x, y, _ = problem(users=6000)
    huge, one = x.copy(), np.zeros_like(x)
    huge[:100] = 1e300
    one[:, 0] = 1
    for features in (x * 0, x * 1e-200, huge, one, x[:0]):
        out = fit(
            oracle, features, y[: len(features)],
            epsilon=8, delta=1e-6, adjacency="add-remove", users=6000, key=KEY,
        )  # fmt: skip
        assert bool(out.w.isfinite().all())


X, Y = np.eye(2), np.ones(2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ProjectedSGD(math.nan, 1, 3, radius=1), "feature_bound must be a positive"),
        (lambda: Exponential(torch.empty(0, 2), 1), "finite set"),
        (lambda: Exponential([[1.0], [math.inf]], 1), "not finite"),  # type: ignore[arg-type]
        (lambda: fit(Exponential(torch.eye(2), 1), X, Y, epsilon=1, delta=0.1), "leave delta at 0"),
        (lambda: fit(GAUSSIAN[0], X, Y, epsilon=1), "only exponential is pure"),
        (lambda: fit(GAUSSIAN[0], X[:0], Y[:0], epsilon=1, delta=1e-5), "users must be above 0"),
        # A word for replace-one that is not the right one would get the budget of add-remove.
        (
            lambda: fit(ISSP(1, 1), X, Y, epsilon=1, delta=1e-5, adjacency="replace_one"),
            "adjacency 'replace_one' is unknown",
        ),
        (lambda: exponent(1.0, "replace_one"), "is unknown"),  # type: ignore[arg-type]
        (lambda: issp._one_step(1.0, 1e-5, "Replace-one"), "is unknown"),  # type: ignore[arg-type]
        (
            lambda: fit(GAUSSIAN[0], X, Y, epsilon=1, delta=1e-5, adjacency="add-remove"),
            "the number of rows is private",
        ),
        (
            lambda: fit(GAUSSIAN[0], np.ones((1, 2001)), [1.0], epsilon=1, delta=1e-5),
            "2001 dimensions are more than 2000",
        ),
        (
            lambda: fit(ISSP(1, 1), np.ones((9000, 9)), np.ones(9000), epsilon=4, delta=1e-6),
            "9 dimensions need more than 9,000 users at epsilon 4",
        ),
        (
            lambda: fit(ISSP(1, 1), np.ones((9000, 1)), np.ones(9000), epsilon=4, delta=1e-15),
            "delta 1e-15 is too small",
        ),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises(DprlhfError, match=message):
        call()
