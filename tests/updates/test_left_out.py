"""A response that did not end counts in no update; the user's other responses weigh as before."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from dprlhf import recipe
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses
from dprlhf.updates import find_update
from dprlhf.updates.npg import response_examples
from dprlhf.updates.pg import advantage_weights
from dprlhf.updates.ppo import LOCAL_LEARNING_RATE
from helpers.autograd import gradient_of_user, relative_error
from helpers.batches import Shape, batch_of
from helpers.policies import policy_of
from helpers.rounds import round_of

SHAPE = Shape([[5, 1], [2], [7], [4, 6]], k=4, length=5)


def given() -> tuple[Responses, Scores, Any]:
    """Responses of which some are left out, among them all of user 1."""
    responses = batch_of(SHAPE, 2)
    random = np.random.default_rng(5)
    scores = Scores(random.normal(size=len(responses.user)), np.ones(len(responses.user), bool), {})
    left_out = random.random(len(responses.user)) < 0.4
    left_out[responses.user == 1] = True
    return dataclasses.replace(responses, left_out=left_out), scores, left_out


@pytest.mark.parametrize("baseline", ["loo", "group"])
def test_the_other_responses_weigh_as_before(baseline: str) -> None:
    responses, scores, left_out = given()
    valid, ones = np.array([True, True, True, False]), np.ones(len(responses.user))
    found = advantage_weights(responses, scores, valid, ones, baseline=baseline)
    every = dataclasses.replace(responses, left_out=None)
    plain = advantage_weights(every, scores, valid, ones, baseline=baseline)
    np.testing.assert_array_equal(found, np.where(left_out, 0.0, plain))
    examples = response_examples(responses, scores, valid, ones, baseline)
    before = response_examples(every, scores, valid, ones, baseline)
    np.testing.assert_array_equal(examples.weights, np.where(left_out, 0.0, before.weights))
    np.testing.assert_array_equal(examples.targets, np.where(left_out, 0.0, before.targets))


@pytest.mark.parametrize(
    "update",
    [{"name": "pg"}, {"name": "grpo"}, {"name": "ppo"}],
    ids=lambda update: update["name"],
)
def test_the_sum_is_that_of_the_counted_responses(update: dict[str, Any]) -> None:
    policy, (responses, scores, left_out) = policy_of(), given()
    spec = recipe.UPDATE_SETTINGS[update["name"]].model_validate({**update, "clip_norm": 1e6})
    sums = {}
    for name, some in {
        "without": responses,
        "with": dataclasses.replace(responses, left_out=None),
    }.items():
        round_, gate = round_of(policy, some, scores, clip_norm=1e6)
        find_update(spec)(round_, spec)
        sums[name] = gate.sums[0].total
    if update["name"] == "grpo":
        baseline, lengths = "group", responses.response_mask.sum(1).numpy()
    else:
        baseline, lengths = "loo", np.ones(len(left_out))
    weights = advantage_weights(
        dataclasses.replace(responses, left_out=None),
        scores,
        np.ones(responses.users, bool),
        np.ones(len(left_out)),
        baseline=baseline,
    )
    truth = torch.zeros(policy.dimension, dtype=torch.float64)
    for user in range(responses.users):
        truth += gradient_of_user(
            policy, responses, np.where(left_out, 0.0, weights / lengths), user
        )
    if update["name"] == "ppo":
        truth *= LOCAL_LEARNING_RATE
    assert relative_error(sums["without"], truth) < 1e-9
    assert relative_error(sums["with"], truth) > 0.1
