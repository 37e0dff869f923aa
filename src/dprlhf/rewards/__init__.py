"""Rewards: any callable with TRL's signature, checked on public prompts and bounded by ±R."""

from dprlhf.rewards.contract import ContractReport, check_reward
from dprlhf.rewards.loading import Reward, load_reward
from dprlhf.rewards.scoring import Scorer, Scores

__all__ = [
    "ContractReport",
    "Reward",
    "Scorer",
    "Scores",
    "check_reward",
    "load_reward",
]
