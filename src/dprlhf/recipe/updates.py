"""The private updates and what is inside them: ``update`` of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from dprlhf.recipe.base import PositiveFloat, PositiveInt, Settings


class TrustRegion(Settings):
    """A clip norm that keeps an SGD step in a region (see :mod:`dprlhf.updates.trust_region`).

    Attributes:
        trust_region: ``l2``, ``l2-markov``, or ``kl``, which needs public prompts.
        alpha: α, the size of the region: ‖Δ‖²/2, or the KL divergence of responses.
        beta: β, the probability of leaving it.
    """

    trust_region: Literal["l2", "l2-markov", "kl"]
    alpha: PositiveFloat
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.1


def _clip_norm_kind(value: Any) -> str:
    return _REGION if isinstance(value, Mapping | TrustRegion) else _NUMBER


CLIP_NORM_KINDS = _NUMBER, _REGION = "number", "region"
"""How pydantic names the two kinds in the place of an error."""

ClipNorm = Annotated[
    Annotated[float, Field(gt=0), Tag(_NUMBER)] | Annotated[TrustRegion, Tag(_REGION)],
    Discriminator(_clip_norm_kind),
]


class _Update(Settings):
    """What all private updates share.

    Attributes:
        clip_norm: S, or the trust region that decides it once, before the first round; ``.inf``
            only in a non-private baseline.
        batch_size: responses differentiated at once; as for ``rollout.batch_size``.
    """

    clip_norm: ClipNorm = 1.0
    batch_size: PositiveInt = 64

    @model_validator(mode="before")
    @classmethod
    def _only_a_noised_critic(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "critic" in values:
            critic = values["critic"]
            name = critic.get("name", "noised") if isinstance(critic, Mapping) else critic
            offered = "critic" in cls.model_fields
            if offered and (critic is None or isinstance(critic, Critic)):
                return values
            if not offered or name != "noised":
                raise ValueError(
                    "there is no critic but critic: noised, with update.name pg, grpo or ppo: one"
                    " fitted without noise would carry a round's users into later releases"
                    " (docs/privacy.md, 'Rules that the code keeps'); or write baseline: loo, which"
                    " takes the user's own other responses"
                )
            if critic == "noised":
                return {**values, "critic": {}}
        return values

    @property
    def radius(self) -> float:
        """S; 1 until the trust region has decided it."""
        return 1.0 if isinstance(self.clip_norm, TrustRegion) else self.clip_norm

    @property
    def releases(self) -> int:
        """J, the noised sums that a round takes from its users."""
        return 1


class Critic(Settings):
    """A guess V(x) at a prompt's mean reward, learned from noised releases (see critic.py).

    Attributes:
        name: ``noised``; there is no other.
        share: of the round's budget 1/z². The gradient's noise-to-clip ratio grows by
            1/√(1 − share).
        features: p, numbers that V sees of a prompt, from public prompts; 0 makes V the released
            mean reward of earlier rounds. Noise in V grows with p.
        weight: of r − V(x) in an advantage; the rest is the baseline's.
        step_size: η, how much of V comes from the last round.
    """

    name: Literal["noised"] = "noised"
    share: Annotated[float, Field(gt=0, lt=1)] = 0.02
    features: Annotated[int, Field(ge=0)] = 4
    weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    step_size: Annotated[float, Field(gt=0, le=1)] = 0.3


class _Score(_Update):
    """What the updates share that weigh ∇ log π by a ratio where y ~ μ ≠ π_t.

    Attributes:
        max_importance_ratio: truncation of π_t/μ, of a response or (grpo) of a token.
    """

    max_importance_ratio: PositiveFloat = 2.0


Baseline = Literal["paired", "loo", "group"]
"""Advantages, all inside one user's own responses."""


class _Advantage(_Score):
    """What the policy gradients share, whose advantages a critic may serve.

    Attributes:
        critic: ``noised``, or a mapping with its settings; None has no critic.
    """

    critic: Critic | None = None


class PG(_Advantage):
    """DP-PG (He & Zhou, Algorithm 2): the policy gradient.

    Attributes:
        name: ``pg``.
        baseline: ``loo`` takes the mean of the user's other responses off a reward, ``paired`` the
            other half's response, ``group`` standardises within the user.
    """

    name: Literal["pg"] = "pg"
    baseline: Baseline = "loo"


class GRPO(_Advantage):
    """DP-GRPO: group-relative advantages and the clipped ratio surrogate.

    Attributes:
        name: ``grpo``.
        clip_range: the surrogate's ratio is clipped to 1 ± this.
        scale_rewards: divide a group's advantages by its standard deviation.
    """

    name: Literal["grpo"]
    clip_range: PositiveFloat = 0.2
    scale_rewards: bool = True


class PPO(_Advantage):
    """DP-PPO (Rio et al., Algorithms 2 and 3): each user trains a copy, whose move is clipped.

    Attributes:
        name: ``ppo``.
        baseline: as for pg.
        epochs: E, passes over a user's own tokens.
        minibatches: parts that a user's tokens are split into; one local step on each.
        local_optimizer: ``adam`` starts from the released moments and is thrown away.
        local_learning_rate: the local step size.
        clip_range: clip the token ratio to 1 ± this; None leaves it (Rio et al., Remark 5.2).
    """

    name: Literal["ppo"]
    baseline: Baseline = "loo"
    epochs: PositiveInt = 1
    minibatches: PositiveInt = 1
    local_optimizer: Literal["sgd", "adam"] = "sgd"
    local_learning_rate: PositiveFloat = 0.1
    clip_range: Annotated[float, Field(gt=0, lt=1)] | None = None


class Oracle(Settings):
    """Private least squares, for NPG and REBEL; ``update.clip_norm`` bounds the features.

    Attributes:
        name: the algorithm, a file in ``regression/``.
        steps: J of ``projected-sgd`` and ``improper-batch-sgd``: noised releases in a round.
        step_size: of these two, in units of 1/``update.clip_norm``².
        radius: W, the bound on ‖w‖.
        target_bound: R; targets are clipped to ±R, and a gradient's bound is 2R times the clip
            norm. None takes the most that an advantage can be, 2 ``reward_range`` (3 with the
            baseline ``group``); less lowers the noise.
        sketch: dimensions of a public random projection of the features; None takes them as they
            are.
        ridge: regularisation of ``sufficient-statistics``, in units of its noise.
        gain: a user's answer is so many times larger before it is clipped to what the oracle
            allows, and the released mean so many times smaller: a mean over responses is far below
            the worst case that bounds it, and gets so much less noise.
    """

    name: Literal["projected-sgd", "improper-batch-sgd", "sufficient-statistics"] = "projected-sgd"
    steps: PositiveInt = 4
    step_size: PositiveFloat = 0.5
    radius: PositiveFloat = 1.0
    target_bound: PositiveFloat | None = None
    sketch: PositiveInt | None = None
    ridge: PositiveFloat = 1.0
    gain: PositiveFloat = 1.0

    @field_validator("name", mode="before")
    @classmethod
    def _gaussian(cls, name: Any) -> Any:
        why = {
            "exponential": "needs a finite set of candidates (W is infinite here) and is pure",
            "issp": "has to see all users together, works in few dimensions and is not Gaussian",
        }
        if name in why:
            raise ValueError(
                f"{name} {why[name]}, so a run cannot be charged for it: write projected-sgd, or"
                " call dprlhf.papers.regression.fit on arrays"
            )
        return name

    @property
    def releases(self) -> int:
        """J, the noised sums that one regression takes."""
        return 1 if self.name == "sufficient-statistics" else self.steps


class REBEL(_Update):
    """DP-REBEL (He & Zhou, Algorithm 5): regress relative log-ratios on relative rewards.

    ``rollout.responses`` must be even: the two halves are paired.

    Attributes:
        name: ``rebel``.
        oracle: of ``gauss-newton``.
        eta: η of the loss ((1/η)(Δ(y) − Δ(y′)) − Â)².
        solver: ``gradient`` takes ``steps`` noised steps on the true loss; ``gauss-newton`` solves
            the linearised loss through ``oracle``.
        steps: J of the gradient solver.
    """

    name: Literal["rebel"]
    eta: PositiveFloat = 1.0
    solver: Literal["gradient", "gauss-newton"] = "gradient"
    steps: PositiveInt = 2
    oracle: Oracle = Oracle()

    @property
    def releases(self) -> int:
        """J, the noised sums that a round takes from its users."""
        return self.steps if self.solver == "gradient" else self.oracle.releases


class NPG(_Score):
    """DP-NPG (He & Zhou, Algorithm 3): regress advantages on ∇ log π, and step along w.

    Attributes:
        name: ``npg``.
        baseline: as for pg.
        oracle: how the regression is solved.
    """

    name: Literal["npg"]
    baseline: Baseline = "loo"
    oracle: Oracle = Oracle()

    @property
    def releases(self) -> int:
        """J, the noised sums that a round takes from its users."""
        return self.oracle.releases


def _update_name(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value.get("name", "pg")
    return getattr(value, "name", None)


Update = Annotated[
    Annotated[PG, Tag("pg")]
    | Annotated[GRPO, Tag("grpo")]
    | Annotated[PPO, Tag("ppo")]
    | Annotated[REBEL, Tag("rebel")]
    | Annotated[NPG, Tag("npg")],
    Discriminator(_update_name),
]
