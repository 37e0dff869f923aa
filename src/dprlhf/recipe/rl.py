"""The recipe of a run of private updates."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from dprlhf.recipe.base import IN_MEMORY, PositiveFloat, PositiveInt, Settings
from dprlhf.recipe.data import Data
from dprlhf.recipe.evaluation import Evaluation
from dprlhf.recipe.policy import Policy, Source
from dprlhf.recipe.privacy import Previous, Privacy
from dprlhf.recipe.promise import check_shared
from dprlhf.recipe.sections import KL, Optimizer, Reward, Rollout, Tracking
from dprlhf.recipe.update_checks import check_update
from dprlhf.recipe.updates import PG, Update


class Recipe(Settings):
    """All settings of a run of private updates, ``dprlhf train``.

    Attributes:
        policy: The language model that is trained, and its adapter.
        data: The users' prompts, which are private.
        rewards: Reward functions or models; a response's reward is their weighted sum.
        reward_range: Bound R; the sum of the rewards is clipped to [−R, R].
        rollout: How responses are sampled.
        update: The algorithm that turns a round's users into a step of the policy.
        kl: Penalty for moving away from the base model.
        optimizer: Server-side optimizer, which steps along the released gradient.
        privacy: The guarantee (ε, δ), and how users are assigned to rounds.
        rounds: Number of rounds T.
        evaluation: Public prompts, on which the reward is measured before, during and after.
        tracking: Experiment trackers.
        previous: Earlier private runs on the same users, or whose models this run uses.
        seed: Seed of the adapter's initial weights and of the continuations of public prompts. The
            users' rounds, the noise and the responses to private prompts come from the run's own
            secret key, never from a seed.
        output_dir: Run folder, which must not exist; null makes one under ``runs/``.
    """

    stage: ClassVar[str] = "rl"
    classifier: ClassVar[bool] = False
    head_labels: ClassVar[list[str] | None] = None
    hub_task: ClassVar[str] = "text-generation"
    hub_tag: ClassVar[str] = "reinforcement-learning"
    public_losses: ClassVar[tuple[str, ...]] = ()

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

    @property
    def sources(self) -> list[Source]:
        """The models that the run starts from: the base model and the rewards."""
        return [
            self.policy.source("policy"),
            *(reward.source(f"rewards.{i}") for i, reward in enumerate(self.rewards)),
        ]

    @property
    def rows_may_lack_prompts(self) -> bool:
        """Whether an environment's ``reset`` gives the prompt to rows without a column of it."""
        agent = self.rollout.agent
        return agent is not None and agent.environment is not None

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the guarantee takes for granted of the code that the recipe names."""
        alike = (
            "a reward scores a completion alike in any batch, and keeps nothing of one user for"
            " another (tried on public prompts where these have the columns that it needs)"
        )
        if self.rollout.agent is None:
            return (alike,)
        apart = (
            "tools and environments keep nothing of one trajectory that another could see, and pass"
            " on no call (that trajectories keep apart was tried on public prompts)"
        )
        if self.rollout.agent.environment is None:
            return alike, apart
        fresh = (
            "each trajectory has an environment that no other has had (tried on as many as two"
            " average rounds take, up to 1,000)"
        )
        return alike, apart, fresh

    @property
    def purpose(self) -> str:
        """How the adapter was trained, for the model card."""
        names = ", ".join(reward.name for reward in self.rewards)
        return (
            f"tuned on private\nprompts by the update `{self.update.name}` with the rewards {names}"
        )

    def released(self, releases: int, noise_multiplier: float) -> list[str]:
        """List what the run publishes of its users, for the privacy card."""
        what = self.update.released.format(releases=releases)
        if self.update.subspace is not None:
            what += f", along {self.update.subspace.rank} directions from public gradients"
        lines = [f"the noised mean {what}, and what follows from it: the model"]
        where = "same release" if releases == 1 else "first of these releases"
        return [*lines, f"the noised mean reward and count of each round, in the {where}"]

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        check_shared(self)
        if self.rollout.backend == "vllm" and self.policy.quantization is not None:
            raise ValueError(
                "rollout.backend vllm would sample the base model as it is stored, not quantised:"
                " leave policy.quantization out, or take rollout.backend: transformers"
            )
        if self.rollout.backend == "vllm" and self.policy.model_name_or_path == IN_MEMORY:
            raise ValueError(
                "rollout.backend vllm loads a model by its name, and this one was given in Python:"
                " give its hub id or folder, or take rollout.backend: transformers"
            )
        check_update(self.update, self)
        return self
