"""The recipe of a run of private updates."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, model_validator

from dprlhf.recipe.base import PositiveFloat, PositiveInt, Settings
from dprlhf.recipe.sections import (
    KL,
    Data,
    Evaluation,
    Optimizer,
    Policy,
    Previous,
    Privacy,
    Reward,
    Rollout,
    Tracking,
    check_promise,
)
from dprlhf.recipe.updates import NPG, PG, REBEL, TrustRegion, Update


class Recipe(Settings):
    """All settings of a run.

    Attributes:
        policy: the model that is trained.
        data: the users' prompts.
        rewards: one or several; their weighted sum counts.
        reward_range: R; the sum is clipped to ±R.
        rollout: how responses are sampled.
        update: the algorithm.
        kl: the penalty for leaving the base model.
        optimizer: what steps along the released gradient.
        privacy: what is promised.
        rounds: T.
        evaluation: public prompts, for the reward before, during and after.
        tracking: experiment trackers.
        previous: earlier runs on the same users, or whose models this one uses.
        seed: of the adapter's start and the public continuations. Allocation, noise and the private
            responses come from the run's own secret key, never from a seed.
        output_dir: the run folder; None makes one under ``runs/``.
    """

    policy: Policy
    data: Data
    rewards: Annotated[list[Reward], Field(min_length=1)]
    reward_range: PositiveFloat = 3.0
    rollout: Rollout = Rollout()
    update: Update = PG()
    kl: KL = KL()
    optimizer: Optimizer = Optimizer()
    privacy: Privacy
    rounds: PositiveInt
    evaluation: Evaluation | None = None
    tracking: Tracking = Tracking()
    previous: list[Previous] = []
    seed: int = 0
    output_dir: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        check_promise(
            self.privacy,
            clip_norm=self.update.radius,
            optimizer=self.optimizer,
            data=self.data,
            public=self.evaluation.data if self.evaluation else None,
            fitted=self.policy.trained_on_private_users
            or any(r.trained_on_private_users for r in self.rewards),
        )
        regression = isinstance(self.update, NPG) or (
            isinstance(self.update, REBEL) and self.update.solver == "gauss-newton"
        )
        if regression and math.isinf(self.update.radius):
            raise ValueError(
                "update.clip_norm bounds the features of the regression: give a finite one, also"
                " with privacy.epsilon .inf"
            )
        if regression and self.optimizer.name == "adam-corrected":
            raise ValueError(
                "optimizer.name: adam-corrected needs the noise of a released gradient, and"
                f" update.name {self.update.name} steps along a regression's solution: write sgd"
            )
        self._check_trust_region()
        self._check_critic()
        if self.kl.level == "token" and self.update.name != "pg":
            raise ValueError(
                f"kl.level: token works with update.name pg; {self.update.name} takes one reward a"
                " response: write kl.level: sequence"
            )
        if self.update.name == "rebel" and self.rollout.responses % 2:
            raise ValueError(
                "rollout.responses must be even for update.name rebel, which pairs them, not"
                f" {self.rollout.responses}"
            )
        if self.policy.adapter.init == "public-activations" and self.evaluation is None:
            raise ValueError(
                "policy.adapter.init: public-activations needs public prompts (evaluation.data)"
            )
        return self

    def _check_critic(self) -> None:
        critic = getattr(self.update, "critic", None)
        if critic is None:
            return
        if getattr(self.update, "scale_rewards", False) or (
            getattr(self.update, "baseline", None) == "group"
        ):
            setting = "scale_rewards: false" if self.update.name == "grpo" else "baseline: loo"
            raise ValueError(
                "update.critic: V(x) is in the unit of rewards, and standardised advantages have"
                f" none: write {setting}"
            )
        if critic.features and self.evaluation is None:
            raise ValueError(
                "update.critic: features come from public prompts (evaluation.data): give some, or"
                " write features: 0"
            )
        if self.privacy.reward_share**2 + critic.share >= 1:
            raise ValueError(
                "update.critic.share and the square of privacy.reward_share leave nothing to the"
                " gradient: lower them"
            )

    def _check_trust_region(self) -> None:
        region = self.update.clip_norm
        if not isinstance(region, TrustRegion):
            return
        if self.update.name not in ("pg", "grpo", "ppo"):
            raise ValueError(
                "update.clip_norm: a trust region is for the one step of pg, grpo or ppo, not for"
                f" {self.update.name}: give a number"
            )
        if self.optimizer.name != "sgd" or self.optimizer.momentum:
            raise ValueError(
                "update.clip_norm: a trust region bounds a plain SGD step: write optimizer: {name:"
                " sgd, learning_rate: …} without momentum, or give a number"
            )
        if region.trust_region == "kl" and self.evaluation is None:
            raise ValueError(
                "update.clip_norm: trust_region kl needs public prompts (evaluation.data); l2 and"
                " l2-markov do not"
            )
