"""The predicted reward: how far a plan moves the policy, and the formula on top."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dprlhf.privacy.plan import make_plan
from dprlhf.recipe import Optimizer
from dprlhf.training.choices import Signal, averaged_norms, cosines
from dprlhf.training.prediction import RewardModel, Travel, reward_model, travel

SIGNAL = Signal(norm=0.1, spread=0.5, dimension=64, gradient=0.4)
PLAN = make_plan(users=800, rounds=8, delta=1e-5, noise_multiplier=1.0)


def test_steps_of_fixed_length_split_along_and_across() -> None:
    moved = travel(PLAN, SIGNAL, Optimizer(name="normalized-sgd", learning_rate=0.5), 1.0)
    cos = cosines(PLAN, SIGNAL)
    assert moved.along == pytest.approx(0.5 * np.cumsum(cos))
    assert moved.across == pytest.approx(0.25 * np.cumsum(1 - cos**2))


def test_sgd_steps_are_as_long_as_the_momentum_buffer() -> None:
    spec = Optimizer(name="sgd", learning_rate=0.5, momentum=0.6)
    moved = travel(PLAN, SIGNAL, spec, clip_norm=2.0)
    first = 0.5 * 2.0 * averaged_norms(PLAN, SIGNAL, 0.6)[0] * cosines(PLAN, SIGNAL, 0.6)[0]
    assert moved.along[0] == pytest.approx(first)
    late = np.diff(moved.along)[-1]
    assert late == pytest.approx(first / (1 - 0.6), rel=0.03)  # b grows to x/(1 − μ)


def test_adams_steps_shrink_as_it_averages_noise() -> None:
    spec = Optimizer(name="adam", learning_rate=0.5, betas=(0.9, 0.9))
    moved = travel(PLAN, SIGNAL, spec, 1.0)
    lengths = np.sqrt(np.diff(moved.along) ** 2 + np.diff(moved.across))
    assert lengths[0] < 0.5 * 8
    assert (np.diff(lengths) < 0).all()


def test_a_step_moves_all_parameters_that_a_subspace_lies_in() -> None:
    """Adam divides by the size of each trained parameter, and a lift by the subspace's scale."""
    inside = replace(SIGNAL, dimension=4, trained=64, scale=20.0)
    plain = replace(SIGNAL, dimension=4)
    adam = Optimizer(name="adam", learning_rate=0.5, betas=(0.9, 0.9))
    steps = travel(PLAN, inside, adam, 1.0).along / travel(PLAN, plain, adam, 1.0).along
    assert steps == pytest.approx(4 * np.ones(8))  # √64 over √4
    sgd = Optimizer(name="sgd", learning_rate=0.5, momentum=0.6)
    steps = travel(PLAN, inside, sgd, 1.0).along / travel(PLAN, plain, sgd, 1.0).along
    assert steps == pytest.approx(np.ones(8) / 20)


def test_the_schedule_counts() -> None:
    spec = Optimizer(name="normalized-sgd", learning_rate=0.5, schedule="linear")
    steps = np.diff(np.append(0, travel(PLAN, SIGNAL, spec, 1.0).along))
    assert steps / steps[0] == pytest.approx(np.arange(8, 0, -1) / 8)


def test_the_first_step_gains_what_the_gradient_says() -> None:
    model = reward_model(SIGNAL, start=0.5, reward_range=3.0)
    assert model is not None
    step = np.array([1e-4])
    assert model.rise(Travel(np.ones(1), step, 0 * step)) == pytest.approx(0.4e-4, rel=1e-3)
    far = model.rise(Travel(np.ones(1), np.array([1e9]), np.zeros(1)))
    assert far == pytest.approx(2.5)


def test_without_a_gradient_there_is_no_prediction() -> None:
    assert reward_model(Signal(0.1, 0.5, 4), 0.0, 3.0) is None
    assert reward_model(Signal(0.1, 0.5, 4, gradient=0.0), 0.0, 3.0) is None


def test_distance_across_costs_reward() -> None:
    model = RewardModel(most=2.0, rate=0.5)
    along = np.array([1.0, 2.0])
    straight = model.rise(Travel(np.ones(2), along, np.zeros(2)))
    bent = model.rise(Travel(np.ones(2), along, np.ones(2)))
    assert straight - bent == pytest.approx(0.5 * 0.5**2 * np.ones(2))
