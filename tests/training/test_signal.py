"""The signal in users' contributions: unbiased, clipped as in a round, in a subspace or not."""

import pytest
import torch

from dprlhf.training.signal import mean_product, signal_of


def drawn(users=400, dimension=20, signal=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(users, dimension, generator=generator, dtype=torch.float64)
    vectors[:, 0] += signal
    return vectors


def test_the_mean_product_leaves_out_each_users_own() -> None:
    a, b = drawn(7, 3), drawn(7, 3, seed=1)
    pairs = [float(a[i] @ b[j]) for i in range(7) for j in range(7) if i != j]
    assert mean_product(a, b) == pytest.approx(sum(pairs) / len(pairs))
    assert mean_product(a[:1], b[:1]) == 0.0


def test_the_square_of_the_mean_without_bias() -> None:
    """Over many draws of few users, where the plain norm of the mean is far too large."""
    found = [mean_product(v := drawn(8, 4, seed=seed), v) for seed in range(3000)]
    assert sum(found) / len(found) == pytest.approx(0.3**2, abs=0.03)
    plain = [float(drawn(8, 4, seed=seed).mean(0).square().sum()) for seed in range(3000)]
    assert sum(plain) / len(plain) > 0.4


def test_a_subspace_with_the_signal_keeps_it_and_another_has_none() -> None:
    vectors = drawn(4000)
    basis = torch.eye(20, dtype=torch.float64)
    within = signal_of(vectors, 1e9, basis[:2], scale=2.0)
    assert within.dimension == 2
    assert within.norm == pytest.approx(2 * 0.3e-9, rel=0.15)
    assert within.alignment > 0.9
    beside = signal_of(vectors, 1e9, basis[5:7])
    assert beside.norm < 0.3 * within.norm


def test_a_gradient_that_is_not_finite_counts_as_zero() -> None:
    vectors = drawn(50)
    vectors[3] = float("nan")
    without = vectors.clone()
    without[3] = 0.0
    assert signal_of(vectors, 1.0) == signal_of(without, 1.0)


def test_users_who_agree_by_chance_alone_have_no_known_signal() -> None:
    """Half of the estimates of s² are above zero where there is nothing to see."""
    null = [signal_of(drawn(64, signal=0.0, seed=seed), 1e-3) for seed in range(1000)]
    assert sum(one.norm > 0 for one in null) > 300
    assert sum(one.known for one in null) < 60
    assert sum(one.known for one in [signal_of(drawn(seed=s), 1e-3) for s in range(20)]) == 20
    square = torch.tensor([mean_product(v := drawn(64, signal=0.0, seed=s), v) for s in range(500)])
    errors = [signal_of(drawn(64, signal=0.0, seed=s), 1e9).error * 1e18 for s in range(500)]
    assert sum(errors) / len(errors) == pytest.approx(float(square.std()), rel=0.15)
