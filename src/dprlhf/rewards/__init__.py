"""Rewards: any callable with TRL's signature, checked on public prompts and bounded by ±R."""

from dprlhf.rewards.check import ContractReport, check_reward
from dprlhf.rewards.loading import Reward, load_reward
from dprlhf.rewards.scoring import Scorer, Scores
from dprlhf.rewards.summary import Spread, spread_of

__all__ = [
    "ContractReport",
    "Reward",
    "Scorer",
    "Scores",
    "Spread",
    "check_reward",
    "load_reward",
    "spread_of",
]
