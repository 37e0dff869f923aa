"""``PrivateGRPOTrainer`` and ``PrivateRLOOTrainer``: TRL's trainers as runs of this package.

A trainer turns its arguments into a recipe and starts the run that ``dprlhf.train`` would start:
the same plan, gate, ledger and run folder. What differs from TRL is in ``docs/trl.md``.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from peft import PeftModel
from transformers import EarlyStoppingCallback, Trainer
from transformers.trainer_utils import TrainOutput

from dprlhf.agents import load_sampler
from dprlhf.agents.rewards import environment_rewards
from dprlhf.data.given_rewards import GivenReward
from dprlhf.data.in_memory import InMemoryInputs
from dprlhf.data.public import public_users
from dprlhf.data.reward_arguments import given_rewards
from dprlhf.data.users import Users
from dprlhf.errors import REMOVED, DprlhfError, InterruptedRunError
from dprlhf.policies.adapters import adapter_rollback
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.given import adapter_of, quantization_of
from dprlhf.policies.loading import without_wrapper
from dprlhf.policies.optimizers import learning_rate
from dprlhf.policies.refusals import refuse_foreign_hooks
from dprlhf.privacy.file_times import stamp_run
from dprlhf.recipe import IN_MEMORY, Data
from dprlhf.rewards.loading import load_rewards
from dprlhf.runs.card import carried_with, guarantee_sentence, model_card
from dprlhf.runs.earlier import records_of
from dprlhf.runs.folder import JsonLines, RunFolder
from dprlhf.runs.lineage import attach
from dprlhf.runs.publish import push
from dprlhf.training.build import open_run
from dprlhf.training.evaluate import Evaluated, as_metrics
from dprlhf.training.processes import Processes
from dprlhf.training.run import Run
from dprlhf.training.setup import load_policy_of, with_prompt_width
from dprlhf.training.trainer import complete
from dprlhf.trl.arguments import (
    adapter_in,
    check_model,
    continued,
    function_of,
    in_trls_words,
    means_of,
    name_in_logs,
    parts_of,
    refuse_optimizers,
    rows_of,
    together,
    with_response_template,
    with_user_column,
    without_adapter,
)
from dprlhf.trl.config import PrivacyFields, PrivateGRPOConfig, PrivateRLOOConfig, as_private
from dprlhf.trl.evaluation import (
    TRIED,
    Log,
    as_evaluation,
    as_logs,
    as_number,
    check_best,
    evaluate_on,
    metrics_of,
    public_values,
)
from dprlhf.trl.mapping import recipe_of, with_evaluation

C = TypeVar("C", bound=PrivacyFields)


class PrivateTrainer(Generic[C]):
    """The methods of :class:`PrivateGRPOTrainer` and :class:`PrivateRLOOTrainer`.

    Attributes:
        args: The config.
        model: The model that is trained: a PEFT model, or the model itself if all of it is trained.
        processing_class: Its tokenizer.
        state: transformers' ``TrainerState``; ``log_history`` has released and public values alone.
        recipe: The recipe of the run.
        result: What :func:`dprlhf.train` returns; None before the run has finished.
    """

    config: ClassVar[type[Any]]
    aux_loss_enabled: ClassVar[bool] = False  # TRL's name; router_aux_loss_coef is refused
    _default_folder: ClassVar[str]
    _columns: ClassVar[tuple[str, ...]] = ("prompt",)

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: C | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Any] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        *,
        compute_metrics: Any = None,
        user_column: str | list[str] | None = None,
    ) -> None:
        """Check the arguments, load the model, and write nothing.

        Args:
            model: Name or folder of a causal language model, or the model itself. Its weights are
                assumed public.
            reward_funcs: Rewards as in TRL: a classifier's name, a model, a callable, or a list.
            args: The config, with a budget.
            train_dataset: The users' prompts, in the column ``prompt``: a ``Dataset``, an
                ``IterableDataset``, a list of rows, a pandas ``DataFrame``. With
                ``environment_factory`` the column may be missing: ``reset`` returns the prompt.
            eval_dataset: PUBLIC prompts, none of them a user's. Of a dictionary of datasets the run
                evaluates all rows together, and :meth:`evaluate` each one by itself.
            processing_class: The model's tokenizer; None loads it.
            reward_processing_classes: A tokenizer for each reward model; None loads them.
            callbacks: ``transformers.TrainerCallback`` objects; they see only released and public
                values. One that puts hooks into the model (``wandb.watch``) is an error.
            optimizers: Refused: ``args.optim`` names the optimizer.
            quantization_config: How to quantise the frozen base model; with ``peft_config``.
            peft_config: PEFT config of the adapter, or the recipe's section as a mapping, such as
                ``{"type": "full"}`` for all weights. None takes the recipe's default, a LoRA of
                rank 1 in a few layers. A ``PeftModel`` brings its own: one untrained LoRA, which is
                built again from its config.
            tools: Functions that the policy may call, sync or async.
            rollout_func: Refused: responses are sampled by the code that ε relies on.
            environment_factory: Makes an environment for each trajectory; its public methods are
                tools, and its ``get_reward`` and ``get_turn_reward`` are rewards. A dictionary has
                a factory for each value of the column ``environment``.
            compute_metrics: A function of ``transformers.EvalPrediction``, called at every
                evaluation on public prompts: ``predictions`` are the responses, ``label_ids`` their
                rewards, and ``inputs`` the prompts. The numbers that it returns are published
                unchanged, so it must not use what a reward has kept of private responses.
            user_column: Column that identifies the user, or columns of a row's several owners; sets
                ``args.privacy_unit``.

        Raises:
            DprlhfError: An argument is wrong, or cannot be private; the message says why.
        """
        own = as_private(args, self.config, self._default_folder)
        refuse_optimizers(optimizers)
        if rollout_func is not None:
            raise DprlhfError(f"rollout_func: {REMOVED['rollout_func']}")
        self.args: Any = with_user_column(own, user_column)
        self._metrics = metrics_of(compute_metrics)
        model = without_wrapper(model)
        adapter = adapter_in(model, peft_config)
        self._agent: dict[str, Any] = {
            "tools": tools or None,
            "environment_factory": environment_factory,
        }
        self._rewards = self._given_rewards(reward_funcs, reward_processing_classes)
        self._train_dataset, self._eval_dataset = train_dataset, eval_dataset
        self._rows = self._dataset(train_dataset, "train_dataset")
        self._parts: dict[str | None, Any] = {}
        self._public = None
        if eval_dataset is not None:
            parts = parts_of(eval_dataset)
            self._parts = {name: self._dataset(one, "eval_dataset") for name, one in parts.items()}
            self._public = together(self._parts.values())
        check_model(model, quantization_config)
        with in_trls_words():
            freeze_a = self.args.privacy_lora_fa
            self.recipe: Any = self._recipe(
                model=model,
                adapter=None if adapter is None else adapter_of(adapter, freeze_a=freeze_a),
                public=0 if self._public is None else len(self._public),
                quantization=quantization_of(quantization_config),
            )
        self.result: Any = None
        self._settled = self.recipe
        self._started = False
        self._log = Log(callbacks, self.args)
        with in_trls_words(), contextlib.ExitStack() as refused:
            base = model.get_base_model() if isinstance(model, PeftModel) else model
            refused.callback(adapter_rollback(base))
            model = without_adapter(model)
            loaded = None if isinstance(model, str) else model
            self._models = {} if loaded is None else {"model": loaded}
            self._policy = self._load_policy(loaded, processing_class)
            self._log.values = {"model": self.model, "processing_class": self.processing_class}
            self._log.call("on_init_end")
            refused.pop_all()

    def _given_rewards(self, reward_funcs: Any, processing_classes: Any) -> list[GivenReward]:
        """Return the rewards that were passed, and after them those of the environments."""
        of_environments = given_rewards(environment_rewards(self._agent["environment_factory"]))
        if reward_funcs is None or reward_funcs in ([], ()):
            if not of_environments:
                raise DprlhfError(
                    "reward_funcs: give a reward: a callable, a classifier's name or a model"
                )
            reward_funcs = ()
        own = given_rewards(reward_funcs, self.args.reward_weights, processing_classes)
        return [*own, *of_environments]

    def _load_policy(self, model: Any, tokenizer: Any) -> CausalLMPolicy:
        """Load the policy, set the recipe's longest prompt, and attach an agent's sampler."""
        policy = load_policy_of(self.recipe, model=model, tokenizer=tokenizer)
        public, tools = public_users(self.recipe, self._public), 0
        if (agent := self.recipe.rollout.agent) is not None:
            with_response_template(policy.tokenizer)
            tools = load_sampler(agent, **self._agent).attach(policy)
        self.recipe = self._settled = with_prompt_width(self.recipe, policy, public, tools)
        return policy

    def _recipe(self, **given: Any) -> Any:
        """Return the recipe of the model, adapter, quantisation and number of public prompts."""
        spec = Data(path=IN_MEMORY, user_column=self.args.privacy_unit)
        return recipe_of(
            self.args,
            rewards=[reward.settings.model_dump() for reward in self._rewards],
            users=Users(self._rows, spec, may_lack_prompts=self._may_lack_prompts).count,
            agent=InMemoryInputs(None, None, None, **self._agent).agent_settings,
            **given,
        )

    @property
    def _may_lack_prompts(self) -> bool:
        return self._agent["environment_factory"] is not None

    def _dataset(self, given: Any, name: str) -> Any:
        """Return rows in memory, which may lack columns where an environment gives the prompts."""
        if name == "eval_dataset" and given is self._train_dataset:
            raise DprlhfError(
                "eval_dataset is the train_dataset: evaluation writes prompts and rewards in the"
                " open, so it needs public prompts, of nobody among the users"
            )
        return rows_of(given, name, () if self._may_lack_prompts else self._columns)

    # --- what is trained, and what is known of it --------------------------------------------

    @property
    def train_dataset(self) -> Any:
        """The users' prompts, as they were given."""
        return self._train_dataset

    @property
    def eval_dataset(self) -> Any:
        """The public prompts, as they were given: None, a dataset, or a dictionary of them."""
        return self._eval_dataset

    @property
    def model(self) -> Any:
        """The model that is trained."""
        return self._policy.model

    @property
    def processing_class(self) -> Any:
        """The model's tokenizer."""
        return self._policy.tokenizer

    @property
    def reward_funcs(self) -> list[Any]:
        """The rewards as they were given, and after them that of the environments."""
        return [function_of(reward) for reward in self._rewards]

    @property
    def reward_func_names(self) -> list[str]:
        """The names of the rewards, as TRL makes them; an environment's reward has its class's."""
        environments = self._agent["environment_factory"]
        return [name_in_logs(reward, environments) for reward in self._rewards]

    @property
    def reward_weights(self) -> torch.Tensor:
        """The weight of each reward, ``[rewards]``."""
        return torch.tensor([reward.settings.weight for reward in self._rewards])

    @property
    def reward_processing_classes(self) -> list[Any]:
        """The tokenizer that was given for each reward; None for a callable, and for its own."""
        return [reward.tokenizer for reward in self._rewards]

    @property
    def state(self) -> Any:
        """transformers' ``TrainerState``, with what has been released so far."""
        return self._log.state

    @property
    def accelerator(self) -> Any:
        """accelerate's ``Accelerator`` of this process."""
        return Processes.connect().accelerator

    @property
    def hub_model_id(self) -> str:
        """The repository of :meth:`push_to_hub`."""
        return str(self.args.hub_model_id or self.folder.path.resolve().name)

    @property
    def folder(self) -> RunFolder:
        """The run folder, ``args.output_dir``."""
        return RunFolder(Path(self.args.output_dir))

    @property
    def privacy(self) -> dict[str, Any]:
        """The privacy card of the run: the guarantee, what is released, and the assumptions.

        Raises:
            DprlhfError: The run has not begun.
        """
        if not (self._started and self.folder.privacy.is_file()):
            raise DprlhfError("there is no privacy card before train() begins")
        card: dict[str, Any] = json.loads(self.folder.privacy.read_text("utf-8"))
        return card

    def __getattr__(self, name: str) -> Any:
        """Explain that an attribute of transformers' ``Trainer`` does not exist here."""
        here = f"{type(self).__name__} has no {name!r}"
        if hasattr(Trainer, name):
            here += ": it runs private rounds and is no transformers.Trainer"
        raise AttributeError(here)

    def add_callback(self, callback: Any) -> None:
        """Add a ``transformers.TrainerCallback``, an object or a class."""
        self._log.add(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, given as object or class."""
        self._log.remove(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, given as object or class, and return it."""
        return self._log.remove(callback)

    # --- training ----------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        """Train privately, or continue an interrupted run.

        Args:
            resume_from_checkpoint: True or the run folder continues the run in ``args.output_dir``;
                rounds that were charged stay spent. None takes ``args.resume_from_checkpoint``.

        Returns:
            The number of rounds, NaN for the loss (which is private), and the last public values.

        Raises:
            DprlhfError: The folder exists, this trainer has trained already, or the run fails.
        """
        again = resume_from_checkpoint
        again = self.args.resume_from_checkpoint if again is None else again
        with in_trls_words():
            recipe = continued(self.recipe, self.folder, again) if again else self.recipe
        if not again and not self._started and self.folder.recipe.is_file():
            raise DprlhfError(
                f"{self.folder.path}: there is a run already: continue it with"
                " train(resume_from_checkpoint=True), or choose another output_dir"
            )
        if self._started:
            raise DprlhfError(
                "this trainer has trained: a second train() would move a model that is no longer"
                " the base. Make a new trainer"
                + ("" if self.result else ", and give train(resume_from_checkpoint=True)")
            )
        refuse_foreign_hooks(self.model, "the model")
        self._try_evaluation()
        self.args.say_differences()
        sources = InMemoryInputs(
            self._rows,
            None,
            self._public,
            policy=self._policy,
            models=self._models,
            compute_metrics=self._metrics,
            **self._agent,
        )
        sources.take_rewards(self._rewards)
        try:
            with (
                in_trls_words(),
                open_run(recipe, self.folder, sources, create=not again) as run,
            ):
                self._begin(run)
                self.result = complete(run)
        except InterruptedRunError:
            if not self._log.control.should_training_stop:
                raise
        return self._end()

    def _begin(self, run: Run) -> None:
        """Let the log follow a run that is open, after the rounds that a resumed one has had."""
        self._started = True  # not before: what is refused until here has moved nothing
        run.progress.bars &= not self.args.disable_tqdm
        log, rounds = self._log, run.plan.rounds
        means = means_of(self._rewards, self.reward_func_names)
        self._settled = run.recipe
        log.state.max_steps = rounds
        log.state.num_train_epochs = run.recipe.privacy.participations
        log.state.is_world_process_zero = log.state.is_local_process_zero = run.processes.main

        def entries(metrics: dict[str, Any]) -> tuple[int, dict[str, float], dict[str, float]]:
            t, logs = metrics["round"], as_logs(metrics, means)
            logs["learning_rate"] = learning_rate(run.recipe.optimizer, t, rounds)
            return t, logs, as_evaluation(metrics)

        # By the main process: the others may not touch the file.
        for metrics in run.processes.on_main(lambda: JsonLines(run.folder.metrics).read()):
            log.earlier_round(*entries(metrics))
        log.call("on_train_begin")
        run.callbacks.append(lambda metrics: log.round(*entries(metrics)))

    def _end(self) -> TrainOutput:
        """Return what TRL's ``train`` returns, after the last round."""
        log, result = self._log, self.result
        metrics: dict[str, Any] = {}
        if result is not None:
            log.state.global_step = log.state.max_steps
        if result is not None and result.before is not None and result.after is not None:
            log.evaluation(0, self._public_values(result.before))
            metrics = self._public_values(result.after)
            log.evaluation(log.state.max_steps, metrics)
        card = self.privacy
        spent = {name: as_number(card[name]) for name in ("epsilon", "delta")}
        # TRL's last entry has the values of the last step, too.
        last: dict[str, Any] = next(
            (one for one in reversed(log.state.log_history) if "grad_norm" in one), {}
        )
        log.write({**last, "train_loss": math.nan, **spent})
        log.call("on_train_end")
        if self.args.push_to_hub and result is not None:
            self.push_to_hub()
        if Processes.connect().main:
            print(f"dprlhf: guarantee: {guarantee_sentence(card)}", file=sys.stderr)
        return TrainOutput(log.state.global_step, math.nan, metrics | spent)

    def _public_values(self, measured: Any) -> dict[str, float]:
        """Return a run's evaluation on public rows under TRL's names."""
        return public_values(measured)

    # --- public evaluation, and what the run leaves --------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Sample one response to each PUBLIC prompt, and score it; it costs no privacy.

        Args:
            eval_dataset: Public prompts; or a dictionary of datasets, each evaluated by itself; or
                the name of one of the trainer's datasets. None takes all of the trainer's.
            ignore_keys: Accepted for compatibility with TRL; has no effect.
            metric_key_prefix: Start of the names, before the name of a dataset in a dictionary.

        Returns:
            The mean reward and measures of the responses.

        Raises:
            DprlhfError: There are no public prompts, or some are the users'.
                ``privacy_declared_public`` applies to the trainer's own ``eval_dataset`` only.
        """
        given = self._parts
        if isinstance(eval_dataset, str) and eval_dataset in self._parts:
            given = {None: self._parts[eval_dataset]}
        elif eval_dataset is not None:
            parts = parts_of(eval_dataset)
            given = {name: self._dataset(one, "eval_dataset") for name, one in parts.items()}
        if not given:
            raise DprlhfError(
                "evaluate() needs eval_dataset: public prompts, of nobody among users"
            )
        metrics: dict[str, float] = {}
        for name, rows in given.items():
            prefix = metric_key_prefix if name is None else f"{metric_key_prefix}_{name}"
            values = as_evaluation(as_metrics(self._evaluated(rows).estimates), prefix)
            self._log.write(values)
            self._log.call("on_evaluate", metrics=dict(values))
            metrics |= values
        return metrics

    def _evaluated(self, rows: Any, count: int | None = None, **given: Any) -> Evaluated:
        """Sample one response to each of these public prompts, or to the first, and score it."""
        self._policy.model.to(Processes.connect().device)
        recipe = self._evaluating(rows, count or len(rows))
        loaded = load_rewards(recipe.rewards, self._rewards, device=self._policy.device)
        users = Users(self._rows, recipe.data, may_lack_prompts=self._may_lack_prompts)
        return evaluate_on(self._policy, recipe, users, rows, loaded, self._metrics, **given)

    def _evaluating(self, rows: Any, count: int) -> Any:
        """Return the recipe with an evaluation of so many of these rows."""
        own = any(rows is one for one in (self._public, *self._parts.values()))
        declared = own and self.args.privacy_declared_public
        return with_evaluation(self._settled, self.args, count, declared=declared)

    def _try_evaluation(self) -> None:
        """Try on a few public prompts what would otherwise fail after users are spent.

        An error inside ``compute_metrics`` is raised unchanged: it has seen public prompts only.

        Raises:
            DprlhfError: ``compute_metrics`` returns no numbers, or no evaluation has the metric of
                ``metric_for_best_model``.
        """
        section, watched = self.recipe.evaluation, self._watched("reward")
        if self._public is None or (self._metrics is None and not watched):
            return
        count = section.prompts if section is not None else None  # as many as the run evaluates
        evaluated = self._evaluated(self._public, count, log_probs=watched, first=TRIED)
        if watched:
            check_best(self.args.metric_for_best_model, evaluated)

    def _watched(self, such_as: str) -> bool:
        """Return whether evaluations between rounds have a metric that callbacks watch.

        Raises:
            DprlhfError: They have not, and ``EarlyStoppingCallback`` would end the run with an
                error.
        """
        section, best = self.recipe.evaluation, self.args.metric_for_best_model
        watched = best is not None and section is not None and section.every is not None
        stopping = (isinstance(one, EarlyStoppingCallback) for one in self._log.callbacks)
        if any(stopping) and not watched:
            raise DprlhfError(
                "EarlyStoppingCallback watches metric_for_best_model: give it, such as"
                f" {such_as!r}, and eval_strategy='steps' with an eval_dataset"
            )
        return watched

    def save_model(
        self, output_dir: str | Path | None = None, _internal_call: bool = False
    ) -> None:
        """Save the tuned adapter (or model), its tokenizer, and the record of the guarantee.

        Args:
            output_dir: A folder; None takes ``args.output_dir``, the run folder, whose ``policy/``
                has the same files.
            _internal_call: Accepted for compatibility with TRL; has no effect.

        Raises:
            DprlhfError: Nothing has been trained yet.
        """
        if not self._started or not self.folder.ledger.is_file():
            raise DprlhfError("there is nothing to save before train()")
        if not Processes.connect().main:
            return
        place = Path(output_dir) if output_dir else self.folder.path
        card = self.privacy
        with tempfile.TemporaryDirectory() as held:
            self._policy.save(Path(held))
            (Path(held) / "README.md").write_text(model_card(self._settled, card), encoding="utf-8")
            attach(Path(held), carried_with(card, records_of(self.folder.path)))
            shutil.copytree(held, place, dirs_exist_ok=True)
        if place.resolve() == self.folder.path.resolve():
            stamp_run(place)

    def end(self) -> None:
        """Do nothing: trackers end with the run, and accelerate leaves the group by itself."""

    def push_to_hub(self, commit_message: str | None = None, **settings: Any) -> str | None:
        """Upload the tuned policy with its model card, and return the address.

        Of several processes the main one alone uploads; the others return None, as with TRL.

        Args:
            commit_message: Message of the commit; None names the run.
            **settings: ``token``, ``private`` and ``revision`` (a branch) in place of what the
                config says; transformers' others, such as ``blocking``, are taken and unused.

        Raises:
            DprlhfError: The run has not finished, or the hub refused the upload.
        """
        if not self.folder.recipe.is_file():
            raise DprlhfError("there is nothing to push before train()")
        if not Processes.connect().main:
            return None
        args = self.args
        private = settings.get("private")
        return push(
            self.folder.path,
            self.hub_model_id,
            private=bool(args.hub_private_repo if private is None else private),
            token=settings.get("token") or args.hub_token,
            message=commit_message,
            revision=settings.get("revision"),
        )


class PrivateGRPOTrainer(PrivateTrainer[PrivateGRPOConfig]):
    """TRL's ``GRPOTrainer`` with a privacy guarantee for every user whose prompts it trains on."""

    config = PrivateGRPOConfig
    _default_folder = "private-grpo"


class PrivateRLOOTrainer(PrivateTrainer[PrivateRLOOConfig]):
    """TRL's ``RLOOTrainer`` with a privacy guarantee for every user whose prompts it trains on."""

    config = PrivateRLOOConfig
    _default_folder = "private-rloo"
