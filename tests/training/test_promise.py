"""The default promise: neighbours have the same number of users, which a run publishes."""

import json
from pathlib import Path
from typing import Any

import pytest

from dprlhf import DprlhfError
from dprlhf.privacy.ledger import read_ledger
from helpers.runs import train

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
                model, tmp_path / "run", **SETTINGS, privacy__adjacency="add-remove",
                privacy__partition=partition,
            )  # fmt: skip
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run").exists()
