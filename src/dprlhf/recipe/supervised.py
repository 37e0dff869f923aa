"""The recipes of the supervised stages, which a pipeline runs before the private updates.

A recipe class states what the rest of the project has to know about its stage. To add a stage, such
as another offline objective on preference pairs, write a subclass of :class:`StageRecipe`, add it
to ``STAGES``, and write what it learns as in :mod:`dprlhf.training.dpo`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from dprlhf.recipe.base import PositiveFloat, PositiveInt, Settings, changed
from dprlhf.recipe.data import Data, Documents, LoggedFeedback, PreferencePairs, Preferences
from dprlhf.recipe.policy import Policy, Source
from dprlhf.recipe.privacy import Previous, Privacy, check_shared
from dprlhf.recipe.private_update import Subspace
from dprlhf.recipe.sections import Evaluation, Optimizer, Tracking


class Supervised(Settings):
    """How a supervised stage turns a round's users into one noised release, as DP-SGD does.

    Attributes:
        clip_norm: Clip norm S, the L2 bound on the gradient of one user's mean loss. ``.inf`` only
            in a non-private baseline.
        batch_size: Rows in one micro-batch of the backward pass. Larger is faster until memory runs
            out; it does not change the result beyond rounding.
        subspace: Directions from the gradients of public rows, along which users' gradients are
            released; null releases a coordinate for each trained parameter.
    """

    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    batch_size: PositiveInt = 32
    subspace: Subspace | None = None

    @property
    def releases(self) -> int:
        """Number of noised sums that a round releases."""
        return 1


class StageRecipe(Settings):
    """Settings and facts that every supervised stage has; base class of all of them.

    Attributes:
        stage: Name of the stage.
        data: The users' rows, which are private.
        update: How gradients are clipped.
        optimizer: Server-side optimizer, which steps along the released gradient.
        privacy: The guarantee (ε, δ), and how users are assigned to rounds.
        rounds: Number of rounds T.
        evaluation: Public rows, on which the loss is measured before, during and after.
        tracking: Experiment trackers.
        previous: Earlier private runs on the same users, or whose models this run uses.
        seed: Seed of the initial weights of the adapter, and of a new classification head.
        output_dir: Run folder, which must not exist; null makes one under ``runs/``.
    """

    classifier: ClassVar[bool] = False
    """Whether the model gets a classification head in place of the language model's."""

    public_losses: ClassVar[tuple[str, ...]] = ("loss",)
    """Names of what the evaluation measures on public rows."""

    hub_task: ClassVar[str] = "text-generation"
    """The model card's ``pipeline_tag``."""

    hub_tag: ClassVar[str]
    """A tag of the model card."""

    fitted_to: ClassVar[str] = "rows"
    """What the adapter is fitted to, for the model card."""

    assumptions: ClassVar[tuple[str, ...]] = ()
    """Assumptions of the guarantee that only this stage makes, for the privacy card."""

    unread: ClassVar[dict[str, str]] = {}
    """Settings of shared sections that this stage does not read, each with what to do instead."""

    stage: str
    policy: Policy
    data: Data
    update: Supervised = Supervised()
    optimizer: Optimizer = Optimizer()
    privacy: Privacy
    rounds: PositiveInt
    evaluation: Evaluation | None = None
    tracking: Tracking = Tracking()
    previous: list[Previous] = []
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    output_dir: str | None = None

    @property
    def rows_may_lack_prompts(self) -> bool:
        """Whether something else than the rows gives the prompts; in supervised stages nothing."""
        return False

    @property
    def head_labels(self) -> list[str] | None:
        """Names of a classification head's labels; None for one output, or without such a head."""
        return None

    @property
    def sources(self) -> list[Source]:
        """The models that the run starts from."""
        return [self.policy.source("policy")]

    @property
    def purpose(self) -> str:
        """How the adapter was trained, for the model card."""
        return f"fitted to private {self.fitted_to}"

    def released(self, releases: int, noise_multiplier: float) -> list[str]:
        """List what the run publishes of its users, for the privacy card."""
        what, subspace = "the noised mean gradient of each round", self.update.subspace
        if subspace is not None:
            what += f", along {subspace.rank} directions from public gradients"
        return [f"{what}, and what follows from it: the model"]

    @model_validator(mode="after")
    def _nothing_unread(self) -> StageRecipe:
        for key, instead in self.unread.items():
            *sections, name = key.split(".")
            section: Any = self
            for part in sections:
                section = getattr(section, part, None)  # there may be no evaluation
            as_is = name == "dtype" and section is not None and section.dtype == "float32"
            if section is not None and changed(section, name) and not as_is:
                raise ValueError(f"{key}: {instead}")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> StageRecipe:
        check_shared(self)
        if self.update.subspace is not None and self.update.subspace.keep_perplexity:
            raise ValueError("update.subspace.keep_perplexity is for dprlhf train: leave it out")
        if self.policy.adapter.contrast_column is not None:
            raise ValueError(
                "policy.adapter.init: public-contrast is for dprlhf train: write"
                " public-activations or random"
            )
        if self.policy.adapter.type == "full":
            raise ValueError(
                "policy.adapter.type: full is for dprlhf train; a supervised stage"
                " trains an adapter, such as lora, and merges it"
            )
        return self


class SFTRecipe(StageRecipe):
    """All settings of ``dprlhf sft``: supervised fine-tuning on the users' own documents.

    Attributes:
        stage: ``sft``.
        policy: The language model that is trained, and its adapter.
    """

    hub_tag: ClassVar[str] = "sft"
    fitted_to: ClassVar[str] = "documents"
    stage: Literal["sft"] = "sft"
    policy: Policy
    data: Documents


class RewardRecipe(StageRecipe):
    """All settings of ``dprlhf reward``: a reward model from preference pairs or labels.

    Attributes:
        stage: ``reward``.
        policy: Encoder or causal language model that is trained; it gets a classification head.
        labels: Names of the labels, together with ``data.label_column``; null for pairs. A number
            in that column is an index from 0, or a name if any of the labels is a number.
    """

    classifier: ClassVar[bool] = True
    public_losses: ClassVar[tuple[str, ...]] = ("loss", "accuracy")
    hub_task: ClassVar[str] = "text-classification"
    hub_tag: ClassVar[str] = "reward-model"
    unread: ClassVar[dict[str, str]] = {
        "policy.dtype": "a reward model is trained in float32",
        "policy.quantization": "a reward model is trained in float32: leave it out",
        "policy.gradient_checkpointing": "a reward model does not support it: lower"
        " update.batch_size to save memory",
        "policy.chat_template_kwargs": "whoever scores with the reward model does not have them:"
        " give them in the column chat_template_kwargs, or leave them out",
        "policy.adapter.init": "public rows initialise adapters of causal LMs alone: write random",
        "data.max_prompt_tokens": "a reward model reads a prompt and its completion as one text:"
        " set max_tokens",
    }

    stage: Literal["reward"] = "reward"
    policy: Policy
    data: Preferences
    labels: list[str] | None = None

    @property
    def head_labels(self) -> list[str] | None:
        """Names of the classification head's labels; None for the one output of pairs."""
        return self.labels

    @property
    def purpose(self) -> str:
        """How the adapter was trained, for the model card."""
        kind = "preference pairs" if self.labels is None else f"labels ({', '.join(self.labels)})"
        return f"fitted to private {kind}"

    @model_validator(mode="after")
    def _labels_or_pairs(self) -> RewardRecipe:
        if (self.data.label_column is None) != (self.labels is None):
            raise ValueError("labels and data.label_column: give both, or neither for pairs")
        if self.labels is not None and len(set(self.labels)) < max(2, len(self.labels)):
            raise ValueError("labels: give at least two, each once")
        return self


NOT_OFFERED = {
    "reference_free": "the reference is the policy with its adapter off",
    "precompute_ref_log_probs": "the reference is computed in each round, by the same model",
    "sync_ref_model": "the reference is the policy with its adapter off, and stays so",
    "f_divergence_type": "only reverse_kl is implemented",
    "ld_alpha": "all tokens of a completion count alike",
    "use_weighting": "pairs are not weighted",
    "loss_weights": "one loss is taken",
    "label_smoothing": "losses take labels as they are",
    "max_length": "set data.max_prompt_tokens and data.max_completion_tokens",
}
"""Settings of TRL's ``DPOConfig`` and ``KTOConfig`` that are refused, each with what to do
instead, or the reason."""


class _NamedAsInTRL(Supervised):
    """Settings of a loss by TRL's names; those of TRL that are not offered are refused."""

    @model_validator(mode="before")
    @classmethod
    def _as_in_trl(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name in NOT_OFFERED:
            if name in given:
                raise ValueError(f"{name} is not offered: {NOT_OFFERED[name]}")
        kinds = given.get("loss_type")
        if isinstance(kinds, list) and len(kinds) == 1:  # TRL writes a list
            return {**given, "loss_type": kinds[0]}
        return given


class DPOUpdate(_NamedAsInTRL):
    """The DPO loss (arXiv 2305.18290) and how its gradient is clipped, with TRL's names.

    Attributes:
        beta: Strength β of the implicit KL penalty against the reference, the policy with its
            adapter off; for ``ipo`` the parameter τ.
        loss_type: Loss of a pair as in TRL: ``sigmoid`` (DPO), ``hinge`` (SLiC) or ``ipo`` (mean
            over tokens). Losses that compare pairs of a batch, such as ``aot``, would couple users.
    """

    beta: PositiveFloat = 0.1
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"


class DPORecipe(StageRecipe):
    """All settings of ``dprlhf dpo``: direct preference optimization on the users' own pairs.

    Attributes:
        stage: ``dpo``.
        policy: The language model that is trained, and its adapter; with the adapter off it is the
            reference.
    """

    public_losses: ClassVar[tuple[str, ...]] = (
        "loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies",
    )  # fmt: skip
    hub_tag: ClassVar[str] = "dpo"
    fitted_to: ClassVar[str] = "preference pairs by DPO"
    stage: Literal["dpo"] = "dpo"
    policy: Policy
    data: PreferencePairs
    update: DPOUpdate = DPOUpdate()


class FeedbackUpdate(_NamedAsInTRL):
    """What is learnt from logged feedback, and how its gradient is clipped.

    Feedback r counts as its distance A from ``baseline``, clipped to ± ``reward_range``; true is 1,
    and false is −1.

    Attributes:
        loss_type: ``policy_gradient``: the truncated off-policy gradient. ``kto`` (arXiv
            2402.01306) and ``apo_zero_unpaired`` as in TRL, with A > 0 as desirable and A < 0 as
            undesirable; the reference point of ``kto`` comes from the public rows alone.
            ``linear_reward`` fits a reward to the log, and the policy to it by fresh responses to
            public prompts (:mod:`dprlhf.training.linear_reward`).
        baseline: Feedback that says nothing, a public number; with labels 0 and 1 take 0.5.
        reward_range: Bound R on A, which is clipped to [−R, R].
        beta: Strength β of the implicit KL penalty against the reference, in the two KTO losses.

        value_rounds: Number of rounds at the end that leave the policy as it is and estimate from
            their users' logs the feedback that it would get, with an interval. They cost no further
            ε, but their users teach nothing.
    """

    loss_type: Literal["policy_gradient", "kto", "apo_zero_unpaired", "linear_reward"] = (
        "policy_gradient"
    )
    baseline: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    reward_range: PositiveFloat = 1.0
    beta: PositiveFloat = 0.1

    value_rounds: Annotated[int, Field(ge=0)] = 0


class FeedbackRecipe(StageRecipe):
    """All settings of ``dprlhf feedback``: what users did with what they were shown.

    Attributes:
        stage: ``feedback``.
        policy: The language model that is trained, and its adapter; with the adapter off it is the
            policy that wrote the completions, unless the rows have log-probabilities.
    """

    hub_tag: ClassVar[str] = "feedback"
    fitted_to: ClassVar[str] = "feedback on logged responses"
    assumptions: ClassVar[tuple[str, ...]] = (
        "a completion is data of the user who saw it alone: what wrote it was not fitted on the"
        " users, or at a cost that the total counts",
    )
    stage: Literal["feedback"] = "feedback"
    policy: Policy
    data: LoggedFeedback
    update: FeedbackUpdate = FeedbackUpdate()

    def released(self, releases: int, noise_multiplier: float) -> list[str]:
        """List what the run publishes of its users, for the privacy card."""
        released = super().released(releases, noise_multiplier)
        if self.update.loss_type == "linear_reward":
            released = [
                "the noised mean of the users' feedback times the main coordinates of what they"
                " were shown, and what follows from it: a reward, and the model"
            ]
        if self.update.value_rounds:
            released += [
                f"in place of the last {self.update.value_rounds} gradients: noised means of their"
                " users' feedback, plain and weighed by how likely the policy is to answer so"
            ]
        return released

    @model_validator(mode="after")
    def _reward_by_one_release(self) -> FeedbackRecipe:
        update = self.update
        if update.loss_type != "linear_reward":
            return self
        if self.rounds != 1 or update.value_rounds:
            raise ValueError(
                "update.loss_type: linear_reward is fitted to one release: set rounds to 1, and"
                " update.value_rounds to 0"
            )
        if update.subspace is None:
            raise ValueError(
                "update.loss_type: linear_reward needs public prompts: give update.subspace, and"
                " evaluation.data"
            )
        unread = [n for n in ("refresh", "mean_first") if changed(update.subspace, n)]
        if unread:
            raise ValueError(
                f"update.subspace.{unread[0]}: each step of linear_reward has directions of its"
                " own: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _value_of_users_apart(self) -> FeedbackRecipe:
        rounds, privacy = self.update.value_rounds, self.privacy
        if not rounds:
            return self
        if rounds >= self.rounds:
            raise ValueError(
                f"update.value_rounds: {rounds} of {self.rounds} rounds would leave none that learn"
            )
        if privacy.participations > 1 or privacy.partition == "poisson" or privacy.bands > 1:
            raise ValueError(
                "update.value_rounds needs users that the policy has not learnt from, and noise of"
                " their own: set privacy.participations=1 and bands=1, or value_rounds=0"
            )
        return self


STAGES: dict[str, type[StageRecipe]] = {
    "sft": SFTRecipe,
    "reward": RewardRecipe,
    "dpo": DPORecipe,
    "feedback": FeedbackRecipe,
}
"""The supervised stages by name; a recipe without a ``stage`` is one of private updates."""
