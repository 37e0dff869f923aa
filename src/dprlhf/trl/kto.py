"""``PrivateKTOTrainer``: TRL's trainer on logged feedback as a run of ``dprlhf feedback``."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import trl

from dprlhf.data.public import evaluated, public_users
from dprlhf.data.users import Users
from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy, prompt_room
from dprlhf.policies.loading import load_policy
from dprlhf.recipe import IN_MEMORY, LoggedFeedback
from dprlhf.runs.opening import check_public
from dprlhf.training.evaluate import as_metrics, estimate
from dprlhf.training.feedback import Reactions
from dprlhf.training.processes import Processes
from dprlhf.training.setup import LONGEST_PROMPT
from dprlhf.training.supervised import with_lengths
from dprlhf.trl.config import MAPPINGS, PrivacyFields, setting
from dprlhf.trl.evaluation import as_evaluation, name_of_best
from dprlhf.trl.fields import KTO, Field
from dprlhf.trl.mapping import feedback_recipe_of
from dprlhf.trl.trainer import PrivateTrainer

_REFUSED = {
    "ref_model": "the reference is the policy with its adapter off",
    "data_collator": "rows are tokenized by the code that the guarantee relies on",
    "compute_metrics": "the evaluation on public rows is the loss",
}
"""Arguments of ``KTOTrainer`` that are refused, each with the reason."""


@dataclass
class PrivateKTOConfig(PrivacyFields, trl.KTOConfig):  # type: ignore[misc]
    """TRL's ``KTOConfig`` with a privacy budget, and the recipe's defaults.

    Attributes:
        privacy_value_rounds: Rounds at the end that estimate the value of the tuned policy from the
            users' logs (``update.value_rounds``).
    """

    beta: float = setting(0.1, "Strength of the KL penalty.")
    privacy_value_rounds: int = setting(0, "Rounds at the end that estimate the policy's value.")

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*trl.KTOConfig._VALID_DICT_FIELDS, *MAPPINGS]

    trl_fields: ClassVar[dict[str, Field]] = KTO
    trl_config: ClassVar[type[Any]] = trl.KTOConfig


class PrivateKTOTrainer(PrivateTrainer[PrivateKTOConfig]):
    """TRL's ``KTOTrainer`` with a privacy guarantee for every user whose feedback it trains on."""

    config = PrivateKTOConfig
    _default_folder = "private-kto"
    _columns = ("prompt", "completion", "label")

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: PrivateKTOConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        user_column: str | list[str] | None = None,
    ) -> None:
        """Check the arguments, load the model, and write nothing.

        The arguments are those of :class:`PrivateGRPOTrainer`, but for the rows, which are TRL's
        unpaired ones (``prompt``, ``completion``, ``label``), and for three that are refused.

        Args:
            model: Name or folder of a causal language model, or the model itself.
            ref_model: Refused.
            args: The config, with a budget.
            data_collator: Refused.
            train_dataset: The users' rows.
            eval_dataset: PUBLIC rows, none of them a user's; of several datasets, all together.
            processing_class: The model's tokenizer; None loads it.
            compute_metrics: Refused.
            callbacks: ``transformers.TrainerCallback`` objects.
            optimizers: Refused: ``args.optim`` names the optimizer.
            quantization_config: How to quantise the frozen base model; with ``peft_config``.
            peft_config: PEFT config of the adapter; None takes the recipe's default.
            user_column: Column that identifies the user, or columns of a row's several owners; sets
                ``args.privacy_unit``.

        Raises:
            DprlhfError: An argument is wrong, or cannot be private; the message says why.
        """
        given = {"ref_model": ref_model, "data_collator": data_collator}
        for name, value in {**given, "compute_metrics": compute_metrics}.items():
            if value is not None:
                raise DprlhfError(f"{name}: {_REFUSED[name]}")
        super().__init__(
            model, (), args, train_dataset, eval_dataset, processing_class, None, callbacks,
            optimizers, quantization_config, peft_config, user_column=user_column,
        )  # fmt: skip

    def _given_rewards(self, reward_funcs: Any, processing_classes: Any) -> list[Any]:
        return []

    def _recipe(self, **given: Any) -> Any:
        spec = LoggedFeedback(path=IN_MEMORY, user_column=self.args.privacy_unit)
        return feedback_recipe_of(self.args, users=Users(self._rows, spec).count, **given)

    def _load_policy(self, model: Any, tokenizer: Any) -> CausalLMPolicy:
        spec = self.recipe
        policy = load_policy(spec.policy, seed=spec.seed, model=model, tokenizer=tokenizer)
        public = public_users(spec, self._public)
        spec = with_lengths(spec, Reactions(spec), policy, public)
        if "max_prompt_tokens" not in spec.data.model_fields_set:
            room = prompt_room(policy.room, spec.data.max_completion_tokens, LONGEST_PROMPT)
            data = spec.data.model_copy(update={"max_prompt_tokens": room})
            spec = spec.model_copy(update={"data": data})
        self.recipe = self._settled = spec
        return policy

    def _public_values(self, measured: Any) -> dict[str, float]:
        return as_evaluation(as_metrics(measured))

    def _evaluated(self, rows: Any, count: int | None = None, **given: Any) -> Any:
        """Return the loss on public rows."""
        self._policy.model.to(Processes.connect().device)
        recipe = self._evaluating(rows, max(2, len(rows)))
        public = public_users(recipe, rows)
        check_public(recipe, Users(self._rows, recipe.data), public)
        some = evaluated(recipe, public)
        assert some is not None
        task = Reactions(recipe)
        task.compare_with(self._policy, some)
        size = recipe.update.batch_size
        losses = task.losses(self._policy, task.encode(self._policy, some), size)
        both = zip(task.metrics, losses, strict=True)
        return SimpleNamespace(estimates={name: estimate(values) for name, values in both})

    def _try_evaluation(self) -> None:
        """Refuse a ``metric_for_best_model`` that no evaluation has."""
        best = self.args.metric_for_best_model
        self._watched("loss")
        if best is not None and name_of_best(best) != "eval_loss":
            raise DprlhfError(f"metric_for_best_model={best!r}: the evaluation has loss alone")
