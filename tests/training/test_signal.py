"""The signal in users' contributions: unbiased, clipped as in a round, in a subspace or not."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dprlhf.privacy.plan import make_plan
from dprlhf.recipe import Optimizer
from dprlhf.training.choices import Signal, cosines
from dprlhf.training.planner import Travel, mean_product, reward_model, signal_of, travel


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


SIGNAL = Signal(norm=0.1, spread=0.5, dimension=64, gradient=0.4)
PLAN = make_plan(users=800, rounds=8, delta=1e-5, noise_multiplier=1.0)


def test_steps_of_fixed_length_split_along_and_across() -> None:
    moved = travel(PLAN, SIGNAL, Optimizer(name="normalized-sgd", learning_rate=0.5), 1.0)
    cos = cosines(PLAN, SIGNAL)
    assert moved.along == pytest.approx(0.5 * np.cumsum(cos))
    assert moved.across == pytest.approx(0.25 * np.cumsum(1 - cos**2))


def test_a_step_moves_all_parameters_that_a_subspace_lies_in() -> None:
    """Adam divides by the size of each trained parameter, and a lift by the subspace's scale."""
    inside = replace(SIGNAL, dimension=4, trained=64, scale=20.0)
    plain = replace(SIGNAL, dimension=4)
    adam = Optimizer(name="adam", learning_rate=0.5)
    steps = travel(PLAN, inside, adam, 1.0).along / travel(PLAN, plain, adam, 1.0).along
    assert steps == pytest.approx(4 * np.ones(8))  # √64 over √4
    sgd = Optimizer(name="sgd", learning_rate=0.5, momentum=0.6)
    steps = travel(PLAN, inside, sgd, 1.0).along / travel(PLAN, plain, sgd, 1.0).along
    assert steps == pytest.approx(np.ones(8) / 20)


def test_the_first_step_gains_what_the_gradient_says() -> None:
    model = reward_model(SIGNAL, start=0.5, reward_range=3.0)
    step = np.array([1e-4])
    assert model.rise(Travel(np.ones(1), step, 0 * step)) == pytest.approx(0.4e-4, rel=1e-3)
    far = model.rise(Travel(np.ones(1), np.array([1e9]), np.zeros(1)))
    assert far == pytest.approx(2.5)
