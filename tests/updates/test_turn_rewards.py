"""Rewards by turn in the updates: against autograd, in float64."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.rewards import LoadedReward, Scorer, Scores
from dprlhf.rollout import Responses
from dprlhf.updates import UPDATES
from dprlhf.updates.ppo import LOCAL_LEARNING_RATE
from dprlhf.updates.round import subtract_kl
from helpers.autograd import relative_error
from helpers.batches import Shape, with_tools
from helpers.policies import policy_of
from helpers.rounds import flat_gradient, round_of, some_users, token_logprobs

SHAPE = Shape([[5, 1], [2], [4]], k=4, length=10)
BOUND = 3.0
UPDATE_CASES: list[dict[str, Any]] = [
    {"name": "pg", "baseline": "loo"},
    {"name": "pg", "baseline": "paired"},
    {"name": "pg", "baseline": "group"},
    {"name": "grpo", "scale_rewards": True},
    {"name": "grpo", "scale_rewards": False},
    {"name": "ppo", "baseline": "loo"},
]
IDS = ["pg-loo", "pg-paired", "pg-group", "grpo-scaled", "grpo", "ppo"]


def turns_of(responses: Responses, row: int) -> list[list[int]]:
    """The places of the policy's own tokens, by turn."""
    turns: list[list[int]] = []
    own = responses.policy_mask[row].tolist()
    for place, mine in enumerate(own):
        if mine and (place == 0 or not own[place - 1]):
            turns.append([])
        if mine:
            turns[-1].append(place)
    return turns


def drawn(responses: Responses, seed: int) -> list[list[float]]:
    random = np.random.default_rng(seed)
    count = [len(turns_of(responses, row)) for row in range(len(responses.user))]
    return [random.uniform(-1, 1, n).tolist() for n in count]


def scored(responses: Responses, answers: Sequence[Any], *, by_turn: bool = True) -> Scores:
    def reward(answers: list[Any], **columns: Any) -> list[Any]:
        return answers

    nothing = [""] * len(answers)
    return Scorer([LoadedReward(reward, "turns", by_turn=by_turn)], BOUND).score(
        nothing, nothing, [[]] * len(answers), {"answers": answers}, responses.user,
        turns=responses.turns,
    )  # fmt: skip


def sums(policy, responses, scores, settings, *, clip_norm=1e9, batch_size=16, beta=0.0):
    """The sum over users that the update releases."""
    spec = recipe.UPDATE_SETTINGS[settings["name"]].model_validate(
        {**settings, "batch_size": batch_size}
    )
    made, gate = round_of(policy, responses, scores, clip_norm=clip_norm)
    subtract_kl(made, recipe.KL(beta=beta), batch_size)
    UPDATES[settings["name"]](made, spec)
    return gate.sums[0].total


def advantages(returns: NDArray[np.float64], settings: dict[str, Any]) -> NDArray[np.float64]:
    """Advantages of the returns of one prompt's responses at one turn, ``[responses]``."""
    k = len(returns)
    kind = settings.get("baseline")
    if kind == "loo":
        return np.array([returns[i] - np.delete(returns, i).mean() for i in range(k)])
    if kind == "paired":
        half = k // 2
        others = [returns[half:].mean()] * half + [returns[:half].mean()] * half
        return returns - np.array(others)
    centred = returns - returns.mean()
    scaled = kind == "group" or settings.get("scale_rewards")
    return centred / (returns.std(ddof=1) + 1e-4) if scaled else centred


def truth(policy, responses, answers, settings):
    """Σ over users, responses and turns of the turn's advantage · ∇ log π of its tokens."""
    total = torch.zeros(policy.dimension, dtype=torch.float64)
    for first in range(0, len(responses.user), SHAPE.k):
        rows = range(first, first + SHAPE.k)
        turns = {row: turns_of(responses, row) for row in rows}
        for number in range(max(map(len, turns.values()))):
            returns = np.array(
                [np.clip(sum(answers[r][min(number, len(turns[r]) - 1) :]), -3, 3) for r in rows]
            )
            for row, advantage in zip(rows, advantages(returns, settings), strict=True):
                if number >= len(turns[row]):
                    continue
                logprobs = token_logprobs(policy, responses, row)
                score = (
                    logprobs[turns[row][number]].sum()
                    / (responses.user == responses.user[row]).sum()
                )
                if settings["name"] == "grpo":
                    score = score / sum(map(len, turns[row]))
                total += float(advantage) * flat_gradient(policy, score)
    return total


@pytest.mark.parametrize("settings", UPDATE_CASES, ids=IDS)
def test_each_turn_has_the_advantage_of_its_own_return(settings: dict[str, Any]) -> None:
    policy, responses = policy_of("gpt2"), with_tools(SHAPE, 3)
    assert len(set(responses.turns)) > 2
    answers = drawn(responses, 1)
    found = sums(policy, responses, scored(responses, answers), settings)
    true = truth(policy, responses, answers, settings)
    if settings["name"] == "ppo":
        true *= LOCAL_LEARNING_RATE
    assert relative_error(found, true) < 1e-9
    totals = scored(responses, [sum(a) for a in answers])
    assert relative_error(sums(policy, responses, totals, settings), true) > 0.05
    small = sums(policy, responses, scored(responses, answers), settings, batch_size=4)
    assert relative_error(small, true) < 1e-9


@pytest.mark.parametrize("settings", UPDATE_CASES, ids=IDS)
def test_one_score_for_a_trajectory_is_the_same_as_without_turns(settings: dict[str, Any]) -> None:
    policy, responses = policy_of("gpt2"), with_tools(SHAPE, 4)
    values = np.random.default_rng(4).uniform(-4, 4, len(responses.user)).tolist()
    by_turn = sums(policy, responses, scored(responses, values), settings, beta=0.3)
    whole = sums(policy, responses, scored(responses, values, by_turn=False), settings, beta=0.3)
    assert relative_error(by_turn, whole) < 1e-12


@pytest.mark.parametrize("settings", UPDATE_CASES, ids=IDS)
def test_a_user_moves_the_sum_by_its_own_contribution(settings: dict[str, Any]) -> None:
    """Also where it alone has trajectories of many turns."""
    policy, responses = policy_of("gpt2"), with_tools(SHAPE, 5)
    own, left_out = responses.tool_mask, int(responses.user[np.argmax(responses.turns)])
    own[torch.from_numpy(responses.user != left_out)] = 1
    answers = drawn(responses, 5)
    of_user = responses.user == left_out
    turns = np.array(responses.turns)
    assert turns[of_user].max() > turns[~of_user].max() == 1

    def total(users: Sequence[int]) -> torch.Tensor:
        fewer, _ = some_users(responses, scored(responses, answers), users)
        rows = np.flatnonzero(np.isin(responses.user, users))
        scores = scored(fewer, [answers[r] for r in rows])
        return sums(policy, fewer, scores, settings, clip_norm=0.5)

    others = [user for user in range(3) if user != left_out]
    moved = total(range(3)) - total(others)
    assert 0.01 < float(moved.norm()) <= 0.5 * (1 + 1e-9)
    assert float((moved - total([left_out])).norm()) < 1e-12


def test_a_user_with_a_wrong_answer_adds_nothing() -> None:
    policy, responses = policy_of("gpt2"), with_tools(SHAPE, 6)
    answers: list[Any] = list(drawn(responses, 6))
    answers[int(np.flatnonzero(responses.user == 1)[0])] += [0.5]
    scores = scored(responses, answers)
    assert scores.failures == {"turns": 1}
    assert (~scores.valid).sum() == 1
    found = sums(policy, responses, scores, UPDATE_CASES[0], clip_norm=0.5)
    fewer = some_users(responses, scores, [0, 2], in_place=True)
    assert torch.equal(found, sums(policy, *fewer, UPDATE_CASES[0], clip_norm=0.5))


def test_turns_are_the_stretches_of_the_policys_tokens() -> None:
    responses = with_tools(SHAPE, 7)
    assert responses.turns == [len(turns_of(responses, row)) for row in range(len(responses.user))]
    for row in range(len(responses.user)):
        for number, places in enumerate(turns_of(responses, row)):
            assert (responses.turn[row, places] == number).all()
    assert set(dataclasses.replace(responses, tool_mask=None).turns) == {1}
