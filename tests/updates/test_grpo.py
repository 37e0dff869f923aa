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
from helpers.batches import Shape, batch_of, half_from_base
from helpers.policies import policy_of
from helpers.rounds import flat_gradient, random_scores, round_of, token_logprobs


def spec_of(**changes: object) -> recipe.GRPO:
    return recipe.GRPO.model_validate({"name": "grpo", **changes})


SHAPE = Shape([[5, 1], [2], [7], [4, 6]], k=4, length=5)


def surrogate(policy, responses, values, user, clip_range, scale):
    """A user's objective as it stands in the paper, and the ratios of its tokens from μ."""
    of_rows, ratios = [], []
    for row in np.flatnonzero(responses.user == user):
        group = values[responses.prompt == responses.prompt[row]]
        advantage = values[row] - group.mean()
        if scale:
            advantage /= group.std(ddof=1) + 1e-4
        logprobs = token_logprobs(policy, responses, row)
        old = logprobs.detach()
        if responses.from_base[row]:
            with policy.base(), torch.no_grad():
                old = token_logprobs(policy, responses, row)
            ratios += (logprobs.detach() - old).exp().tolist()
        ratio = (logprobs - old).exp()
        clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
        of_rows.append(torch.minimum(ratio * advantage, clipped * advantage).mean())
    return torch.stack(of_rows).mean(), ratios


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("arms", [False, True], ids=["on-policy", "reference"])
def test_the_sum_is_the_gradient_of_the_surrogate(arms, scale, monkeypatch):
    monkeypatch.setattr("dprlhf.updates.grpo.LARGEST_RATIO", 1e9)
    policy = policy_of("gpt2", "lora")
    responses = batch_of(SHAPE, 5)
    if arms:
        responses = half_from_base(responses)
    scores = random_scores(responses, 5)
    spec = spec_of(scale_rewards=scale, clip_range=0.15, batch_size=8)
    round_, gate = round_of(policy, responses, scores, clip_norm=math.inf)
    grpo(round_, spec)
    total, ratios = torch.zeros(()), []
    for user in range(responses.users):
        of_user, its_ratios = surrogate(policy, responses, scores.values, user, 0.15, scale)
        total = total + of_user
        ratios += its_ratios
    assert relative_error(gate.sums[0].total, flat_gradient(policy, total)) < 1e-9
    if arms:  # both clips bind, and not everywhere
        inside = np.abs(np.array(ratios) - 1) < 0.15
        assert min(ratios) < 0.85 < 1.15 < max(ratios)
        assert inside.any()
    assert UPDATES["grpo"] is grpo


@pytest.mark.parametrize(("scale", "baseline"), [(True, "group"), (False, "centred")])
def test_on_policy_it_is_the_policy_gradient_over_lengths(scale: bool, baseline: str) -> None:
    policy = policy_of("gpt2", "lora")
    responses = batch_of(SHAPE, 6)
    scores = random_scores(responses, 6)
    round_, gate = round_of(policy, responses, scores, clip_norm=0.5)
    grpo(round_, spec_of(scale_rewards=scale))
    everyone = np.ones(4, dtype=bool)
    weights = advantage_weights(
        responses, scores, everyone, np.ones(len(scores.values)), baseline=baseline
    )
    lengths = responses.response_mask.sum(1).numpy()
    assert len(set(lengths)) > 2
    other, _ = round_of(policy, responses, scores, clip_norm=0.5)
    expected = other.clipped_sum(Private(weights / lengths), batch_size=64)
    assert relative_error(gate.sums[0].total, expected.bounded.total) < 1e-12
    undivided = other.clipped_sum(Private(weights), batch_size=64)
    assert relative_error(gate.sums[0].total, undivided.bounded.total) > 0.1
    assert gate.sums[0].clip_norm == 0.5
