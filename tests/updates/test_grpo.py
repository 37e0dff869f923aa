"""DP-GRPO: against autograd on the surrogate, against DP-PG, and one user at a time."""

import math

import numpy as np
import pytest
import torch

from dprlhf import recipe
from dprlhf.boundary import Private
from dprlhf.updates import UPDATES
from dprlhf.updates.grpo import grpo
from dprlhf.updates.pg import advantage_weights
from helpers.autograd import relative_error
from helpers.batches import Shape, batch_of
from helpers.policies import policy_of
from helpers.rounds import flat_gradient, random_scores, round_of, token_logprobs


def spec_of(**changes: object) -> recipe.GRPO:
    return recipe.GRPO.model_validate({"name": "grpo", **changes})


SHAPE = Shape([[5, 1], [2], [7], [4, 6]], k=4, length=5)


def objective(policy, responses, values, user, scale):
    """A user's objective as it stands in the paper, at a ratio of 1."""
    of_rows = []
    for row in np.flatnonzero(responses.user == user):
        group = values[responses.prompt == responses.prompt[row]]
        advantage = values[row] - group.mean()
        if scale:
            advantage /= group.std(ddof=1) + 1e-4
        logprobs = token_logprobs(policy, responses, row)
        of_rows.append(((logprobs - logprobs.detach()).exp() * advantage).mean())
    return torch.stack(of_rows).mean()


@pytest.mark.parametrize("scale", [True, False])
def test_the_sum_is_the_gradient_of_the_objective(scale: bool) -> None:
    policy, responses = policy_of("gpt2", "lora"), batch_of(SHAPE, 5)
    scores = random_scores(responses, 5)
    round_, gate = round_of(policy, responses, scores, clip_norm=math.inf)
    grpo(round_, spec_of(scale_rewards=scale, batch_size=8))
    of_users = [objective(policy, responses, scores.values, u, scale) for u in range(4)]
    assert relative_error(gate.sums[0].total, flat_gradient(policy, sum(of_users))) < 1e-9
    assert UPDATES["grpo"] is grpo


@pytest.mark.parametrize(("scale", "baseline"), [(True, "group"), (False, "centred")])
def test_on_policy_it_is_the_policy_gradient_over_lengths(scale: bool, baseline: str) -> None:
    policy = policy_of("gpt2", "lora")
    responses = batch_of(SHAPE, 6)
    scores = random_scores(responses, 6)
    round_, gate = round_of(policy, responses, scores, clip_norm=0.5)
    grpo(round_, spec_of(scale_rewards=scale))
    everyone = np.ones(4, dtype=bool)
    weights = advantage_weights(responses, scores, everyone, baseline=baseline)
    lengths = responses.response_mask.sum(1).numpy()
    assert len(set(lengths)) > 2
    other, _ = round_of(policy, responses, scores, clip_norm=0.5)
    expected = other.clipped_sum(Private(weights / lengths), batch_size=64)
    assert relative_error(gate.sums[0].total, expected.bounded.total) < 1e-12
    undivided = other.clipped_sum(Private(weights), batch_size=64)
    assert relative_error(gate.sums[0].total, undivided.bounded.total) > 0.1
    assert gate.sums[0].clip_norm == 0.5
