"""Correlated noise: the factorization, what the gate draws, and what it costs and brings."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import ndtri

from dprlhf.boundary import BoundedSum
from dprlhf.errors import DprlhfError
from dprlhf.privacy.correlated_noise import UNITS, noise_gain, square_root
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import Ledger
from dprlhf.privacy.plan import Plan, make_plan
from dprlhf.privacy.randomness import uint64_stream
from dprlhf.privacy.rounded_gaussian import grid_of, rounded_gaussian
from helpers.rounds import value_of

KEY = bytes(range(32))
ROUNDS = 8


def dense(rounds: int, bands: int) -> np.ndarray:
    """C as a matrix."""
    matrix = np.zeros((rounds, rounds))
    for t, row in enumerate(square_root(rounds, bands)):
        for k, value in enumerate(row[: t + 1]):
            matrix[t, t - k] = value
    return matrix


def plan(**changes: Any) -> Plan:
    values = {
        "users": 64, "rounds": ROUNDS, "delta": 1e-5, "noise_multiplier": 1.5, "clip_norm": 0.5,
        "partition": "fixed", "bands": 3,
    }  # fmt: skip
    return make_plan(**(values | changes))  # type: ignore[arg-type]


def zeros(p: Plan, dimension: int) -> BoundedSum:
    return BoundedSum(torch.zeros(dimension, dtype=torch.float64), p.clip_norm)


def released_noise(p: Plan, folder: Path, dimension: int = 4000) -> np.ndarray:
    """What a run releases where every sum is zero, in units of the sum, ``[rounds, dimension]``."""
    gate = Gate(p, Ledger(folder / "ledger.jsonl", p.terms()), KEY)
    rows = [
        value_of(gate.release(t, zeros(p, dimension))) * p.expected_batch_size
        for t in range(1, p.rounds + 1)
    ]
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("bands", [1, 2, 5, 8, 20])
def test_every_column_has_norm_one(bands: int) -> None:
    """A user is in one round, so its part of Cx has the norm of its own sum: sensitivity S."""
    np.testing.assert_allclose(np.linalg.norm(dense(ROUNDS, bands), axis=0), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("rounds", "bands"), [(2, 2), (2, 7), (64, 3), (64, 64), (64, 2000), (3000, 64)]
)
def test_no_column_has_a_norm_above_one_in_exact_arithmetic(rounds: int, bands: int) -> None:
    units = square_root(rounds, bands) * UNITS
    assert (units == np.rint(units)).all()
    squares = [0] * rounds
    for k in range(units.shape[1]):
        for t in range(k, rounds):
            squares[t - k] += int(units[t, k]) ** 2
    assert max(squares) <= UNITS**2
    assert min(squares) > 0.9999 * UNITS**2


def test_one_band_is_the_identity_and_all_bands_the_square_root_of_prefix_sums() -> None:
    np.testing.assert_array_equal(dense(ROUNDS, 1), np.eye(ROUNDS))
    whole = dense(ROUNDS, ROUNDS)
    unscaled = whole / np.diag(whole)  # the diagonal of the Toeplitz root is 1
    np.testing.assert_allclose(unscaled @ unscaled, np.tril(np.ones((ROUNDS, ROUNDS))), atol=1e-4)


@pytest.mark.parametrize("bands", [1, 3, 8])
def test_gain_is_the_norm_of_a_row_of_the_inverse(bands: int) -> None:
    inverse = np.linalg.inv(dense(ROUNDS, bands))
    gains = [noise_gain(ROUNDS, bands, t) for t in range(1, ROUNDS + 1)]
    np.testing.assert_allclose(gains, np.linalg.norm(inverse, axis=1), rtol=1e-12)


@pytest.mark.parametrize("bands", [2, 3, 8])
def test_what_is_released_is_a_gaussian_mechanism_on_the_factored_sums(bands, tmp_path):
    """C times the released noise must be independent noise of exactly zS in every round."""
    p = plan(bands=bands)
    noise = released_noise(p, tmp_path)
    whitened = dense(ROUNDS, bands) @ noise / p.noise_std
    assert stats.kstest(whitened.ravel(), "norm").pvalue > 1e-3
    correlation = np.corrcoef(whitened) - np.eye(ROUNDS)
    assert np.abs(correlation).max() < 5 / np.sqrt(noise.shape[1])
    assert np.abs(np.corrcoef(noise) - np.eye(ROUNDS)).max() > 0.2  # the harness sees correlation


def test_the_stated_noise_of_each_round_is_that_of_its_release(tmp_path: Path) -> None:
    p = plan()
    measured = released_noise(p, tmp_path, 20_000).std(axis=1)
    stated = [p.noise_std_of(t) for t in range(1, ROUNDS + 1)]
    np.testing.assert_allclose(measured, stated, rtol=0.03)


@pytest.fixture
def ledgers(tmp_path: Path) -> Iterator[Any]:
    """Open the same ledger again and again."""
    made: list[Ledger] = []

    def reopen(p: Plan) -> Ledger:
        if made:
            made.pop().close()
        made.append(Ledger(tmp_path / "ledger.jsonl", p.terms()))
        return made[0]

    yield reopen
    made[0].close()


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("bands", [2, 3, 8, 20])
def test_a_gate_keeps_the_rounds_that_it_reads_and_releases_the_same_bits(bands, resumed, ledgers):
    p, count = plan(bands=bands), 50
    root = (square_root(ROUNDS, bands) * UNITS).astype(int)
    grid = grid_of(p.noise_multiplier, p.clip_norm, count)
    gate = Gate(p, ledgers(p), KEY)
    every: list[list[int]] = []  # the recursion with nothing forgotten
    for t in range(ROUNDS):
        if t == 3:  # never charged
            every.append([0] * count)
            continue
        if resumed:
            gate = Gate(p, ledgers(p), KEY)
        released = value_of(gate.release(t + 1, zeros(p, count)))
        charge = gate.ledger.entries[-1]
        back = range(1, min(root.shape[1], t + 1))
        taken = [sum(int(root[t, k]) * every[t - k][i] for k in back) for i in range(count)]
        own = int(root[t, 0])
        drawn = rounded_gaussian(
            *(KEY, "noise", t + 1, 1, charge.hash), std=grid.std * UNITS / own, count=count,
            offset=(np.array([x % own for x in taken]), own),
        )  # fmt: skip
        every.append([int(x) - y // own for x, y in zip(drawn.tolist(), taken, strict=True)])
        expected = torch.tensor(every[t], dtype=torch.float64) * grid.spacing
        assert torch.equal(released, expected / p.expected_batch_size)
        assert len(gate._noises) == min(bands - 1, t + 1)


def test_a_release_is_the_gaussian_mechanism_on_the_factored_sums_rounded(tmp_path: Path) -> None:
    """Row t is round((Y_t − Σ_k C[t, k] r_k) / C[t, t]) with the real Y = C round(s) + σξ."""
    p, n = plan(bands=3), 40
    grid = grid_of(p.noise_multiplier, p.clip_norm, n)
    root = (square_root(ROUNDS, 3) * UNITS).astype(int)
    sums = np.random.default_rng(1).uniform(-1, 1, (ROUNDS, n))
    gate = Gate(p, Ledger(tmp_path / "ledger.jsonl", p.terms()), KEY)
    rows: list[list[int]] = []
    for t in range(ROUNDS):
        total = torch.from_numpy(sums[t].copy())
        value = value_of(gate.release(t + 1, BoundedSum(total, p.clip_norm)))
        integers = value * p.expected_batch_size / grid.spacing
        rows.append([round(x) for x in integers.tolist()])
        assert np.abs(integers.numpy() - rows[-1]).max() < 1e-4
    exact = [[round(x / grid.spacing) for x in row] for row in sums.tolist()]
    noises = []
    for t in range(ROUNDS):
        words = uint64_stream(
            *(KEY, "noise", t + 1, 1, gate.ledger.entries[t + 1].hash, 0), count=n
        ).tolist()
        for i, word in enumerate(words):
            v = (word % 2**63 + 0.5) / 2**64
            noise = float(grid.std) * (-1 if word >> 63 else 1) * -ndtri(v) * UNITS
            back = range(min(3, t + 1))
            y = sum(int(root[t, k]) * exact[t - k][i] for k in back) + noise
            known = sum(int(root[t, k]) * rows[t - k][i] for k in back if k)
            assert rows[t][i] == pytest.approx((y - known) / root[t, 0], abs=0.51)
            noises.append(noise)
    gate.ledger.close()
    assert stats.kstest(np.array(noises) / float(grid.std * UNITS), "norm").pvalue > 1e-3


def test_it_costs_what_independent_noise_on_disjoint_batches_costs() -> None:
    assert plan().guarantee.epsilon == plan(bands=1).guarantee.epsilon
    assert plan().terms()["bands"] == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"partition": "poisson"},
        {"releases_per_round": 2},
        {"partition": "random-allocation", "releases_per_round": 2},
        {"partition": "random-allocation", "participations": 2},
        {"partition": "random-allocation", "adjacency": "replace-one"},
        {"partition": "random-allocation", "users": 999, "rounds": 129},
        {"partition": "random-allocation", "delta": 9e-13},
    ],
)
def test_it_is_refused_where_it_is_not_accounted(changes: dict[str, Any]) -> None:
    with pytest.raises(DprlhfError, match=r"^privacy\.bands: .*bands 1"):
        plan(**changes)
