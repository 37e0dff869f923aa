"""What tools answered is context and nothing else: against autograd, in float64."""

import dataclasses

import numpy as np
import pytest
import torch

from dprlhf import recipe
from dprlhf.gradients.micro_batches import user_gradients
from dprlhf.rollout import Responses
from dprlhf.rollout.logprobs import token_logprobs
from dprlhf.updates import UPDATES
from helpers import tiny
from helpers.autograd import relative_error
from helpers.batches import Shape, with_tools
from helpers.policies import policy_of
from helpers.rounds import flat_gradient, random_scores, round_of
from helpers.rounds import token_logprobs as true_logprobs

SHAPE = Shape([[5, 1], [2], [7], [4, 6]], k=4, length=8)


def true_gradient(policy, responses, weights, user):
    """Σ weight · ∇ log π over the policy's own tokens, one unpadded row after the other."""
    total = torch.zeros(policy.dimension, dtype=torch.float64)
    for row in np.flatnonzero(responses.user == user):
        own = responses.policy_mask[row][responses.response_mask[row].bool()]
        score = (true_logprobs(policy, responses, row) * own).sum()
        total += float(weights[row]) * flat_gradient(policy, score)
    return total


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("batch_size", [4, 16])
def test_the_gradient_is_that_of_the_policys_own_tokens(kind: tiny.Kind, batch_size: int) -> None:
    policy, responses = policy_of(kind), with_tools(SHAPE, 3)
    weights = np.random.default_rng(1).normal(size=len(responses.user))
    found = {}
    for users, _, gradients, _ in user_gradients(
        policy, responses, weights, batch_size=batch_size, rows=None
    ):
        found |= dict(zip(users.tolist(), gradients[:, 0], strict=True))
    plain = dataclasses.replace(responses, tool_mask=None)
    for user in range(responses.users):
        truth = true_gradient(policy, responses, weights, user)
        assert relative_error(found[user].double(), truth) < 1e-12
        assert relative_error(true_gradient(policy, plain, weights, user), truth) > 0.05


def test_tool_tokens_have_no_log_probability_and_condition_what_follows() -> None:
    policy, responses = policy_of("gpt2"), with_tools(SHAPE, 4)
    found = token_logprobs(policy, responses, 16)
    own = responses.policy_mask.numpy().astype(bool)
    assert (found[~own] == 0.0).all()
    assert (found[own] < 0.0).all()
    row = next(r for r in range(len(own)) if (~own[r, 1:-1] & own[r, 2:]).any())
    place = int(np.flatnonzero(~own[row, :-1] & own[row, 1:])[0])
    tokens = responses.tokens.clone()
    column = tokens.shape[1] - responses.max_new_tokens + place
    tokens[row, column] = tokens[row, column] % 256 + 1
    other = token_logprobs(policy, dataclasses.replace(responses, tokens=tokens), 16)
    assert (other[row, : place + 1] == found[row, : place + 1]).all()
    assert (
        other[row, place + 1 :][own[row, place + 1 :]]
        != found[row, place + 1 :][own[row, place + 1 :]]
    ).all()
    assert (np.delete(other, row, 0) == np.delete(found, row, 0)).all()


@pytest.mark.parametrize("name", ["pg", "grpo", "ppo", "rebel", "npg"])
def test_what_a_tool_said_last_changes_no_update(name: str) -> None:
    """The last token of a response conditions nothing: where a tool wrote it, any other will do."""
    policy = policy_of("gpt2")
    responses = with_tools(SHAPE, 5)
    lengths = responses.response_mask.sum(1)
    rows = torch.arange(len(lengths))
    own = responses.tool_mask
    own[rows, lengths - 1] = torch.where(lengths > 1, 0, 1)
    tokens = responses.tokens.clone()
    last = tokens.shape[1] - responses.max_new_tokens + lengths - 1
    tokens[rows, last] = torch.where(lengths > 1, 7, tokens[rows, last])
    scores = random_scores(responses, 5)
    assert bool((tokens != responses.tokens).any())

    def released(given: Responses) -> list[torch.Tensor]:
        settings = recipe.UPDATE_SETTINGS[name].model_validate({"name": name, "batch_size": 16})
        made, gate = round_of(policy, given, scores, clip_norm=2.0)
        UPDATES[name](made, settings)
        return [bounded.total for bounded in gate.sums]

    for one, other in zip(
        released(responses), released(dataclasses.replace(responses, tokens=tokens)), strict=True
    ):
        assert torch.equal(one, other)
    bare = released(dataclasses.replace(responses, tool_mask=None))
    assert not torch.equal(released(responses)[0], bare[0])
