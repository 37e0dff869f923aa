"""The private updates' settings: the section ``update`` of a recipe.

A settings class also states what the rest of the project has to know about its update: how many
noised sums a round releases, what they are, and which other settings it works with. To add an
update, write a subclass of :class:`PrivateUpdate` here and add it to ``UPDATE_SETTINGS``; a package
of its own offers one as an entry point (:mod:`dprlhf.recipe.plugins`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from dprlhf.recipe.base import PositiveFloat, PositiveInt, changed
from dprlhf.recipe.private_update import Oracle, PrivateUpdate


class _Score(PrivateUpdate):
    """Updates that weight ∇ log π by the importance ratio π_t/μ where responses come from μ ≠ π_t.

    The ratio of a response (grpo: of a token) is truncated at 2.
    """

    leaves_rows_out: ClassVar[bool] = True
    reads_logprobs: ClassVar[bool] = False


Baseline = Literal["paired", "loo", "group"]
"""How advantages are computed; each uses one user's own responses only."""


class _Advantage(_Score):
    """Policy gradients along one clipped sum, which take rewards by turn."""

    turn_rewards: ClassVar[bool] = True


class PG(_Advantage):
    """DP-PG (He & Zhou 2025, Algorithm 2): the policy gradient, REINFORCE with a baseline.

    Attributes:
        name: ``pg``.
        baseline: ``loo`` subtracts the mean reward of the user's other responses (RLOO),
            ``paired`` the reward of the paired response of the other half, and ``group``
            standardises the rewards within the user.
    """

    released: ClassVar[str] = "gradient of each round"
    name: Literal["pg"] = "pg"
    baseline: Baseline = "loo"


class GRPO(_Advantage):
    """DP-GRPO: group-relative advantages with the clipped surrogate of PPO, token by token.

    Attributes:
        name: ``grpo``.
        clip_range: Half-width c of the interval [1 − c, 1 + c] to which the surrogate clips the
            ratio π_θ/π_t.
        scale_rewards: Whether advantages are divided by the standard deviation of the user's
            rewards.
    """

    released: ClassVar[str] = "gradient of the surrogate in each round"
    name: Literal["grpo"] = "grpo"
    clip_range: PositiveFloat = 0.2
    scale_rewards: bool = True


class PPO(_Advantage):
    """DP-PPO (Rio et al., Algorithms 2 and 3): each user trains a copy; its change is clipped.

    Attributes:
        name: ``ppo``.
        baseline: How advantages are computed: ``loo``, ``paired`` or ``group``, as with ``pg``.
        epochs: Passes E over a user's own tokens, with one local step each.
        clip_range: Half-width c of the interval [1 − c, 1 + c] to which the surrogate clips a
            token's ratio; null leaves the ratio as it is (Rio et al., Remark 5.2).
    """

    released: ClassVar[str] = "move of the users' copies of the policy in each round"
    name: Literal["ppo"] = "ppo"
    baseline: Baseline = "loo"
    epochs: PositiveInt = 1
    clip_range: Annotated[float, Field(gt=0, lt=1)] | None = None

    @property
    def passes(self) -> int:
        """Backward passes over a user's tokens for one release, to estimate a run's duration."""
        return self.epochs

    @property
    def moves_within_round(self) -> bool:
        """Whether log-probabilities are taken at parameters other than those that sampled."""
        return self.epochs > 1


class REBEL(PrivateUpdate):
    """DP-REBEL (He & Zhou 2025, Algorithm 5): regress relative log-ratios on relative rewards.

    ``rollout.responses`` must be even: the two halves are paired.

    Attributes:
        name: ``rebel``.
        steps: Number J of noised gradient steps on the loss, each a release of the round.
        oracle: Solves the linearised loss by regression in the place of these steps (Gauss-Newton);
            null takes the steps.
    """

    name: Literal["rebel"] = "rebel"
    steps: PositiveInt = 2
    oracle: Oracle | None = None

    @model_validator(mode="after")
    def _steps_or_oracle(self) -> Self:
        if self.oracle is not None and changed(self, "steps"):
            raise ValueError("steps: an oracle takes its own: write oracle.steps")
        return self

    @property
    def releases(self) -> int:
        """Number J of noised sums that a round releases: the gate charges J and refuses more."""
        return self.steps if self.oracle is None else super().releases

    @property
    def released(self) -> str:
        """The phrase that completes "the noised mean …" on the privacy card."""
        if self.oracle is None:
            return "gradient of the loss at each step, {releases} in each round"
        return super().released

    def check(self, recipe: Any) -> None:
        """Refuse a recipe whose other sections do not work with this update."""
        if recipe.rollout.responses % 2:
            raise ValueError(
                "rollout.responses must be even for update.name rebel, which pairs them, not"
                f" {recipe.rollout.responses}"
            )


class NPG(_Score):
    """DP-NPG (He & Zhou 2025, Algorithm 3): regress advantages on ∇ log π, and step along w.

    Attributes:
        name: ``npg``.
        baseline: How advantages are computed: ``loo``, ``paired`` or ``group``, as with ``pg``.
        oracle: How the regression is solved.
    """

    name: Literal["npg"] = "npg"
    baseline: Baseline = "loo"
    oracle: Oracle = Oracle()


UPDATE_SETTINGS: dict[str, type[PrivateUpdate]] = {
    "pg": PG,
    "grpo": GRPO,
    "ppo": PPO,
    "rebel": REBEL,
    "npg": NPG,
}
"""The settings class of each update of this package, by its name in a recipe."""


def _of_its_class(value: Any) -> Any:
    """Validate the section ``update`` by the settings class that its name stands for."""
    if not isinstance(value, Mapping):
        return value
    name = value.get("name", "pg")
    if isinstance(name, str) and name in UPDATE_SETTINGS:
        return UPDATE_SETTINGS[name].model_validate(value)
    from dprlhf.recipe.plugins import plugin_names, update_plugin

    if name not in (offered := plugin_names()):
        names = ", ".join(repr(known) for known in (*UPDATE_SETTINGS, *offered))
        expected = {"expected": names}
        wrong = PydanticCustomError("update_name", "Input should be {expected}", expected)
        raise ValidationError.from_exception_data(
            "update", [{"type": wrong, "loc": ("name",), "input": name}]
        )
    return update_plugin(name).settings.model_validate(value)


Update = Annotated[SerializeAsAny[PrivateUpdate], BeforeValidator(_of_its_class)]
"""The section ``update``: the settings of one of ``UPDATE_SETTINGS`` or of a plug-in."""
