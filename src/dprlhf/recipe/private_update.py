"""What the settings of every private update have and state, and its section ``subspace``.

:mod:`dprlhf.recipe.updates` has the settings of each update.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from dprlhf.recipe.base import PositiveFloat, PositiveInt, Settings
from dprlhf.recipe.data import PublicData


class Subspace(Settings):
    """A few directions, computed on public prompts, along which users' gradients are released.

    A release then has ``rank`` coordinates instead of one for each trained parameter, so the norm
    of its noise is smaller by the square root of their ratio (:mod:`dprlhf.gradients.subspace`). It
    works with every adapter.

    Attributes:
        rank: Number p of directions.
        data: The public prompts. Null takes those rows of ``evaluation.data`` that the evaluation
            does not use.
        prompts: Number of prompts whose gradients are computed each time.
        refresh: Number of rounds for which directions are kept; 1 computes new ones every round.
        mean_first: Make the mean public gradient the first direction. At a small rank it captures
            more of the reward than directions of variation do: the public prompts give the axis,
            and the users' gradients the sign and size of the step along it.
        keep_perplexity: Make the directions orthogonal to the public gradient of the mean
            log-likelihood under the base model. A step then leaves the base model's perplexity of
            the responses unchanged to first order, so texts stay more fluent for the same reward.
            It takes another gradient pass over the public responses.
        target_kl: Divergence from the first policy, in nats a response, which a run of steps in one
            direction would reach; proportionally less where responses have fewer than 24 tokens.
            Each round's step is shortened to its share, as measured on public responses; null
            leaves steps as long as the optimizer makes them.
    """

    rank: PositiveInt = 16
    data: PublicData | None = None
    prompts: Annotated[int, Field(ge=2)] = 256
    refresh: PositiveInt = 1
    mean_first: bool = False
    keep_perplexity: bool = False
    target_kl: PositiveFloat | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Subspace:
        if self.prompts < 2 * self.rank:
            raise ValueError(
                f"{self.prompts} prompts are too few for rank {self.rank}: take at least"
                f" {2 * self.rank}"
            )
        return self


class PrivateUpdate(Settings):
    """Settings and facts that every private update has; base class of all updates, plug-ins too.

    Attributes:
        name: Name of the update in a recipe.
        clip_norm: Clip norm S, the L2 bound on one user's vector; ``.inf`` only in a non-private
            baseline.
        batch_size: Responses in one micro-batch of the backward pass. Larger is faster until memory
            runs out; it does not change the result beyond rounding.
        subspace: Directions from public gradients, along which users' vectors are released; null
            releases all coordinates.
    """

    turn_rewards: ClassVar[bool] = False
    """Whether the update takes a reward for each turn of an agent."""

    leaves_rows_out: ClassVar[bool] = False
    """Whether the update gives weight 0 to single responses (``rollout.mask_truncated``)."""

    reads_logprobs: ClassVar[bool] = True
    """Whether a contribution depends on log-probabilities under π_t beside their gradients."""

    name: str
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    batch_size: PositiveInt = 64
    subspace: Subspace | None = None

    @property
    def releases(self) -> int:
        """Number J of noised sums that a round releases: the gate charges J and refuses more."""
        return 1 if self.least_squares is None else self.least_squares.releases

    @property
    def passes(self) -> int:
        """Backward passes over a user's tokens for one release, to estimate a run's duration."""
        return 1

    @property
    def released(self) -> str:
        """The phrase that completes "the noised mean …" on the privacy card.

        An example is "gradient of each round". ``{releases}`` in it stands for the number of
        releases.
        """
        if self.least_squares is not None:
            return self.least_squares.released
        return (
            f"vector that the update {self.name} takes from each user, {{releases}} in each round"
        )

    @property
    def moves_within_round(self) -> bool:
        """Whether log-probabilities are taken at parameters other than those that sampled.

        However many releases a regression takes, its features are those of π_t.
        """
        return self.least_squares is None and self.releases > 1

    @property
    def least_squares(self) -> Oracle | None:
        """Settings of the regression that solves the round (``oracle``); None if there is none.

        With one, ``clip_norm`` bounds the regression's features.
        """
        return getattr(self, "oracle", None)

    def check(self, recipe: Any) -> None:
        """Refuse a :class:`~dprlhf.recipe.Recipe` whose other sections do not suit this update.

        What holds for every update is checked apart (:mod:`dprlhf.recipe.rl`).
        """

    def saturated(self, *, clip_norm: float, batch_size: int, target_bound: float) -> Self:
        """Return these settings with bounds so low that each canary user of an audit is clipped.

        Args:
            clip_norm: Clip norm far below the norm of any user's vector.
            target_bound: Bound on a regression's targets, far below any target.

        Each canary user then contributes as much as the bounds allow. Canaries have no public
        prompts beside them, so there is no subspace.
        """
        bounds: dict[str, Any] = {"clip_norm": clip_norm, "batch_size": batch_size}
        bounds["subspace"] = None
        if (oracle := self.least_squares) is not None:
            bounds["oracle"] = oracle.model_copy(update={"target_bound": target_bound})
        return self.model_copy(update=bounds)


class Oracle(Settings):
    """Private least squares, for NPG and REBEL; ``update.clip_norm`` bounds the features' norm.

    Attributes:
        name: Algorithm (:mod:`dprlhf.updates.oracles`).
        steps: Number J of gradient steps of ``projected-sgd`` and ``improper-batch-sgd``, each a
            noised release of the round.
        step_size: Step size of these two algorithms, in units of 1/``update.clip_norm``².
        radius: Bound W on the norm of the solution w.
        target_bound: Bound R to which targets are clipped; a gradient's norm is then at most 2R
            times the clip norm. Null takes the largest possible advantage, 2 ``reward_range`` (with
            the baseline ``group`` 3, which covers up to ten responses); a smaller bound lowers the
            noise.
        damping: Added to every eigenvalue by ``sufficient-statistics``, in units of
            ``update.clip_norm``²: it shrinks the solution where the policy is nearly deterministic
            and its Fisher information small. Null adds nothing.
        gain: Factor by which a user's contribution is scaled up before it is clipped to the
            oracle's bound; the released mean is scaled down by it. A mean over responses is usually
            far below the worst case, so a gain above 1 lowers the noise at the price of some
            clipping.
    """

    name: Literal["projected-sgd", "improper-batch-sgd", "sufficient-statistics"] = "projected-sgd"
    steps: PositiveInt = 4
    step_size: PositiveFloat = 0.5
    radius: PositiveFloat = 1.0
    target_bound: PositiveFloat | None = None
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
                " see papers/regression in the repository"
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
        """The phrase that completes "the noised mean …" on the privacy card."""
        if self.closed_form:
            return "sufficient statistics of a regression in each round"
        return "gradient of a regression at each step, {releases} in each round"
