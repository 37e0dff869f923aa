"""Whole runs of agents on a tiny model: what rewards get, what is resumed, and what is refused."""

import itertools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import dprlhf
from dprlhf import DprlhfError
from dprlhf.boundary import open_private
from dprlhf.privacy.partition import allocate
from dprlhf.privacy.plan import make_plan
from dprlhf.recipe import load_recipe
from helpers import agents
from helpers.runs import charged, weights

SEEN: list[dict[str, Any]] = []


def sums(completions: list[Any], **columns: Any) -> list[float]:
    """1 for a response in which the calculator was asked, less a little for each turn."""
    SEEN.append({"completions": completions, **columns})
    return [
        float(any(m.get("name") == "add" for m in messages)) - 0.1 * len(messages)
        for messages in completions
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return agents.save(tmp_path_factory.mktemp("agents") / "model")


def settings(model: str, folder: Path, **changes: Any) -> dict[str, Any]:
    return agents.run_settings(model, folder, **{"reward": sums, **changes})


def test_a_run_with_a_calculator(model: str, tmp_path: Path) -> None:
    SEEN.clear()
    public = [agents.asked(f"say {i}") for i in range(3)]
    private = settings(model, tmp_path)["prompts"]
    run = settings(model, tmp_path / "run", tools=[agents.add], evaluation_prompts=public)
    result = dprlhf.train(**run)
    assert result.after is not None
    assert bool(torch.cat([w.flatten() for w in weights(result.folder.path).values()]).any())
    roles = {m["role"] for call in SEEN for c in call["completions"] for m in c}
    assert roles == {"assistant", "tool"}
    recipe = load_recipe(result.folder.recipe)
    assert recipe.rollout.agent.tools == ["in-memory"]
    card = json.loads(result.folder.privacy.read_text())
    assert any("tools and environments keep nothing" in line for line in card["assumptions"])
    assert "rollout.agent" in card["experimental"]
    given = {"prompts": private, "reward": sums, "evaluation_prompts": public, "quiet": True}
    with pytest.raises(DprlhfError, match="given in Python: give it again to resume"):
        dprlhf.resume(result.folder.path, **given)
    again = dprlhf.resume(result.folder.path, tools=[agents.add], **given)
    assert again.after == result.after


class Kept:
    """An environment that keeps what it was told, and counts its trajectories."""

    def __init__(self) -> None:
        self.secret: str | None = None
        self.resets = 0

    def reset(self, secret: str | None = None, **row: Any) -> str | None:
        """Tell what the trajectory before told."""
        told, self.secret = self.secret, secret
        self.resets += 1
        return told

    def guess(self, number: int) -> str:
        """Guess a number.

        Args:
            number: The number.
        """
        return "no"


@pytest.mark.slow
@pytest.mark.parametrize(("size", "charges"), [(27, 0), (120, 4)])
def test_a_pool_of_environments_ends_the_run_the_same_way_with_one_user_and_without(
    size: int, charges: int, model: str, tmp_path: Path
) -> None:
    plan = make_plan(users=40, rounds=4, delta=1e-5, epsilon=8.0)
    drawn = open_private(allocate(plan, bytes(range(32))))
    largest = max((drawn.round(t) for t in range(1, 5)), key=len)
    assert 2 * len(largest) - 1 == 27  # one user decides whether its round is larger than the pool

    def ends(name: str, absent: int | None) -> tuple[list[int], str]:
        SEEN.clear()
        pool = [Kept() for _ in range(size)]
        turn = itertools.chain([Kept()], itertools.cycle(pool))
        rows = [
            {"prompt": None if i == absent else agents.asked(f"{i}?"), "secret": f"s{i}"}
            for i in range(40)
        ]
        given = settings(
            model, tmp_path / name, prompts=rows, rounds=4, environment_factory=lambda: next(turn),
            evaluation_prompts=[{"prompt": agents.asked("go"), "secret": "p"} for _ in range(4)],
        )  # fmt: skip
        end = "finished"
        with mock.patch("dprlhf.runs.folder.new_key", return_value=bytes(range(32))):
            try:
                dprlhf.train(**given)
            except DprlhfError as problem:
                end = str(problem)
        assert max(one.resets for one in pool) <= 1
        assert not [p for call in SEEN for p in call["prompts"] if "s" in p[0]["content"]]
        return charged(tmp_path / name) if charges else [], end

    with_all, without = ends("all", None), ends("one-less", int(largest[0]))
    assert with_all == without
    assert len(with_all[0]) == charges
    assert ("same environment twice" in with_all[1]) == (charges == 0)
    assert (tmp_path / "all").exists() == (charges > 0)
    if charges:
        card = json.loads((tmp_path / "all/privacy.json").read_text())
        assert any("an environment that no other has had" in line for line in card["assumptions"])


@pytest.mark.slow
def test_rows_without_prompts_are_asked_by_their_environment(model: str, tmp_path: Path) -> None:
    def seeds(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        SEEN.append({"prompts": prompts, **columns})
        return [float(len(messages)) for messages in completions]

    SEEN.clear()
    rows = [{"seed": i, "environment": "sums" if i % 2 else "numbers"} for i in range(24)]
    both = {"sums": agents.Adding, "numbers": agents.Asking}
    given = settings(
        model, tmp_path / "run", environment_factory=both, prompts=rows, reward=seeds,
        evaluation_prompts=[{"seed": 30 + i, "environment": "sums"} for i in range(4)],
    )  # fmt: skip
    result = dprlhf.train(**given)
    assert bool(torch.cat([w.flatten() for w in weights(result.folder.path).values()]).any())
    for call in SEEN:
        for prompt, seed, name in zip(
            call["prompts"], call.get("seed", []), call.get("environment", []), strict=True
        ):
            asked = f"{seed} and 1?" if name == "sums" else f"number {seed}?"
            assert prompt == agents.asked(asked)
    assert {seed for call in SEEN for seed in call["seed"]} > set(range(24))
    given["output_dir"] = tmp_path / "neutral"
    with pytest.raises(DprlhfError, match="no column 'prompt'"):
        dprlhf.train(**(given | {"environment_factory": None, "tools": [agents.add]}))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"prompts": ["text"] * 24, "tools": [agents.add]}, "called in conversations"),
        ({"rollout__agent": {}}, "give tools, an environment or both"),
        ({"rollout__agent": {"tools": ["helpers.agents:missing"]}}, "has no 'missing'"),
        ({"rollout__agent": {"tools": ["helpers.agents:CALLS"]}}, "not a callable"),
        ({"tools": [agents.add], "rollout__max_new_tokens": 220}, "more than the 256 positions"),
    ],
)
def test_what_cannot_work_is_refused(changes, why, model, tmp_path):
    with pytest.raises(DprlhfError, match=why):
        dprlhf.train(**settings(model, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()
