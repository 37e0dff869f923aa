"""Agents: responses of several turns, with tools that the policy calls, as in TRL's GRPOTrainer.

A user of the guarantee is **all of its trajectories**: every turn of every response to every prompt
that is its own. Tools run outside the model, so nothing here can prove that one user's calls do not
change what another user's calls answer; a shared counter, cache, database or web service can.
:mod:`dprlhf.agents.check` tries it on public prompts, and refuses what it finds.
"""

from dprlhf.agents.agent import Agent
from dprlhf.agents.check import check_apart, check_fresh
from dprlhf.agents.sampling import AgentSampler, load_sampler

__all__ = [
    "Agent",
    "AgentSampler",
    "check_apart",
    "check_fresh",
    "load_sampler",
]
