"""Each update's sum over users, with truncated sampling, against autograd through transformers."""

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from dprlhf import recipe
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.protocol import Sampling
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses
from dprlhf.rollout.logprobs import log_ratio_to_base
from dprlhf.updates import find_update
from dprlhf.updates.npg import response_examples
from dprlhf.updates.pg import advantage_weights
from dprlhf.updates.ppo import LOCAL_LEARNING_RATE
from dprlhf.updates.rebel import loss_weights
from dprlhf.updates.round import subtract_kl
from helpers.autograd import gradient_of_user, relative_error
from helpers.batches import Shape, batch_of
from helpers.policies import policy_of
from helpers.rounds import round_of
from helpers.sampled import TEXTS, draw, prompts_of

SAMPLING = Sampling(top_k=20, top_p=0.9)
BETA = 0.1


def sampled() -> tuple[CausalLMPolicy, Responses, Scores]:
    policy = copy.deepcopy(policy_of("llama"))
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.mul_(12)
    policy.parameters = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    policy.sampling = SAMPLING
    prompts = prompts_of(TEXTS[:4], [0, 0, 1, 2], [0, 1, 0, 0])
    responses = draw(policy, prompts, responses=4, max_new_tokens=5)
    rewards = np.random.default_rng(6).normal(size=len(responses.user))
    return policy, responses, Scores(rewards, np.ones(len(rewards), bool), {})


@pytest.mark.parametrize(
    "update",
    [{"name": "pg"}, {"name": "grpo"}, {"name": "ppo"}, {"name": "rebel", "steps": 1}],
    ids=lambda update: update["name"],
)
def test_the_sum_is_that_of_the_truncated_policys_scores(update: dict[str, Any]) -> None:
    policy, responses, scores = sampled()
    spec = recipe.UPDATE_SETTINGS[update["name"]].model_validate({**update, "clip_norm": 1e6})
    round_, gate = round_of(policy, responses, scores, clip_norm=1e6)
    subtract_kl(round_, recipe.KL(beta=BETA), spec.batch_size)
    find_update(spec)(round_, spec)
    # The penalty compares the policies before they are cut.
    penalty = BETA * log_ratio_to_base(policy, responses, 8).sum(1)
    assert np.isfinite(penalty).all()
    assert np.abs(penalty).max() > 0.01
    less = Scores((scores.values - penalty).clip(-3, 3), scores.valid, {})
    valid, ones = np.ones(responses.users, bool), np.ones(len(responses.user))
    if update["name"] == "rebel":
        weights = loss_weights(responses, less, valid, 0 * ones)
    else:
        baseline = "group" if update["name"] == "grpo" else "loo"
        weights = advantage_weights(responses, less, valid, ones, baseline=baseline)
    if update["name"] == "grpo":
        weights = weights / responses.response_mask.sum(1).numpy()
    truth = torch.zeros(policy.dimension, dtype=torch.float64)
    for user in range(responses.users):
        truth += gradient_of_user(policy, responses, weights, user)
    if update["name"] == "ppo":
        truth *= LOCAL_LEARNING_RATE
    assert relative_error(gate.sums[0].total, truth) < 1e-9
    policy.sampling = Sampling()
    whole = torch.zeros_like(truth)
    for user in range(responses.users):
        whole += gradient_of_user(policy, responses, weights, user)
    assert relative_error(whole, truth) > 0.05


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
    "update", [{"name": "pg"}, {"name": "grpo"}, {"name": "ppo"}], ids=lambda update: update["name"]
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
        dataclasses.replace(responses, left_out=None), scores, np.ones(responses.users, bool),
        np.ones(len(left_out)), baseline=baseline,
    )  # fmt: skip
    truth = torch.zeros(policy.dimension, dtype=torch.float64)
    for user in range(responses.users):
        truth += gradient_of_user(
            policy, responses, np.where(left_out, 0.0, weights / lengths), user
        )
    if update["name"] == "ppo":
        truth *= LOCAL_LEARNING_RATE
    assert relative_error(sums["without"], truth) < 1e-9
    assert relative_error(sums["with"], truth) > 0.1
