"""Control tasks' updates on neighbouring sets of users, and against sums written out by steps."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dprlhf.boundary import BoundedSum, Private, Released, open_private
from dprlhf.policies.protocol import ExplicitPolicy
from dprlhf.recipe import Oracle
from helpers.marks import slow
from papers.control.gym import Gymnasium
from papers.control.policies import LogLinearSoftmax, MLPSoftmax
from papers.control.trajectories import ControlPolicy, Trajectories, TrajectoryRows, simulate
from papers.control.updates import (
    PGPE,
    UPDATES,
    Advantage,
    ControlRound,
    TrajectoryNPG,
    TrajectoryPG,
    advantages,
)

TIGHT, WIDE = 0.05, 1000.0
"""Clip norms: one shortens most users, the other none."""

ADVANTAGE = Advantage(discount=0.9, reference=1.0)


def npg(oracle: str = "sufficient-statistics", clip_norm: float = 1.0, **of_oracle: Any) -> Any:
    spec = Oracle(name=oracle, target_bound=10.0, **of_oracle)  # type: ignore[arg-type]
    return TrajectoryNPG(advantage=ADVANTAGE, clip_norm=clip_norm, oracle=spec)


SETTINGS: dict[str, Any] = {
    "pg": TrajectoryPG(advantage=ADVANTAGE),
    "npg": npg(),
    "npg with a gain": npg(gain=50.0),
    "npg by projected-sgd": npg("projected-sgd", steps=2, step_size=1.0, gain=30.0),
    "npg by improper-batch-sgd": npg("improper-batch-sgd", steps=2, step_size=1.0),
    "pgpe": PGPE(spread=50.0, center=20.0),
}
FORMS = {"log-linear": LogLinearSoftmax(4, 2), "mlp": MLPSoftmax(4, 2, 5)}
TASK = Gymnasium("CartPole-v1", 40, 1.0, reset_draws=4)
USERS = tuple(range(5))


class Gate:
    """Keeps the sums, and releases the same values whoever the users are."""

    def __init__(self) -> None:
        self.sums: list[torch.Tensor] = []

    def release(self, t: int, bounded: BoundedSum) -> Released[torch.Tensor]:
        self.sums.append(bounded.total.clone())
        rng = np.random.default_rng(len(self.sums))
        return Released(torch.from_numpy(0.1 * rng.normal(size=len(bounded.total))), t)


def theta_of(form: Any) -> torch.Tensor:
    rng = np.random.default_rng(7)
    theta: np.ndarray[Any, Any] = form.initial(rng) + 0.2 * rng.normal(size=form.dimension)
    return torch.from_numpy(theta).requires_grad_()


def trajectories(form: Any, users: Any, directions: Any = None) -> list[Trajectories]:
    seeds = [(3, user) for user in users]
    return simulate(TASK, form, theta_of(form).detach().numpy(), seeds, directions)


def a_round(form, chunks, clip_norm, directions=None):
    theta, gate = theta_of(form), Gate()
    plan: Any = SimpleNamespace(
        users=100, clip_norm=clip_norm, noise_multiplier=1.0, expected_batch_size=5.0
    )
    optimizer = torch.optim.SGD([theta], lr=1.0)
    given: Any = gate
    round_ = ControlRound(1, form, theta, Private(chunks), plan, given, optimizer, {}, directions)
    return round_, gate


def sums(name: str, form: Any, users: Any, clip_norm: float) -> list[torch.Tensor]:
    """The clipped sums that a round of these users asks the gate to release."""
    spec = SETTINGS[name].model_copy(update={"clip_norm": clip_norm})
    directions = None
    if spec.name == "pgpe":
        directions = spec.draw(np.random.default_rng(0), form.dimension)
    round_, gate = a_round(form, trajectories(form, users, directions), clip_norm, directions)
    UPDATES[spec.name](round_, spec)
    return gate.sums


@pytest.mark.parametrize("clip_norm", [TIGHT, slow(WIDE)])
@pytest.mark.parametrize("policy", FORMS)
@pytest.mark.parametrize("name", SETTINGS)
def test_neighbouring_users_move_each_sum_by_one_bounded_contribution(name, policy, clip_norm):
    """Without one user a sum loses that user's own contribution, at most S, and nothing else."""
    form = FORMS[policy]
    everybody, largest = sums(name, form, USERS, clip_norm), 0.0
    assert len(everybody) == (2 if "sgd" in name else 1)
    for user in USERS:
        fewer = sums(name, form, [u for u in USERS if u != user], clip_norm)
        alone = sums(name, form, [user], clip_norm)
        for with_, without, own in zip(everybody, fewer, alone, strict=True):
            moved = float((with_ - without).norm())
            assert moved <= clip_norm * (1 + 1e-9)
            assert float((with_ - without - own).norm()) <= 1e-9 * float(with_.norm())
            largest = max(largest, float(own.norm()) / clip_norm)
    if clip_norm == TIGHT and (SETTINGS[name].name == "pg" or "gain" in name):
        assert largest > 0.99  # the bound is met, not only kept
    assert largest > 1e-9


@pytest.mark.parametrize("name", SETTINGS)
def test_a_round_without_users_releases_sums_of_zero(name: str) -> None:
    for total in sums(name, FORMS["mlp"], [], 1.0):
        assert not total.any()


def failed(chunk: Trajectories, user: int) -> Trajectories:
    steps, rewards = chunk.steps.copy(), chunk.rewards.copy()
    steps[user], rewards[user] = 0, 0.0
    return Trajectories(**{**vars(chunk), "steps": steps, "rewards": rewards})


@pytest.mark.parametrize("name", ["pg", "npg", "npg by projected-sgd"])
def test_a_user_whose_environment_failed_contributes_zero(name: str) -> None:
    form, spec = FORMS["log-linear"], SETTINGS[name]
    (chunk,) = trajectories(form, [0, 1, 2])
    round_, gate = a_round(form, [failed(chunk, 1)], spec.clip_norm)
    UPDATES[spec.name](round_, spec)
    for total, expected in zip(gate.sums, sums(name, form, [0, 2], spec.clip_norm), strict=True):
        assert torch.allclose(total, expected, rtol=1e-9, atol=1e-12)


def test_the_policy_gradient_is_each_trajectorys_sum() -> None:
    form = FORMS["log-linear"]
    (chunk,) = trajectories(form, USERS)
    round_, _ = a_round(form, [chunk], WIDE)
    (weights,) = open_private(advantages(round_, ADVANTAGE))
    scores = form.scores(theta_of(form).detach().numpy(), chunk.observations, chunk.actions)
    expected = (weights[..., None] * scores)[: len(USERS)].sum((0, 1))
    (total,) = sums("pg", form, USERS, WIDE)
    assert np.allclose(total.numpy(), expected)


def test_the_natural_gradients_release_is_each_trajectorys_mean() -> None:
    """The first gradient of projected-sgd, at w = 0: Σ_u mean_t of −φ_t Â_t, times S over 2BR."""
    form, spec = FORMS["log-linear"], npg("projected-sgd", WIDE, steps=1, step_size=1.0)
    (chunk,) = trajectories(form, USERS)
    round_, gate = a_round(form, [chunk], WIDE)
    UPDATES["npg"](round_, spec)
    (values,) = open_private(advantages(round_, ADVANTAGE))
    targets = np.clip(values, -10.0, 10.0)
    theta = theta_of(form).detach().numpy()
    products = targets[..., None] * form.scores(theta, chunk.observations, chunk.actions)
    means = [products[u, : chunk.steps[u]].mean(0) for u in range(len(USERS))]
    expected = -np.sum(means, 0) / 10.0
    assert np.allclose(gate.sums[0].numpy(), expected)


def test_rows_are_trajectories_or_steps() -> None:
    form = FORMS["log-linear"]
    chunks = trajectories(form, range(70))
    whole, steps = TrajectoryRows(chunks, by_step=False), TrajectoryRows(chunks, by_step=True)
    lengths = np.concatenate([chunk.steps[: chunk.users] for chunk in chunks])
    assert whole.users == steps.users == len(whole.user) == 70
    assert np.array_equal(np.bincount(steps.user), lengths)
    policy = ControlPolicy(form, theta_of(form))
    assert isinstance(policy, ExplicitPolicy)
    values = [chunk.mask * (1.0 + np.arange(TASK.horizon)) for chunk in chunks]
    (by_user, by_step) = (
        {
            int(user): scores.sum(0)
            for users, of_users in policy.user_scores(rows, rows.take(values))
            for user, scores in zip(users, of_users, strict=True)
        }
        for rows in (whole, steps)
    )
    assert sorted(by_user) == sorted(by_step) == list(range(70))
    assert all(torch.allclose(by_user[u], by_step[u]) for u in by_user)
