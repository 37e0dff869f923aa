"""Rewards by turn of agents on a tiny model: what a turn is, what rewards answer, and refusals."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import dprlhf
from dprlhf import DprlhfError, recipe
from dprlhf.agents import Agent, AgentSampler
from dprlhf.agents.rewards import environment_rewards, environment_turn_rewards
from dprlhf.recipe import load_recipe
from dprlhf.rewards import LoadedReward, Scorer, check_reward
from dprlhf.rewards.loading import load_rewards
from dprlhf.rewards.scoring import score_responses
from helpers import agents
from helpers.runs import weights


def by_length(completions: list[Any], **columns: Any) -> list[Any]:
    """A score for each turn: whether it calls a tool."""
    return [
        [float("tool_calls" in m) for m in messages if m["role"] == "assistant"]
        for messages in completions
    ]


by_length.dprlhf_by_turn = True  # type: ignore[attr-defined]


class Judged(agents.Guessing):
    """The guessing game, which says after each turn how many guesses there were."""

    def get_turn_reward(self) -> float:
        return float(len(self.guesses))


def test_a_turn_is_a_message_of_the_policy_and_its_score_follows_its_tools() -> None:
    policy = agents.policy_of()
    AgentSampler(Agent([agents.add], Judged)).attach(policy)
    made = agents.draw(policy, agents.prompts_of([f"number {i}?" for i in range(6)]))
    said = [[m for m in row if m["role"] == "assistant"] for row in made.completions]
    assert made.turns == [len(row) for row in said]
    assert max(made.turns) > 2
    for row, scores in enumerate(made.extra["turn_rewards"]):
        assert len(scores) == made.turns[row]
        assert scores == sorted(scores)  # a turn's score knows of the guesses up to it
        assert scores[-1] == len(made.extra["environments"][row].guesses)
    reward = LoadedReward(environment_turn_rewards, "turns", by_turn=True)
    found = score_responses(Scorer([reward], 1e9), made, private=True)
    assert found.valid.all()
    for row, scores in enumerate(made.extra["turn_rewards"]):
        for turn in range(found.returns.shape[1]):
            assert found.returns[row, turn] == sum(scores[min(turn, len(scores) - 1) :])
    assert (found.values == found.returns[:, 0]).all()


def scored(answers, turns, *others, bound=100.0):
    def reward(answers: list[Any], **columns: Any) -> list[Any]:
        return answers

    given = [LoadedReward(reward, "turns", 2.0, by_turn=True), *others]
    nothing = [""] * len(answers)
    return Scorer(given, bound).score(
        nothing, nothing, [[]] * len(answers), {"answers": answers}, range(len(answers)),
        turns=turns, private=True,
    )  # fmt: skip


def test_weights_clips_and_scores_of_whole_trajectories() -> None:
    last = LoadedReward(lambda completions, **columns: [1.0] * len(completions), "whole")
    found = scored([[1, 2, 3], [None, 4.0], np.array([5.0]), 6], [3, 2, 1, 2], last)
    assert found.returns.tolist() == [[13, 11, 7], [9, 9, 9], [11, 11, 11], [13, 13, 13]]
    assert found.values.tolist() == [13, 9, 11, 13]
    found = scored([[1, 2, 3], [None, 4.0]], [3, 2], last, bound=10)
    assert found.returns.tolist() == [[10, 10, 7], [9, 9, 9]]
    found = scored([[None], None, [1.0]], [1, 1, 1])
    assert found.valid.tolist() == [False, False, True]


class Hostile:
    def tolist(self) -> Any:
        raise RuntimeError("no list")

    def __float__(self) -> float:
        raise SystemExit


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ([1.0], "turns"),
        ([1.0, 2.0, 3.0], "turns"),
        ([1.0, math.nan], "nan"),
        ([1.0, "2"], "str"),
        ([1e308, 1e308], "overflow"),
        (Hostile(), "Hostile"),
        ([1.0, Hostile()], "SystemExit"),
    ],
)
def test_an_answer_that_is_no_score_for_each_turn_is_not_valid(answer: Any, kind: str) -> None:
    found = scored([answer, [1, 2]], [2, 2])
    assert found.failures == {kind: 1}
    assert found.valid.tolist() == [False, True]
    assert found.returns[0].tolist() == [0, 0]


CONVERSATIONS = [
    [{"role": "assistant", "content": "a" * i}, {"role": "assistant", "content": "b"}]
    for i in range(4)
]


def test_the_check_sees_a_score_that_moves_between_turns() -> None:
    def shifting(completions: list[Any]) -> list[Any]:
        move = 0.5 if len(completions) > 1 else 0.0
        return [[1 + move, 1 - move] for _ in completions]

    reward = LoadedReward(shifting, "shifting", by_turn=True)
    with pytest.raises(DprlhfError, match=r"scores \[1.5, 0.5\] in the batch and \[1.0, 1.0\]"):
        check_reward(reward, list("abcd"), CONVERSATIONS)
    calm = LoadedReward(lambda completions: [[1.0, 0.5]] * len(completions), "calm", by_turn=True)
    assert check_reward(calm, list("abcd"), CONVERSATIONS).scores == (1.5,) * 4
    with pytest.raises(DprlhfError, match="to score each turn of an agent"):
        check_reward(LoadedReward(calm.function, "calm"), list("abcd"), CONVERSATIONS)
    three = LoadedReward(lambda completions: [[1.0] * 3] * len(completions), "3", by_turn=True)
    with pytest.raises(DprlhfError, match="nor a list of them for its 2 turns"):
        check_reward(three, list("abcd"), CONVERSATIONS)


def test_rewards_of_environments() -> None:
    loaded = load_rewards(environment_rewards(Judged), None)
    names = [(one.name.rpartition(":")[2], one.by_turn, one.per_user) for one in loaded]
    assert names == [("environment_reward", False, True), ("environment_turn_rewards", True, False)]
    assert len(environment_rewards(agents.TWO)) == 1
    [loaded] = load_rewards([recipe.Reward(function=f"{__file__}:by_length")], None)
    assert loaded.by_turn


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return agents.save(tmp_path_factory.mktemp("agents") / "model")


def parameters(result: Any) -> NDArray[np.float32]:
    return torch.cat([w.flatten() for w in weights(result.folder.path).values()]).numpy()


@pytest.mark.slow
def test_a_run_with_an_environment_that_scores_its_turns(model: str, tmp_path: Path) -> None:
    given = agents.run_settings(
        model, tmp_path / "run", environment_factory=Judged, update__name="grpo"
    )
    result = dprlhf.train(**given)
    assert parameters(result).any()
    held = load_recipe(result.folder.recipe)
    assert len(held.rewards) == 2
    assert json.loads(result.folder.privacy.read_text())["epsilon"] <= 8
    again = {"prompts": given["prompts"], "environment_factory": Judged, "quiet": True}
    assert (parameters(dprlhf.resume(result.folder.path, **again)) == parameters(result)).all()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "scores the turns of an agent"),
        (
            {"tools": [agents.add], "update__name": "npg"},
            "which works with update.name pg, grpo or ppo",
        ),
        ({"tools": [agents.add], "update__name": "rebel"}, "rebel compares whole responses"),
    ],
)
def test_what_cannot_work_is_refused(changes, why, model, tmp_path):
    with pytest.raises(DprlhfError, match=why):
        dprlhf.train(**agents.run_settings(model, tmp_path / "run", reward=by_length, **changes))
