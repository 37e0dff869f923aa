"""What every private update must do, whatever it asks of the users."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dprlhf.boundary import BoundedSum, Released
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import read_ledger
from dprlhf.rewards import Scores
from dprlhf.training.trainer import Result
from dprlhf.updates import UPDATES
from dprlhf.updates.telemetry import TelemetryCoordinates
from helpers.batches import Shape
from helpers.each_update import SPECS, WIDE, data, fresh, run
from helpers.rounds import flat_parameters, round_of, some_users
from helpers.runs import save_sharp, train

LEARNS: dict[str, dict[str, Any]] = {
    "pg": {},
    "grpo": {},
    "ppo": {
        "rounds": 12,
        "update__epochs": 2,
        "update__minibatches": 2,
        "update__local_learning_rate": 0.5,
    },
    # At 0.1 it overshoots η(r − r′) and may come back: one seed of three learned nothing.
    "rebel": {"rounds": 40, "learning_rate": 0.05},
    "npg": {
        "rounds": 16,
        "learning_rate": 8.0,
        "optimizer__name": "sgd",
        "update__clip_norm": 0.5,  # features are small where B starts at zero
        "update__oracle": {"steps": 2, "step_size": 1.0, "target_bound": 4},
    },
}
"""With what an update learns in a few rounds without noise."""


def test_every_update_has_settings_for_this_contract() -> None:
    assert LEARNS.keys() == UPDATES.keys() == {spec.name for spec in SPECS.values()}


# --- whole runs ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_sharp(tmp_path_factory.mktemp("model"))


def check_ledger(result: Result, releases: int) -> None:
    """One charge a round, for all of its releases."""
    assert result.plan.releases_per_round == releases
    entries = read_ledger(result.folder.path / "ledger.jsonl")
    assert [e.kind for e in entries][1:] == ["charge", "commit"] * result.plan.rounds
    assert {e.body["releases_per_round"] for e in entries if e.kind == "charge"} == {releases}


@pytest.mark.parametrize("name", UPDATES)
def test_a_run_without_noise_learns(model: str, tmp_path: Path, name: str) -> None:
    fixed = {"rounds": 20, "learning_rate": 0.1, "update__name": name}
    result = train(
        model,
        tmp_path / "run",
        epsilon=math.inf,
        rollout__responses=4,
        evaluation_prompts=[f"public {i}" for i in range(240)],
        **fixed | LEARNS[name],
    )
    assert result.difference is not None
    assert result.difference.mean > 4 * result.difference.standard_error
    check_ledger(result, result.plan.releases_per_round)
    card = json.loads((tmp_path / "run/privacy.json").read_text())
    assert card["private"] is False
    assert card["epsilon"] == "infinity"


@pytest.mark.parametrize("name", SPECS)
def test_a_private_run(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Every release is a sum clipped to S, and noise of standard deviation zS, over m."""
    spec, noise = SPECS[name], []
    release = Gate.release

    def seen(self: Gate, number: int, bounded: BoundedSum) -> Released[torch.Tensor]:
        assert bounded.clip_norm == 0.2
        total = bounded.total.clone()
        released = release(self, number, bounded)
        noise.append(released.value * self.plan.expected_batch_size - total)
        return released

    monkeypatch.setattr(Gate, "release", seen)
    given = {f"update__{k}": v for k, v in spec.model_dump(exclude_unset=True).items()}
    result = train(
        model,
        tmp_path / "run",
        epsilon=8.0,
        rounds=2,
        optimizer__name="sgd",
        rollout__responses=4,
        rollout__base_policy="reference",
        **given | {"update__clip_norm": 0.2},
    )
    check_ledger(result, spec.releases)
    assert len(noise) == 2 * spec.releases
    assert result.plan.noise_multiplier > 0.1
    normals = torch.cat(noise) / (result.plan.noise_multiplier * 0.2)
    assert float(normals.square().mean()) == pytest.approx(1, abs=5 * math.sqrt(2 / len(normals)))
    assert float(normals.mean()) == pytest.approx(0, abs=5 / math.sqrt(len(normals)))


# --- one round -----------------------------------------------------------------------------------

shapes = st.builds(
    Shape,
    prompts=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=2), min_size=2, max_size=3),
    k=st.sampled_from([2, 4]),
    length=st.integers(1, 4),
)


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(shape=shapes, seed=st.integers(0, 99), clip_norm=st.floats(0.01, 2))
def test_a_user_moves_each_sum_by_its_own_clipped_contribution(
    name: str, shape: Shape, seed: int, clip_norm: float
) -> None:
    """The released values being the same, however many prompts it has; without users it is zero."""
    responses, scores = data(seed, shape, shuffled=True)
    everyone = list(range(responses.users))

    def sums(users: list[int]) -> list[torch.Tensor]:
        return run(*fresh(), SPECS[name], *some_users(responses, scores, users), clip_norm)

    for all_, fewer, one, nobody in zip(
        sums(everyone), sums(everyone[1:]), sums([0]), sums([]), strict=True
    ):
        assert float((all_ - fewer).norm()) <= clip_norm
        torch.testing.assert_close(all_ - fewer, one, rtol=0, atol=1e-12)
        assert not nobody.any()


@pytest.mark.parametrize("name", SPECS)
def test_a_user_whose_reward_failed_contributes_zero(name: str) -> None:
    """And one whose advantages overflow does not reach the others."""
    responses, scores = data(10, Shape([[5, 1], [2], [7]], k=4, length=4), shuffled=True)
    valid = scores.valid.copy()
    valid[np.flatnonzero(responses.user == 1)[3]] = False
    broken = Scores(np.where(valid, scores.values, math.nan), valid, {})
    broken.values[responses.user == 2] = 1e300
    found = []
    for users in ([0, 1, 2], [0, 2]):
        policy, _ = fresh()
        round_, gate = round_of(
            policy, *some_users(responses, broken, users), clip_norm=1.0, learning_rate=0.1
        )
        UPDATES[SPECS[name].name](round_, SPECS[name])
        found.append([bounded.total for bounded in gate.sums])
    for all_, fewer in zip(*found, strict=True):
        torch.testing.assert_close(all_, fewer, rtol=0, atol=1e-12)
        assert float(all_.norm()) > 1e-3


@pytest.mark.parametrize("name", SPECS)
def test_the_size_of_the_micro_batches_changes_nothing(name: str) -> None:
    responses, scores = data(3, Shape([[5, 1], [2], [18], [3]], k=4, length=4), shuffled=True)
    found = [run(*fresh(), SPECS[name], responses, scores, WIDE, size) for size in (1, 8, 64)]
    for one, some, all_ in zip(*found, strict=True):
        torch.testing.assert_close(one, some, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(one, all_, rtol=1e-9, atol=1e-9)
        assert one.any()


@pytest.mark.parametrize("name", SPECS)
def test_without_users_and_noise_the_policy_stays(name: str) -> None:
    policy, _ = fresh()
    before = flat_parameters(policy)
    responses, scores = data(0, Shape([[1]], k=2, length=2))
    round_, gate = round_of(
        policy, *some_users(responses, scores, []), clip_norm=1.0, learning_rate=1.0,
        telemetry=TelemetryCoordinates(0.1, 3.0),
    )  # fmt: skip
    UPDATES[SPECS[name].name](round_, SPECS[name])
    assert not any(bounded.total.any() for bounded in gate.sums)
    assert torch.equal(flat_parameters(policy), before)
