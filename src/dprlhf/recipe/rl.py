"""The recipe of a run of private updates, and what its update refuses of other sections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from dprlhf.recipe.base import IN_MEMORY, PositiveFloat, PositiveInt, Settings
from dprlhf.recipe.data import Data
from dprlhf.recipe.policy import Policy, Source
from dprlhf.recipe.privacy import Previous, Privacy, check_shared
from dprlhf.recipe.private_update import PrivateUpdate
from dprlhf.recipe.sections import KL, Evaluation, Optimizer, Reward, Rollout, Tracking
from dprlhf.recipe.updates import PG, UPDATE_SETTINGS, Update


def check_update(update: PrivateUpdate, recipe: Recipe) -> None:
    """Refuse a recipe whose other sections do not work with its update."""
    if update.least_squares is not None and update.clip_norm == float("inf"):
        raise ValueError(
            "update.clip_norm bounds the features of the regression: give a finite one, also"
            " with privacy.epsilon .inf"
        )
    if update.subspace is not None and update.least_squares is not None:
        raise ValueError(
            f"update.subspace: update.name {update.name} releases the answers of a regression,"
            " not gradients: leave subspace out, or take pg, grpo or ppo"
        )
    if recipe.rollout.mask_truncated and not update.leaves_rows_out:
        raise ValueError(
            "rollout.mask_truncated works with update.name"
            f" {updates_that(lambda kind: kind.leaves_rows_out)}; {update.name} takes a user's"
            " responses together: leave it out"
        )
    if recipe.rollout.truncates and update.moves_within_round:
        key = recipe.rollout.truncates[0]
        instead = {
            "ppo": "write update.epochs: 1",
            "rebel": "write update.steps: 1 or give update.oracle",
        }
        raise ValueError(
            f"{key}: update.name {update.name} takes several steps on a round's responses, after"
            " which the policy keeps other tokens than those it sampled from:"
            f" {instead.get(update.name, 'take pg, grpo or npg')}, or leave {key} out"
        )
    update.check(recipe)


def updates_that(fits: Callable[[type[PrivateUpdate]], bool]) -> str:
    """Return the names of the updates that have some property: ``pg, grpo or ppo``."""
    *first, last = [name for name, kind in UPDATE_SETTINGS.items() if fits(kind)]
    return f"{', '.join(first)} or {last}" if first else last


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
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
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
