"""The default promise: neighbours have the same number of users, which a run publishes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dprlhf
from dprlhf import DprlhfError
from dprlhf.audit.finished_run import audit_run
from dprlhf.privacy.ledger import read_ledger
from dprlhf.runs.earlier import records_of, total_of_runs
from dprlhf.runs.model_card import KNOWN_NUMBER
from helpers.runs import charged, lower_case, run_settings, train

USERS, CHOSEN = 60, 7
SETTINGS: dict[str, Any] = {"epsilon": 8.0, "rounds": 3, "learning_rate": 0.05}
NOISED = {
    "released_gradient_norm",
    "private_reward_noised",
    "private_reward_noise_std",  # of a ratio of two noised sums
    "valid_share_noised",
}


@pytest.fixture(scope="module")
def runs(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run with a user's prompt, one where the slot is empty, one without the slot."""
    everybody: list[str | None] = [f"user {i} says" for i in range(USERS)]
    prompts = {
        "with": everybody,
        "zeroed": [None if i == CHOSEN else p for i, p in enumerate(everybody)],
        "removed": [p for i, p in enumerate(everybody) if i != CHOSEN],
    }
    folders = {name: tmp_path_factory.mktemp(name) / "run" for name in prompts}
    for name, folder in folders.items():
        train(model, folder, prompts=prompts[name], **SETTINGS)
    return folders


def stated(folder: Path) -> dict[str, Any]:
    """Return all that the public files state, but for the values that carry noise."""
    files = [f.relative_to(folder) for f in folder.rglob("*") if f.is_file()]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ledger = read_ledger(folder / "ledger.jsonl")
    recipe = (folder / "recipe.yaml").read_text().splitlines()
    return {
        "files": sorted(str(f) for f in files if f.parts[0] != "secret"),
        "metrics": [{k: v for k, v in line.items() if k not in NOISED} for line in metrics],
        "card": json.loads((folder / "privacy.json").read_text()),
        "model card": (folder / "policy/README.md").read_text(),
        "opened": ledger[0].body,
        "entries": [(e.kind, e.body.get("round"), sorted(e.body)) for e in ledger],
        "recipe": [line for line in recipe if not line.startswith("output_dir")],
    }


@pytest.mark.slow
def test_what_is_published_does_not_tell_whether_a_user_brought_data(runs: dict[str, Path]) -> None:
    present, zeroed = stated(runs["with"]), stated(runs["zeroed"])
    assert present["card"]["adjacency"] == "zero-out"
    assert present == zeroed
    # The user was there, and contributed nothing where its slot was empty.
    unread = [
        sum(
            json.loads(line)["users_not_readable"]
            for line in (runs[name] / "secret/telemetry-0.jsonl").read_text().splitlines()
        )
        for name in ("with", "zeroed")
    ]
    assert unread == [0, 1]
    assert (runs["with"] / "metrics.jsonl").read_bytes() != (
        runs["zeroed"] / "metrics.jsonl"
    ).read_bytes()


def test_what_is_published_tells_an_added_user_with_certainty(runs: dict[str, Path]) -> None:
    """Why a run is not planned under add-remove: N and the divisor kN/T stand in the open."""
    present, removed = stated(runs["with"]), stated(runs["removed"])
    for name in ("card", "opened"):
        differ = {k for k in present[name] if present[name][k] != removed[name][k]}
        assert {"users", "divisor"} <= differ, name


def test_add_remove_is_refused_before_anything_is_written(model: str, tmp_path: Path) -> None:
    for partition in ("random-allocation", "poisson"):
        with pytest.raises(DprlhfError, match=r"add-remove.*number of users.*zero-out") as caught:
            train(
                model,
                tmp_path / "run",
                **SETTINGS,
                privacy__adjacency="add-remove",
                privacy__partition=partition,
            )
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run").exists()


class StopError(Exception):
    pass


@pytest.fixture
def old_run(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that an earlier version began, under add-remove, and that stopped after a round."""

    def stop(metrics: dict[str, Any]) -> None:
        raise StopError

    with monkeypatch.context() as earlier:
        earlier.setattr("dprlhf.privacy.plan.DEFAULT_ADJACENCY", "add-remove")
        with pytest.raises(DprlhfError, match="resume"):
            train(model, tmp_path / "old", **SETTINGS, callbacks=[stop])
    assert records_of(tmp_path / "old")[0].mechanism["adjacency"] == "add-remove"
    return tmp_path / "old"


@pytest.mark.slow
def test_a_run_begun_under_add_remove_is_continued_totalled_and_audited(
    old_run: Path, model: str, tmp_path: Path
) -> None:
    prompts = [f"user {i} says" for i in range(100)]
    dprlhf.resume(old_run, prompts=prompts, reward=lower_case, quiet=True)
    assert charged(old_run) == [1, 2, 3]
    card = json.loads((old_run / "privacy.json").read_text())
    assert card["neighbouring"] == "one user is added or removed"
    assert KNOWN_NUMBER in (old_run / "policy/README.md").read_text()
    # A later run on the same users states one total with it, for zero-out.
    new = tmp_path / "new"
    previous = [{"run": str(old_run), "users": "shared"}]
    dprlhf.train(
        **run_settings(model, **SETTINGS, prompts=prompts, previous=previous), output_dir=new
    )
    card = json.loads((new / "privacy.json").read_text())
    assert card["neighbouring"] == "one user's data is replaced by nothing"
    assert KNOWN_NUMBER not in (new / "policy/README.md").read_text()
    assert card["total"]["epsilon"] > card["epsilon"]
    _, cost = total_of_runs([old_run, new])
    assert cost.epsilon == card["total"]["epsilon"]
    assert any("(zero-out)" in line for line in cost.assumptions)
    assert not any("add-remove" in line for line in cost.assumptions)
    found = audit_run(old_run, tmp_path / "audit", canaries=40, seed=1, quiet=True)
    assert found.epsilon == pytest.approx(card["epsilon"], rel=1e-3)
