"""Later turns are sampled from the distribution whose log-probabilities the update takes."""

import numpy as np
import torch

from dprlhf import recipe
from dprlhf.agents import Agent, AgentSampler
from dprlhf.data.users import Prompts
from dprlhf.policies.protocol import Sampling
from dprlhf.rollout import sample
from dprlhf.rollout.logprobs import token_logprobs
from helpers.agents import add, asked, fail, policy_of


def test_each_token_of_each_turn_is_the_one_that_is_kept() -> None:
    """With top-k 1, log π̃ is 0 exactly where sampling and update see the same tokens before."""
    policy = policy_of()
    AgentSampler(Agent((add, fail), None, None)).attach(policy)
    texts = ["2 and 1?", "two and two, please?", "0 1", "what?"]
    prompts = Prompts([asked(t) for t in texts], np.arange(4), np.zeros(4, dtype=np.int64), {})
    spec = recipe.Rollout(responses=2, max_new_tokens=64, batch_size=8)
    with policy.sampled_with(Sampling(top_k=1)):
        responses = sample(
            policy, prompts, spec, key=bytes(32), context=("turns",), max_prompt_tokens=40
        )
        found = token_logprobs(policy, responses, 8)
    own = responses.policy_mask.numpy().astype(bool)
    later = own & (np.cumsum(~own & responses.response_mask.numpy().astype(bool), 1) > 0)
    assert later.sum() > 5  # tokens behind a tool's answer
    assert (found == 0).all()
    with torch.no_grad():  # the negative control: another policy
        for parameter in policy.parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    with policy.sampled_with(Sampling(top_k=1)):
        assert (token_logprobs(policy, responses, 8)[later] < -0.01).any()
