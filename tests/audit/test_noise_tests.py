"""The tests of the noise see what they are for, and seldom anything else."""

import numpy as np
import pytest
from numpy.typing import NDArray

from dprlhf.audit.judgement import SHARES, in_units, noise_tests, smallest_shortfall
from dprlhf.privacy.correlated_noise import square_root
from dprlhf.privacy.plan import make_plan

Array = NDArray[np.float64]
ROUNDS, COORDINATES = 8, 1000


def draws(seed: int, rounds: int = ROUNDS, coordinates: int = COORDINATES) -> Array:
    return np.random.default_rng(seed).standard_normal((rounds, coordinates))


def failed(table: Array, level: float = 0.03) -> set[str]:
    return {name for name, p in noise_tests(list(table)).items() if p < level * SHARES[name]}


def test_true_noise_is_refuted_no_more_often_than_promised() -> None:
    alarms = sum(bool(failed(draws(seed))) for seed in range(200))
    assert alarms <= 10  # at most 5%; about 2% are expected


def test_each_test_by_itself_keeps_its_level() -> None:
    values = [noise_tests(list(draws(seed, 6, 400))) for seed in range(300)]
    for name in SHARES:
        share = np.mean([v[name] < 0.05 for v in values])
        assert share < 0.05 + 4 * np.sqrt(0.05 * 0.95 / 300), name


def test_noise_three_percent_too_small_is_seen() -> None:
    seen = sum("variance" in failed(0.97 * draws(seed)) for seed in range(100))
    assert seen >= 90


def test_noise_that_is_too_large_refutes_nothing() -> None:
    assert not failed(1.1 * draws(0))


def _one_release_quiet(x: Array) -> Array:
    x[3] *= 0.8
    return x


def _one_coordinate_without(x: Array) -> Array:
    x[:, 17] = 0.0
    return x


def _last_piece_without(x: Array) -> Array:
    x[:, -60:] = 0.0
    return x


def _shared_between_two_releases(x: Array) -> Array:
    x[5] = (x[5] + 0.3 * x[2]) / np.sqrt(1.09)
    return x


def _negated(x: Array) -> Array:
    x[4] = -x[0]
    return x


def _neighbours_share(x: Array) -> Array:
    x[:, 1:] = (x[:, 1:] + 0.1 * x[:, :-1]) / np.sqrt(1.01)
    return x


def _block_repeated(x: Array) -> Array:
    x[6, 500:560] = x[1, 100:160]
    return x


FAULTS = {
    "release": _one_release_quiet,
    "coordinate": _one_coordinate_without,
    "spread": _last_piece_without,
    "between releases": _shared_between_two_releases,
    "between releases, opposite sign": _negated,
    "within releases": _neighbours_share,
    "repetitions": _block_repeated,
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_test_sees_its_fault(name: str) -> None:
    for seed in range(5):
        assert name.split(",")[0] in failed(FAULTS[name](draws(seed)))


def test_no_noise_at_all_is_seen_without_a_warning() -> None:
    assert failed(np.zeros((3, 50))) >= {"variance", "release", "coordinate"}


def test_releases_of_different_lengths_are_all_counted() -> None:
    """Telemetry in a round's first release has noise too."""
    both = [draws(0, 1, 500)[0], 0.5 * draws(1, 1, 900)[0]]
    assert noise_tests(both)["release"] < 1e-6


@pytest.mark.parametrize("bands", [1, 3])
def test_correlated_noise_is_undone_with_the_matrix_it_was_made_with(bands: int) -> None:
    plan = make_plan(
        users=60, rounds=6, delta=1e-5, epsilon=2.0, partition="fixed", bands=bands, clip_norm=0.5
    )
    true = draws(3, 6, 2000)
    matrix = np.zeros((6, 6))
    root = square_root(6, bands)
    for t in range(6):
        for k in range(min(root.shape[1], t + 1)):
            matrix[t, t - k] = root[t, k]
    made = plan.noise_std * np.linalg.solve(matrix, true)
    assert np.stack(in_units([[row] for row in made], plan)) == pytest.approx(true)
    if bands > 1:  # the control: as it is, it looks correlated
        assert "within releases" in failed(made / plan.noise_std)


def test_the_stated_power_is_what_happens() -> None:
    shortfall = smallest_shortfall(ROUNDS * COORDINATES, 0.03 * SHARES["variance"], 0.9)
    assert shortfall == pytest.approx(0.029, abs=0.002)
    seen = sum("variance" in failed((1 - shortfall) * draws(seed)) for seed in range(200))
    assert 0.8 < seen / 200 < 0.97
