"""Rewards: any callable with TRL's signature, checked on public prompts and clipped to ±R."""

from dprlhf.rewards.check import ContractReport, RewardSummary, check_reward, summarize_rewards
from dprlhf.rewards.loading import load_reward, load_rewards
from dprlhf.rewards.reward import LoadedReward
from dprlhf.rewards.scoring import Scorer, Scores

__all__ = [
    "ContractReport",
    "LoadedReward",
    "RewardSummary",
    "Scorer",
    "Scores",
    "check_reward",
    "load_reward",
    "load_rewards",
    "summarize_rewards",
]
