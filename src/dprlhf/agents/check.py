"""Checks on public prompts, before any charge, that trajectories cannot influence one another."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from dprlhf import recipe
from dprlhf.agents.agent import ENVIRONMENT, Agent, OwnRandomness
from dprlhf.agents.sampling import AgentSampler, to_one_line_error
from dprlhf.data.users import Prompts
from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rollout import Responses, sample

_PROMPTS = 4
_ROWS = 8  # of a micro-batch: few, because the check is of tools and not of shapes
_MOST_ENVIRONMENTS = 1000


def check_fresh(agent: Agent, trajectories: float) -> None:
    """Check that each factory of environments makes a new one at each call, before any is used."""
    # Twice as many as an average round has trajectories, at most 1,000 by each factory: a pool as
    # large as a round is found.
    count = min(math.ceil(2 * trajectories), _MOST_ENVIRONMENTS)
    with OwnRandomness(0)():
        for name in agent.factories:
            for _ in range(count):
                try:
                    agent.environment(name)
                except BaseException as problem:
                    raise to_one_line_error(problem) from None


def check_apart(
    policy: CausalLMPolicy, spec: recipe.Rollout, prompts: Prompts, max_prompt_tokens: int
) -> None:
    """Check that a trajectory is the same alone, in company, in another order, and again.

    A counter, a cache, or shared state would make one user's trajectories depend on another's.
    Passing is evidence, not a proof: what is shared may show on other prompts only.
    """
    some = _in_all_environments(policy, prompts.first(_PROMPTS))
    # Each keeps its place, whoever else there is, as a user does.
    own, first = np.arange(len(some)), np.zeros(len(some), dtype=np.int64)
    some = some.changed(users=own, slots=first, round_users=own)
    assert spec.batch_size != "auto"
    few = spec.model_copy(update={"batch_size": min(spec.batch_size, _ROWS)})

    def sampled(chosen: list[int]) -> dict[int, Any]:
        made = sample(
            policy,
            some.take(chosen),
            few,
            key=bytes(32),
            context=("tools apart",),
            max_prompt_tokens=max_prompt_tokens,
        )
        return {number: _of_prompt(made, place) for place, number in enumerate(chosen)}

    everyone = list(range(len(some)))
    together = sampled(everyone)
    situations = {"with the prompts in another order": [everyone[::-1]]}
    situations["alone"] = [[number] for number in everyone]
    situations["when sampled again"] = [everyone]
    for situation, calls in situations.items():
        for chosen in calls:
            for number, rows_of_sample in sampled(chosen).items():
                if rows_of_sample != together[number]:
                    raise DprlhfError(
                        f"rollout.agent: the trajectories of public prompt {number} come out"
                        f" otherwise {situation}: a tool or the environment keeps something from"
                        " call to call, so one user would change another's responses. Make it a"
                        " function of its arguments, or keep its state in the environment"
                    )


def _in_all_environments(policy: CausalLMPolicy, prompts: Prompts) -> Prompts:
    """Return prompts of which each environment has some, where no column chooses among several."""
    sampler = policy.sampler
    if not isinstance(sampler, AgentSampler) or not sampler.agent.several:
        return prompts
    if ENVIRONMENT in prompts.columns:
        return prompts
    count = max(len(prompts), len(sampler.agent.factories))
    names = itertools.islice(itertools.cycle(sampler.agent.factories), count)
    some, owners = prompts.take(np.arange(count) % len(prompts)), np.arange(count)
    columns = {**some.columns, ENVIRONMENT: list(names)}
    return some.changed(users=owners, slots=np.zeros_like(owners), columns=columns)


def _of_prompt(made: Responses, place: int) -> list[Any]:
    some = made.take(np.flatnonzero(made.prompt == place))
    tokens = [row[real.bool()].tolist() for row, real in zip(some.tokens, some.mask, strict=True)]
    return [tokens, some.policy_mask.tolist(), repr(some.completions)]
