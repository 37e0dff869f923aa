"""What every private update must do, whatever it asks of the users."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dprlhf import recipe
from dprlhf.boundary import BoundedSum, Released
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import read_ledger
from dprlhf.testing import check_update
from dprlhf.testing.update import TIGHT
from dprlhf.training.reinforcement import Result
from dprlhf.updates import UPDATES
from helpers.marks import slow
from helpers.rounds import value_of
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


SPECS: dict[str, Any] = {
    "pg": recipe.PG(),
    "pg, paired": recipe.PG(baseline="paired"),
    "grpo": recipe.GRPO(name="grpo"),
    "ppo": recipe.PPO(name="ppo", epochs=2, local_learning_rate=1.0),
    "ppo, adam": recipe.PPO(name="ppo", local_optimizer="adam", local_learning_rate=0.01),
    "rebel": recipe.REBEL(name="rebel", steps=2),
    "rebel, gauss-newton": recipe.REBEL(name="rebel", solver="gauss-newton"),
    "npg": recipe.NPG(name="npg"),
    "npg, statistics": recipe.NPG(
        name="npg", oracle=recipe.Oracle(name="sufficient-statistics", sketch=16)
    ),
    "npg, gain": recipe.NPG(name="npg", oracle=recipe.Oracle(steps=2, gain=16.0)),
    "npg, sketch": recipe.NPG(name="npg", oracle=recipe.Oracle(steps=2, sketch=30)),
}


def test_every_update_has_settings_for_this_contract() -> None:
    assert LEARNS.keys() == UPDATES.keys() == {spec.name for spec in SPECS.values()}


# --- one round -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_an_update_keeps_the_shipped_contract(name: str) -> None:
    spec = SPECS[name]
    report = check_update(UPDATES[spec.name], spec, seed=list(SPECS).index(name))
    assert report.releases == spec.releases
    assert report.largest[TIGHT] > 0.1


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


@pytest.mark.slow
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


@pytest.mark.parametrize("name", [n if n in UPDATES else slow(n) for n in SPECS])
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
        noise.append(value_of(released) * self.plan.expected_batch_size - total)
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
