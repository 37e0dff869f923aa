"""The predicted reward: how far a plan moves the policy, and the formula on top."""

from dataclasses import replace

import numpy as np
import pytest

from dprlhf.privacy.plan import make_plan
from dprlhf.recipe import Optimizer
from dprlhf.training.choices import Signal, cosines
from dprlhf.training.prediction import Travel, reward_model, travel

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
