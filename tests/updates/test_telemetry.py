"""The released reward: bounded coordinates, and what can be read from them."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dprlhf.boundary import Released
from dprlhf.privacy.plan import Plan, make_plan
from dprlhf.rewards import Scores
from dprlhf.updates.round import users_with_valid_scores
from dprlhf.updates.telemetry import TelemetryCoordinates, ValidShare
from helpers.batches import Shape, batch_of
from helpers.rounds import some_users

R = 3.0
NO_NOISE = make_plan(users=1000, rounds=10, delta=1e-5, epsilon=math.inf, clip_norm=0.5)


def with_noise(z: float) -> Plan:
    mechanism = dataclasses.replace(NO_NOISE.mechanism, noise_multiplier=z)
    return dataclasses.replace(NO_NOISE, mechanism=mechanism)


def released(telemetry, values, valid, plan):
    """What the gate makes of users with one row each, without noise."""
    coordinates = telemetry.of_users(np.arange(len(values)), values, valid)
    return Released(torch.from_numpy(coordinates.sum(0)) / plan.expected_batch_size, 1)


def test_coordinates_by_hand() -> None:
    """Users with rows {3, 0}, {−3} and, invalid, {1}; S = 0.5, a share of 0.14."""
    telemetry = TelemetryCoordinates.from_plan(NO_NOISE, R)
    assert telemetry.norm == pytest.approx(0.07)
    assert telemetry.count == 2
    user = np.array([0, 1, 0, 2])
    coordinates = telemetry.of_users(user, np.array([3.0, -3, 0, 1]), np.array([True, True, False]))
    unit = 0.07 / math.sqrt(2)
    np.testing.assert_allclose(coordinates, [[unit / 2, unit], [-unit, unit], [0, 0]], rtol=1e-12)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    rewards=st.lists(st.floats(-R, R), max_size=12),
    users=st.integers(0, 4),
    seed=st.integers(0, 100),
)
def test_coordinates_are_bounded_by_the_norm(rewards: list[float], users: int, seed: int) -> None:
    telemetry = TelemetryCoordinates.from_plan(NO_NOISE, R)
    random = np.random.default_rng(seed)
    rewards = rewards if users else []
    user = random.integers(0, max(users, 1), len(rewards))
    coordinates = telemetry.of_users(user, np.array(rewards), random.random(users) < 0.7)
    assert coordinates.shape == (users, 2)
    norms = np.linalg.norm(coordinates, axis=1)
    assert (norms <= telemetry.norm * (1 + 1e-12)).all()
    assert telemetry.norm < NO_NOISE.clip_norm


def test_without_a_clip_norm_the_scale_is_one() -> None:
    plan = make_plan(users=100, rounds=10, delta=1e-5, epsilon=math.inf, clip_norm=math.inf)
    assert TelemetryCoordinates.from_plan(plan, R).norm == 0.14


def test_a_user_without_a_row_is_not_valid() -> None:
    responses = batch_of(Shape([[2], [3], [1]], k=2, length=3), 0)
    scores = Scores(np.ones(6), np.ones(6, dtype=bool), {})
    blank, left = some_users(responses, scores, [0, 2], in_place=True)
    assert users_with_valid_scores(responses, scores).all()
    assert users_with_valid_scores(blank, left).tolist() == [True, False, True]


def test_without_noise_mean_and_share_are_read_exactly() -> None:
    telemetry = TelemetryCoordinates.from_plan(NO_NOISE, R)
    random = np.random.default_rng(0)
    values, valid = random.uniform(-R, R, 80), random.random(80) < 0.75
    read = telemetry.read(released(telemetry, values, valid, NO_NOISE), 1)
    assert read.mean == pytest.approx(values[valid].mean(), rel=1e-12)
    assert read.valid_share == pytest.approx(valid.sum() / 100, rel=1e-12)  # 1000 users, 10 rounds
    assert read.noise_std == read.valid_std == 0
    assert read.known


def test_the_mean_is_hidden_only_where_nobody_was_valid() -> None:
    telemetry = TelemetryCoordinates.from_plan(NO_NOISE, R)
    values = np.full(100, 2.0)
    for valid_users, failed in ((0, True), (1, False), (100, False)):
        valid = np.arange(100) < valid_users
        read = telemetry.read(released(telemetry, values, valid, NO_NOISE), 1)
        assert (read.mean is None) is failed
        assert (read.noise_std is None) is failed


def test_the_stated_standard_deviations_are_those_of_the_release() -> None:
    """Noise of standard deviation zS/m on each coordinate, many times."""
    plan = with_noise(0.3)
    telemetry = TelemetryCoordinates.from_plan(plan, R)
    random = np.random.default_rng(1)
    values, valid = np.full(90, 2.4), np.ones(90, dtype=bool)
    exact = released(telemetry, values, valid, plan)
    noise = random.normal(0, plan.noise_std / plan.expected_batch_size, (20_000, 2))
    reads = [telemetry.read(exact.map(lambda x, n=n: x + torch.from_numpy(n)), 1) for n in noise]
    means = np.array([r.mean for r in reads])
    shares = np.array([r.valid_share for r in reads])
    at_the_truth = telemetry.read(exact, 1)
    assert at_the_truth.noise_std is not None
    assert at_the_truth.valid_std == pytest.approx(0.3 * 0.5 / 100 / (0.07 / math.sqrt(2)))
    assert shares.mean() == pytest.approx(0.9, abs=0.001)
    assert shares.std() == pytest.approx(at_the_truth.valid_std, rel=0.03)
    assert means.mean() == pytest.approx(2.4, abs=0.01)
    assert means.std() == pytest.approx(at_the_truth.noise_std, rel=0.03)


@pytest.mark.parametrize("z", [0.3, 3.0, 300.0])
def test_noise_alone_hardly_ever_passes_for_a_reward(z: float) -> None:
    plan = with_noise(z)
    telemetry = TelemetryCoordinates.from_plan(plan, R)
    random = np.random.default_rng(2)
    noise = random.normal(0, plan.noise_std / plan.expected_batch_size, (2000, 2))
    reads = [telemetry.read(Released(torch.from_numpy(n), 1), 1) for n in noise]
    assert np.mean([r.known for r in reads]) < 0.005  # P(normal > 3) = 0.00135
    assert all(r.mean is None for r in reads if not r.known)


def test_a_mean_stays_in_the_reward_range() -> None:
    telemetry = TelemetryCoordinates.from_plan(with_noise(0.3), R)
    unit = 0.07 / math.sqrt(2)
    read = telemetry.read(Released(torch.tensor([5.0, 0.9]) * unit, 1), 1)
    assert read.mean == R


@pytest.mark.parametrize("users", [0.5, 2.0, 20.0])
@pytest.mark.parametrize("noise", [0.0, 0.1, 3.0])
def test_neither_empty_rounds_nor_noise_pass_for_failing_rewards(users, noise):
    """Of 400 runs with 100 rounds hardly one is stopped in error, and those that fail are."""
    random = np.random.default_rng(3)
    stopped = {}
    for valid in (1.0, 0.1, 0.0):
        counts = random.poisson(valid * users, (400, 100)) / users
        seen = counts + random.normal(0, noise, (400, 100))
        ever = np.zeros(400, dtype=bool)
        for i, run in enumerate(seen):
            share = ValidShare()
            for value in run:
                share.add(value, noise, users)
                ever[i] |= share.is_below(0.1)
        stopped[valid] = ever.mean()
    assert stopped[1.0] == 0
    assert stopped[0.1] < 0.02  # at the limit itself, over all looks
    assert stopped[0.0] == (0 if users * 100 <= 90 or noise > 0.3 else pytest.approx(1, abs=0.3))
