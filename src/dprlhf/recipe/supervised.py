"""The recipes of the supervised stages before it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dprlhf.recipe.base import PositiveInt, Settings
from dprlhf.recipe.sections import (
    Budget,
    Data,
    Documents,
    Evaluation,
    Optimizer,
    Policy,
    Preferences,
    Previous,
    Tracking,
    check_promise,
)


class Supervised(Settings):
    """How a stage turns its users into one release a round.

    Attributes:
        clip_norm: S; ``.inf`` only in a non-private baseline.
        batch_size: rows differentiated at once.
    """

    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    batch_size: PositiveInt = 32

    @property
    def radius(self) -> float:
        """S."""
        return self.clip_norm

    @property
    def releases(self) -> int:
        """J, the noised sums that a round takes from its users."""
        return 1


class _Stage(Settings):
    """What the supervised stages share.

    Attributes:
        stage: ``sft`` or ``reward``.
        policy: the model that is trained.
        data: the users' rows.
        update: clipping.
        optimizer: what steps along the released gradient.
        privacy: what is promised.
        rounds: T.
        evaluation: public rows, for the loss before, during and after.
        tracking: experiment trackers.
        previous: earlier runs on the same users, or whose models this one uses.
        seed: of the adapter's (and a fresh head's) start.
        output_dir: the run folder; None makes one under ``runs/``.
    """

    update: Supervised = Supervised()
    optimizer: Optimizer = Optimizer()
    privacy: Budget
    rounds: PositiveInt
    tracking: Tracking = Tracking()
    previous: list[Previous] = []
    seed: int = 0
    output_dir: str | None = None

    def _check(self, trained: Policy, data: Data, public: Data | None) -> None:
        check_promise(
            self.privacy,
            clip_norm=self.update.clip_norm,
            optimizer=self.optimizer,
            data=data,
            public=public,
            fitted=trained.trained_on_private_users,
        )


class DocumentsEvaluation(Evaluation):
    """Evaluation on public documents, which costs no privacy."""

    data: Documents


class SFTRecipe(_Stage):
    """All settings of ``dprlhf sft``: supervised fine-tuning on the users' own documents."""

    stage: Literal["sft"] = "sft"
    policy: Policy
    data: Documents
    evaluation: DocumentsEvaluation | None = None

    @property
    def trained(self) -> Policy:
        """The model that is trained."""
        return self.policy

    @model_validator(mode="after")
    def _consistent(self) -> SFTRecipe:
        self._check(self.policy, self.data, self.evaluation.data if self.evaluation else None)
        if self.policy.adapter.init == "public-activations" and self.evaluation is None:
            raise ValueError(
                "policy.adapter.init: public-activations needs public documents (evaluation.data)"
            )
        return self


class PreferencesEvaluation(Evaluation):
    """Evaluation on public pairs or labels, which costs no privacy."""

    data: Preferences


class RewardRecipe(_Stage):
    """All settings of ``dprlhf reward``: a reward model from preference pairs or labels.

    Attributes:
        model: an encoder or a causal LM, which gets a classification head.
        labels: the names of the labels, with ``data.label_column``.
    """

    stage: Literal["reward"] = "reward"
    model: Policy
    data: Preferences
    labels: list[str] | None = None
    evaluation: PreferencesEvaluation | None = None

    @property
    def trained(self) -> Policy:
        """The model that is trained."""
        return self.model

    @model_validator(mode="after")
    def _consistent(self) -> RewardRecipe:
        self._check(self.model, self.data, self.evaluation.data if self.evaluation else None)
        if (self.data.label_column is None) != (self.labels is None):
            raise ValueError("labels and data.label_column: give both, or neither for pairs")
        if self.labels is not None and len(set(self.labels)) < max(2, len(self.labels)):
            raise ValueError("labels: give at least two, each once")
        if self.evaluation and (self.evaluation.data.label_column is None) != (self.labels is None):
            raise ValueError("evaluation.data must have what data has: labels, or else pairs")
        if self.model.dtype != "float32":
            raise ValueError("model.dtype: a reward model is trained in float32")
        if self.model.adapter.init != "random":
            raise ValueError(
                "model.adapter.init: public-activations is for causal LMs: write random"
            )
        return self
