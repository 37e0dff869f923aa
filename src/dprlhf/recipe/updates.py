"""The private updates' settings: the section ``update`` of a recipe.

A settings class also states what the rest of the project has to know about its update: how many
noised sums a round releases, what they are, and which other settings it works with. To add an
update, write a subclass of :class:`PrivateUpdate` here and add it to ``UPDATE_SETTINGS``; a package
of its own offers one as an entry point (:class:`UpdatePlugin`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    SerializeAsAny,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from dprlhf.recipe.base import Experimental, PositiveFloat, PositiveInt, Settings
from dprlhf.recipe.plugins import load_plugin, plugin_names
from dprlhf.recipe.quantile import QuantileClip
from dprlhf.recipe.sections import KL, Evaluation, Optimizer, Privacy, Rollout
from dprlhf.recipe.subspace import Subspace

ENTRY_POINT_GROUP = "dprlhf.updates"
"""The entry-point group of updates in other packages; each names an :class:`UpdatePlugin`."""


class Sections(Protocol):
    """The sections of a :class:`~dprlhf.recipe.Recipe` that an update's checks look at."""

    @property
    def rollout(self) -> Rollout:
        """How responses are sampled."""
        ...

    @property
    def kl(self) -> KL:
        """The KL penalty."""
        ...

    @property
    def optimizer(self) -> Optimizer:
        """The server-side optimizer."""
        ...

    @property
    def privacy(self) -> Privacy:
        """The privacy guarantee."""
        ...

    @property
    def evaluation(self) -> Evaluation | None:
        """The public prompts; None without evaluation."""
        ...

    @property
    def rounds(self) -> int:
        """The number of rounds T."""
        ...


class TrustRegion(Settings):
    """A clip norm that keeps an SGD step in a region (see :mod:`dprlhf.updates.trust_region`).

    Attributes:
        trust_region: ``l2`` or ``l2-markov`` bounds the parameters' change; ``kl`` bounds the KL
            divergence of responses and needs public prompts.
        alpha: Size α of the region: ‖Δ‖²/2, or the KL divergence in nats.
        beta: Probability β of a step that leaves the region.
    """

    trust_region: Literal["l2", "l2-markov", "kl"]
    alpha: PositiveFloat
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.1


def _clip_norm_kind(value: Any) -> str:
    if isinstance(value, QuantileClip) or (isinstance(value, Mapping) and "quantile" in value):
        return _QUANTILE
    return _REGION if isinstance(value, Mapping | TrustRegion) else _NUMBER


CLIP_NORM_KINDS = _NUMBER, _REGION, _QUANTILE = "number", "region", "quantile-clip"
"""How pydantic names the three kinds in an error's location."""

ClipNorm = Annotated[
    Annotated[float, Field(gt=0), Tag(_NUMBER)]
    | Annotated[TrustRegion, Tag(_REGION)]
    | Annotated[QuantileClip, Tag(_QUANTILE)],
    Discriminator(_clip_norm_kind),
]


class PrivateUpdate(Settings):
    """Settings and facts that every private update has; base class of all updates, plug-ins too.

    Attributes:
        name: Name of the update in a recipe.
        clip_norm: Clip norm S, the L2 bound on one user's vector; or a trust region that
            determines S once, before the first round; or a quantile of the users' norms that it
            follows from round to round. ``.inf`` only in a non-private baseline.
        batch_size: Responses in one micro-batch of the backward pass. Larger is faster until memory
            runs out; it does not change the result beyond rounding.
        subspace: Directions from public gradients, along which users' vectors are released; null
            releases all coordinates.
    """

    allows_trust_region: ClassVar[bool] = False
    """Whether the round is one step along one clipped sum, which a trust region can bound."""

    token_rewards: ClassVar[bool] = False
    """Whether the update takes one reward for each token, as ``kl.level: token`` gives."""

    name: str
    clip_norm: ClipNorm = 1.0
    batch_size: PositiveInt = 64
    subspace: Subspace | None = None

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
                    "there is no critic but critic: noised, with update.name"
                    f" {_names(lambda kind: 'critic' in kind.model_fields)}: one fitted without"
                    " noise would carry a round's users into later releases (docs/privacy.md,"
                    " 'Rules that the code keeps'); or write baseline: loo, which takes the user's"
                    " own other responses"
                )
            if critic == "noised":
                return {**values, "critic": {}}
        return values

    @property
    def radius(self) -> float:
        """Clip norm S; 1 as long as a trust region has not determined it."""
        if isinstance(self.clip_norm, QuantileClip):
            return self.clip_norm.initial
        return 1.0 if isinstance(self.clip_norm, TrustRegion) else self.clip_norm

    @property
    def releases(self) -> int:
        """Number J of noised sums that a round releases: the gate charges J and refuses more."""
        return 1

    @property
    def passes(self) -> int:
        """Backward passes over a user's tokens for one release, to estimate a run's duration."""
        return 1

    @property
    def released(self) -> str:
        """What a round's releases are the noised mean of, for the privacy card.

        ``{releases}`` in it stands for the number of releases.
        """
        return (
            f"vector that the update {self.name} takes from each user, {{releases}} in each round"
        )

    @property
    def noised_critic(self) -> Critic | None:
        """Settings of the critic that serves the advantages; None without one."""
        return None

    @property
    def least_squares(self) -> Oracle | None:
        """Settings of the regression oracle that solves the round; None if there is no regression.

        With one, ``clip_norm`` bounds the regression's features.
        """
        return None

    def check(self, recipe: Sections) -> None:
        """Refuse a recipe whose other sections do not work with this update.

        Raises:
            ValueError: Names the setting and what would work.
        """
        if isinstance(self.clip_norm, TrustRegion):
            self._check_trust_region(self.clip_norm, recipe)
        if isinstance(self.clip_norm, QuantileClip):
            self._check_quantile(self.clip_norm, recipe)
        if self.least_squares is not None:
            self._check_least_squares(recipe)
        if self.noised_critic is not None:
            self.noised_critic.check(recipe)
        if self.subspace is not None:
            self._check_subspace(self.subspace, recipe)
        if recipe.kl.level == "token" and not self.token_rewards:
            raise ValueError(
                "kl.level: token works with update.name"
                f" {_names(lambda kind: kind.token_rewards)}; {self.name} takes one reward a"
                " response: write kl.level: sequence"
            )

    def _check_trust_region(self, region: TrustRegion, recipe: Sections) -> None:
        if not self.allows_trust_region:
            raise ValueError(
                "update.clip_norm: a trust region is for the one step of"
                f" {_names(lambda kind: kind.allows_trust_region)}, not for {self.name}: give a"
                " number"
            )
        if recipe.optimizer.name != "sgd" or recipe.optimizer.momentum:
            raise ValueError(
                "update.clip_norm: a trust region bounds a plain SGD step: write optimizer: {name:"
                " sgd, learning_rate: …} without momentum, or give a number"
            )
        if region.trust_region == "kl" and recipe.evaluation is None:
            raise ValueError(
                "update.clip_norm: trust_region kl needs public prompts (evaluation.data); l2 and"
                " l2-markov do not"
            )

    def _check_quantile(self, clip: QuantileClip, recipe: Sections) -> None:
        if not self.allows_trust_region:
            raise ValueError(
                "update.clip_norm: a quantile is of the vectors that"
                f" {_names(lambda kind: kind.allows_trust_region)} release once in a round;"
                f" {self.name} bounds the features of a regression: give a number"
            )
        if recipe.privacy.bands > 1:
            raise ValueError(
                "update.clip_norm: with privacy.bands above 1, later rounds take back noise of"
                " earlier ones, which a clip norm that changes leaves in: give a number"
            )
        critic = self.noised_critic.share if self.noised_critic is not None else 0.0
        if recipe.privacy.reward_share**2 + critic + clip.share >= 1:
            raise ValueError(
                "update.clip_norm.share, update.critic.share and the square of"
                " privacy.reward_share leave nothing to the gradient: lower them"
            )

    def _check_subspace(self, subspace: Subspace, recipe: Sections) -> None:
        if subspace.source == "public" and subspace.data is None and recipe.evaluation is None:
            raise ValueError(
                "update.subspace needs public prompts: give update.subspace.data, or evaluation"
                " with more rows than evaluation.prompts; or write source: model"
            )
        if isinstance(self.clip_norm, TrustRegion):
            raise ValueError(
                "update.clip_norm: a trust region bounds gradients, and update.subspace scales"
                " their coordinates: give a number"
            )
        if self.least_squares is not None:
            raise ValueError(
                f"update.subspace: update.name {self.name} releases the answers of a regression,"
                " not gradients: leave subspace out, or take pg, grpo or ppo"
            )
        if recipe.optimizer.name == "adam-corrected":
            raise ValueError(
                "optimizer.name: adam-corrected takes the noise of every parameter to be the same,"
                " which it is not with update.subspace: write adam or sgd"
            )
        if recipe.privacy.bands > 1 and subspace.refresh < recipe.rounds:
            raise ValueError(
                "privacy.bands: noise of earlier rounds is taken back along the directions of"
                " earlier rounds: set update.subspace.refresh to the number of rounds, or bands 1"
            )

    def _check_least_squares(self, recipe: Sections) -> None:
        if self.radius == float("inf"):
            raise ValueError(
                "update.clip_norm bounds the features of the regression: give a finite one, also"
                " with privacy.epsilon .inf"
            )
        if recipe.optimizer.name == "adam-corrected":
            raise ValueError(
                "optimizer.name: adam-corrected needs the noise of a released gradient, and"
                f" update.name {self.name} steps along a regression's solution: write sgd"
            )

    def saturated(self, *, clip_norm: float, batch_size: int, target_bound: float) -> Self:
        """Return these settings with bounds that every canary user of an audit reaches.

        Args:
            clip_norm: Clip norm far below the norm of any user's vector.
            batch_size: Responses in one micro-batch.
            target_bound: Bound on a regression's targets, far below any target.

        Canaries have no public prompts beside them, so there is no subspace.
        """
        bounds = {"clip_norm": clip_norm, "batch_size": batch_size, "subspace": None}
        return self.model_copy(update=bounds)


class Critic(Settings):
    """A value function V(x) that predicts a prompt's mean reward, learned from noised releases.

    It rides in the gradient's release (:mod:`dprlhf.updates.critic`).

    Attributes:
        name: ``noised`` is the only kind.
        share: Share of the round's budget 1/z² that the critic takes. The gradient's noise-to-clip
            ratio grows by 1/√(1 − share).
        features: Number p of features of a prompt, fitted on public prompts. With 0, V is the
            released mean reward of earlier rounds. The noise in V grows with p.
        weight: Weight of r − V(x) in an advantage; the baseline has the rest.
        step_size: Step size η in (0, 1] of V's update after each round.
    """

    name: Literal["noised"] = "noised"
    share: Annotated[float, Field(gt=0, lt=1)] = 0.02
    features: Annotated[int, Field(ge=0)] = 4
    weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    step_size: Annotated[float, Field(gt=0, le=1)] = 0.3

    def check(self, recipe: Sections) -> None:
        """Refuse a recipe without public prompts for the features, or without budget for both.

        Raises:
            ValueError: Names the setting and what would work.
        """
        if self.features and recipe.evaluation is None:
            raise ValueError(
                "update.critic: features come from public prompts (evaluation.data): give some, or"
                " write features: 0"
            )
        if recipe.privacy.reward_share**2 + self.share >= 1:
            raise ValueError(
                "update.critic.share and the square of privacy.reward_share leave nothing to the"
                " gradient: lower them"
            )


class _Score(PrivateUpdate):
    """Updates that weight ∇ log π by the importance ratio π_t/μ where responses come from μ ≠ π_t.

    Attributes:
        max_importance_ratio: Upper bound at which the ratio π_t/μ of a response (grpo: of a token)
            is truncated.
    """

    max_importance_ratio: PositiveFloat = 2.0


Baseline = Literal["paired", "loo", "group"]
"""How advantages are computed; each uses one user's own responses only."""


class _Advantage(_Score):
    """Policy gradients, whose advantages a critic can serve.

    Attributes:
        critic: ``noised``, or a mapping with its settings; null for no critic.
    """

    allows_trust_region: ClassVar[bool] = True
    unscaled: ClassVar[str] = "baseline: loo"
    """The setting under which advantages keep the unit of rewards."""

    critic: Annotated[Critic | None, Experimental()] = None

    @property
    def scaled(self) -> bool:
        """Whether advantages are divided by a standard deviation, so that they have no unit."""
        return False

    @property
    def noised_critic(self) -> Critic | None:
        """Settings of the critic that serves the advantages; None without one."""
        return self.critic

    def check(self, recipe: Sections) -> None:
        """Refuse a recipe whose other sections do not work with this update.

        Raises:
            ValueError: Names the setting and what would work.
        """
        if self.critic is not None and self.scaled:
            raise ValueError(
                "update.critic: V(x) is in the unit of rewards, and standardised advantages have"
                f" none: write {self.unscaled}"
            )
        super().check(recipe)

    def saturated(self, *, clip_norm: float, batch_size: int, target_bound: float) -> Self:
        """Return these settings with bounds that every canary user of an audit reaches.

        A critic keeps its share of the release but not its features: canaries have none.
        """
        made = super().saturated(
            clip_norm=clip_norm, batch_size=batch_size, target_bound=target_bound
        )
        if made.critic is None:
            return made
        critic = made.critic.model_copy(update={"features": 0})
        return made.model_copy(update={"critic": critic})


class PG(_Advantage):
    """DP-PG (He & Zhou 2025, Algorithm 2): the policy gradient, REINFORCE with a baseline.

    Attributes:
        name: ``pg``.
        baseline: ``loo`` subtracts the mean reward of the user's other responses (RLOO),
            ``paired`` the reward of the paired response of the other half, and ``group``
            standardises the rewards within the user.
    """

    token_rewards: ClassVar[bool] = True

    name: Literal["pg"] = "pg"
    baseline: Baseline = "loo"

    @property
    def scaled(self) -> bool:
        """Whether advantages are divided by a standard deviation, so that they have no unit."""
        return self.baseline == "group"

    @property
    def released(self) -> str:
        """What a round's releases are the noised mean of, for the privacy card."""
        return "gradient of each round"


class GRPO(_Advantage):
    """DP-GRPO: group-relative advantages with the clipped surrogate of PPO, token by token.

    Attributes:
        name: ``grpo``.
        clip_range: Half-width c of the interval [1 − c, 1 + c] to which the surrogate clips the
            ratio π_θ/π_t.
        scale_rewards: Whether advantages are divided by the standard deviation of the user's
            rewards.
    """

    unscaled: ClassVar[str] = "scale_rewards: false"

    name: Literal["grpo"] = "grpo"
    clip_range: PositiveFloat = 0.2
    scale_rewards: bool = True

    @property
    def scaled(self) -> bool:
        """Whether advantages are divided by a standard deviation, so that they have no unit."""
        return self.scale_rewards

    @property
    def released(self) -> str:
        """What a round's releases are the noised mean of, for the privacy card."""
        return "gradient of the surrogate in each round"


class PPO(_Advantage):
    """DP-PPO (Rio et al., Algorithms 2 and 3): each user trains a copy, whose move is clipped.

    Attributes:
        name: ``ppo``.
        baseline: How advantages are computed: ``loo``, ``paired`` or ``group``, as with ``pg``.
        epochs: Passes E over a user's own tokens.
        minibatches: Number of parts that a user's tokens are split into, with one local step each.
        local_optimizer: Optimizer of a user's copy. ``adam`` starts from the released moments, and
            its own are thrown away afterwards.
        local_learning_rate: Step size of the local optimizer.
        clip_range: Half-width c of the interval [1 − c, 1 + c] to which the surrogate clips a
            token's ratio; null leaves the ratio as it is (Rio et al., Remark 5.2).
    """

    name: Literal["ppo"] = "ppo"
    baseline: Baseline = "loo"
    epochs: PositiveInt = 1
    minibatches: PositiveInt = 1
    local_optimizer: Literal["sgd", "adam"] = "sgd"
    local_learning_rate: PositiveFloat = 0.1
    clip_range: Annotated[float, Field(gt=0, lt=1)] | None = None

    @property
    def scaled(self) -> bool:
        """Whether advantages are divided by a standard deviation, so that they have no unit."""
        return self.baseline == "group"

    @property
    def passes(self) -> int:
        """Backward passes over a user's tokens for one release, to estimate a run's duration."""
        return self.epochs

    @property
    def released(self) -> str:
        """What a round's releases are the noised mean of, for the privacy card."""
        return "move of the users' copies of the policy in each round"


class Oracle(Settings):
    """Private least squares, for NPG and REBEL; ``update.clip_norm`` bounds the features' norm.

    Attributes:
        name: Algorithm; each is a file in :mod:`dprlhf.updates.privls`.
        steps: Number J of gradient steps of ``projected-sgd`` and ``improper-batch-sgd``, each a
            noised release of the round.
        step_size: Step size of these two algorithms, in units of 1/``update.clip_norm``².
        radius: Bound W on the norm of the solution w.
        target_bound: Bound R to which targets are clipped; a gradient's norm is then at most 2R
            times the clip norm. Null takes the largest possible advantage, 2 ``reward_range`` (3
            with the baseline ``group``); a smaller bound lowers the noise.
        sketch: Dimensions of a public random projection (a count sketch) of the features; null for
            no projection.
        ridge: Ridge regularisation of ``sufficient-statistics``, in units of its noise.
        damping: Added to every eigenvalue by ``sufficient-statistics``, in units of
            ``update.clip_norm``²: the solution then shrinks where a nearly deterministic policy
            leaves hardly any Fisher information. Null adds nothing.
        gain: Factor by which a user's answer is scaled up before it is clipped to the oracle's
            bound; the released mean is scaled down by it. A mean over responses is far below the
            worst case that the bound allows for, so a gain above 1 lowers the noise at the price of
            some clipping.
    """

    name: Literal["projected-sgd", "improper-batch-sgd", "sufficient-statistics"] = "projected-sgd"
    steps: PositiveInt = 4
    step_size: PositiveFloat = 0.5
    radius: PositiveFloat = 1.0
    target_bound: PositiveFloat | None = None
    sketch: PositiveInt | None = None
    ridge: PositiveFloat = 1.0
    damping: Annotated[float, Field(ge=0)] | None = None
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
    def closed_form(self) -> bool:
        """Whether one release of sufficient statistics determines the solution."""
        return self.name == "sufficient-statistics"

    @property
    def releases(self) -> int:
        """Number J of noised sums that one regression releases."""
        return 1 if self.closed_form else self.steps

    @property
    def released(self) -> str:
        """What the releases are the noised mean of, for the privacy card."""
        if self.closed_form:
            return "sufficient statistics of a regression in each round"
        return "gradient of a regression at each step, {releases} in each round"


class REBEL(PrivateUpdate):
    """DP-REBEL (He & Zhou 2025, Algorithm 5): regress relative log-ratios on relative rewards.

    ``rollout.responses`` must be even: the two halves are paired.

    Attributes:
        name: ``rebel``.
        eta: Step size η in the loss ((1/η)(Δ(y) − Δ(y′)) − Â)².
        solver: ``gradient`` takes ``steps`` noised gradient steps on the loss; ``gauss-newton``
            solves the linearised loss through ``oracle``.
        steps: Number J of steps of the gradient solver, each a noised release of the round.
        oracle: How ``gauss-newton`` solves its regression.
    """

    name: Literal["rebel"] = "rebel"
    eta: PositiveFloat = 1.0
    solver: Literal["gradient", "gauss-newton"] = "gradient"
    steps: PositiveInt = 2
    oracle: Oracle = Oracle()

    @property
    def releases(self) -> int:
        """Number J of noised sums that a round releases: the gate charges J and refuses more."""
        return self.steps if self.least_squares is None else self.oracle.releases

    @property
    def released(self) -> str:
        """What a round's releases are the noised mean of, for the privacy card."""
        if self.least_squares is None:
            return "gradient of the loss at each step, {releases} in each round"
        return self.oracle.released

    @property
    def least_squares(self) -> Oracle | None:
        """Settings of the regression oracle; None with the gradient solver."""
        return self.oracle if self.solver == "gauss-newton" else None

    def check(self, recipe: Sections) -> None:
        """Refuse a recipe whose other sections do not work with this update.

        Raises:
            ValueError: Names the setting and what would work.
        """
        super().check(recipe)
        if recipe.rollout.responses % 2:
            raise ValueError(
                "rollout.responses must be even for update.name rebel, which pairs them, not"
                f" {recipe.rollout.responses}"
            )

    def saturated(self, *, clip_norm: float, batch_size: int, target_bound: float) -> Self:
        """Return these settings with bounds that every canary user of an audit reaches."""
        made = super().saturated(
            clip_norm=clip_norm, batch_size=batch_size, target_bound=target_bound
        )
        return made.model_copy(update={"oracle": _saturated(self.oracle, target_bound)})


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

    @property
    def releases(self) -> int:
        """Number J of noised sums that a round releases: the gate charges J and refuses more."""
        return self.oracle.releases

    @property
    def released(self) -> str:
        """What a round's releases are the noised mean of, for the privacy card."""
        return self.oracle.released

    @property
    def least_squares(self) -> Oracle | None:
        """Settings of the regression oracle that solves the round."""
        return self.oracle

    def saturated(self, *, clip_norm: float, batch_size: int, target_bound: float) -> Self:
        """Return these settings with bounds that every canary user of an audit reaches."""
        made = super().saturated(
            clip_norm=clip_norm, batch_size=batch_size, target_bound=target_bound
        )
        return made.model_copy(update={"oracle": _saturated(self.oracle, target_bound)})


def _saturated(oracle: Oracle, target_bound: float) -> Oracle:
    return oracle.model_copy(update={"target_bound": target_bound, "sketch": None})


UPDATE_SETTINGS: dict[str, type[PrivateUpdate]] = {
    "pg": PG,
    "grpo": GRPO,
    "ppo": PPO,
    "rebel": REBEL,
    "npg": NPG,
}
"""The settings class of each update of this package, by its name in a recipe."""


def _names(fits: Callable[[type[PrivateUpdate]], bool]) -> str:
    """Return the names of the updates that have some property: ``pg, grpo or ppo``."""
    *first, last = [name for name, kind in UPDATE_SETTINGS.items() if fits(kind)]
    return f"{', '.join(first)} or {last}" if first else last


@dataclass(frozen=True)
class UpdatePlugin:
    """An update of another package: the object that an entry point of ``dprlhf.updates`` names.

    Attributes:
        settings: A subclass of :class:`PrivateUpdate`, which validates the recipe's section and
            states how many noised sums a round releases.
        function: The update: a function of the :class:`~dprlhf.updates.PrivateRound` and of the
            settings. It reaches the users through the round alone, as the updates of this package
            do: the round clips, the gate adds the noise and charges the ledger.
    """

    settings: type[PrivateUpdate]
    function: Callable[[Any, Any], None]


def update_plugin(name: str) -> UpdatePlugin:
    """Load the update that an installed package offers under a name.

    Raises:
        DprlhfError: No package or more than one offers it, or it cannot be imported.
        ValueError: It is not an :class:`UpdatePlugin`.
    """
    plugin = load_plugin(ENTRY_POINT_GROUP, name, "update")
    if not isinstance(plugin, UpdatePlugin) or not issubclass(plugin.settings, PrivateUpdate):
        raise ValueError(
            f"the update plugin {name!r} is no dprlhf.recipe.UpdatePlugin(settings, function) whose"
            " settings are a subclass of dprlhf.recipe.PrivateUpdate"
        )
    return plugin


def _of_its_class(value: Any) -> Any:
    """Validate the section ``update`` by the settings class that its name stands for."""
    if not isinstance(value, Mapping):
        return value
    name = value.get("name", "pg")
    if isinstance(name, str) and name in UPDATE_SETTINGS:
        return UPDATE_SETTINGS[name].model_validate(value)
    if name in (offered := plugin_names(ENTRY_POINT_GROUP)):
        return update_plugin(name).settings.model_validate(value)
    names = ", ".join(repr(known) for known in (*UPDATE_SETTINGS, *offered))
    wrong = PydanticCustomError("update_name", "Input should be {expected}", {"expected": names})
    raise ValidationError.from_exception_data(
        "update", [{"type": wrong, "loc": ("name",), "input": name}]
    )


Update = Annotated[SerializeAsAny[PrivateUpdate], BeforeValidator(_of_its_class)]
"""The section ``update``: the settings of one of ``UPDATE_SETTINGS`` or of a plug-in."""
