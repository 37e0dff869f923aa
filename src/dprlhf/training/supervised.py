"""The supervised stages of a private pipeline: ``dprlhf sft`` and ``dprlhf reward``.

A user's loss gradient over all of its rows is clipped to S; a round releases the noised sum over
its users through the one gate, charged to the same kind of ledger as the private updates. What
comes out is an adapter, and the whole model (``model/``) for the next stage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dprlhf.boundary import Private
from dprlhf.data.in_memory import check_overrides, from_memory, rows_of
from dprlhf.data.public import evaluated, held_out, public_users
from dprlhf.data.users import Prompts, Users
from dprlhf.errors import DprlhfError
from dprlhf.gradients.clipping import ClippedSum, Weighted, clipped_sum
from dprlhf.policies.causal_lm import (
    CausalLMPolicy,
    align_with_activations,
    load_policy,
)
from dprlhf.policies.classifier import load_reward_model
from dprlhf.policies.optimizers import ascend, make_optimizer, set_learning_rate
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.partition import Allocation, allocate
from dprlhf.privacy.plan import Plan
from dprlhf.recipe import RewardRecipe, SFTRecipe, load_any_recipe
from dprlhf.rollout import Responses
from dprlhf.runs.card import audit_of, model_card, privacy_card
from dprlhf.runs.earlier import Earlier, check_disjoint, read_earlier
from dprlhf.runs.folder import RunFolder, replaced_folder, time_stamp, write_json
from dprlhf.runs.publish import merge
from dprlhf.runs.trackers import check_installed
from dprlhf.training.build import (
    Callback,
    check_template,
    hush_libraries,
    opened,
    plan_of,
    resolve_dtype,
)
from dprlhf.training.callbacks import as_functions
from dprlhf.training.evaluate import RewardEstimate, estimate
from dprlhf.training.interrupt import Interruptible
from dprlhf.training.processes import Processes
from dprlhf.training.progress import Progress
from dprlhf.training.rounds import (
    gate_for_round,
    log_metrics,
    record_secret,
    released_metrics,
    remaining_rounds,
    save,
    users_of_round,
)
from dprlhf.training.tasks import Task, task_of
from dprlhf.training.timing import seconds_a_row

StageRecipe = SFTRecipe | RewardRecipe


@dataclass
class StageRun:
    """Everything that a supervised run is made of."""

    recipe: StageRecipe
    plan: Plan
    earlier: Earlier
    folder: RunFolder
    key: bytes
    processes: Processes
    users: Users
    allocation: Private[Allocation]
    policy: CausalLMPolicy
    optimizer: torch.optim.Optimizer
    task: Task
    public: Prompts | None
    gate: Gate | None
    progress: Progress
    callbacks: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)
    critic: None = None  # there are no responses whose mean reward it could guess


def run_rounds(run: StageRun) -> None:
    """Run all remaining rounds."""
    for t in remaining_rounds(run):
        with Interruptible() as interrupt, run.progress.round(t) as bar:
            users = users_of_round(run, t)
            bar.start("gradients", users)
            clipped = _clipped(run, users, interrupt.checked(bar.tick))
            released = gate_for_round(run, t, interrupt)(clipped.bounded)
            set_learning_rate(run.optimizer, run.recipe.optimizer, t, run.plan.rounds)
            ascend(run.policy.parameters.values(), run.optimizer, released)
            save(run, t)
            metrics = released_metrics(run, t, released)
            every = run.recipe.evaluation.every if run.recipe.evaluation else None
            if every and t % every == 0 and t < run.plan.rounds and run.processes.main:
                for name, value in _evaluate(run, f"evaluation after round {t}").items():
                    metrics[f"public_{name}"] = value.mean
                    metrics[f"public_{name}_standard_error"] = value.standard_error
            log_metrics(run, metrics)
            bar.stop()
            record_secret(run, t, users, clipped.norms, bar.seconds)


def _clipped(run: StageRun, users: Private[Any], tick: Callable[[int], None]) -> ClippedSum:
    """Return the clipped sum of the users' (ascent) directions, over all processes."""
    update = run.recipe.update

    def weighted(some: Any) -> Weighted:
        examples = run.users.readable(some, lambda read: run.task.encode(run.policy, read))
        encoded = run.task.encode(run.policy, examples)
        weights = run.task.weights(run.policy, encoded, update.batch_size)
        return Weighted(encoded, weights, np.zeros((encoded.users, 0)), 0.0)

    return clipped_sum(
        run.policy,
        users.map(weighted),
        clip_norm=run.plan.clip_norm,
        batch_size=update.batch_size,
        reduce=run.processes.sum,
        tick=tick,
    )


@dataclass(frozen=True)
class StageResult:
    """What a finished stage leaves.

    Attributes:
        folder: the run folder; its ``model/`` is what the next stage names.
        plan: the guarantee of this stage alone; ``privacy.json`` has the total.
        before: the public loss (and accuracy) of the untouched model; empty without evaluation.
        after: the same of the tuned one.
        policy: the tuned model.
    """

    folder: RunFolder
    plan: Plan
    before: dict[str, RewardEstimate]
    after: dict[str, RewardEstimate]
    policy: CausalLMPolicy


def train_stage(
    recipe: StageRecipe | str | Path,
    *,
    data: Sequence[Any] | Any | None = None,
    evaluation_data: Sequence[Any] | Any | None = None,
    overrides: Sequence[str] = (),
    output_dir: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
) -> StageResult:
    """Fit a policy to private documents, or a reward model to private preferences.

    Args:
        recipe: of the stage, or its YAML file.
        data: private rows in memory, a list of dicts or a ``datasets.Dataset``. Replaces the
            recipe's data.
        evaluation_data: public rows in memory, for the loss before and after.
        overrides: ``section.key=value`` texts, applied to a YAML file.
        output_dir: the run folder; must not exist.
        callbacks: called after every round with its public and released metrics.
        quiet: no progress bars.

    Raises:
        DprlhfError: a setting or the data are wrong; the message names it.
    """
    if evaluation_data is not None and evaluation_data is data:
        raise DprlhfError("evaluation_data are the private rows: evaluation needs public ones")
    check_overrides(recipe, overrides)
    if isinstance(recipe, str | Path):
        recipe = stage_recipe(recipe, overrides)
    recipe = from_memory(recipe, data=data is not None, evaluation=evaluation_data is not None)
    if output_dir is not None:
        recipe = recipe.model_copy(update={"output_dir": str(output_dir)})
    name = recipe.output_dir or f"runs/{time_stamp()}-{recipe.stage}"
    folder = RunFolder(Path(Processes.connect().from_main(name)))
    with _prepared(
        recipe, folder, data, evaluation_data, create=True, callbacks=callbacks, quiet=quiet
    ) as run:
        return _run(run)


def resume_stage(
    folder: str | Path,
    *,
    data: Sequence[Any] | Any | None = None,
    evaluation_data: Sequence[Any] | Any | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
) -> StageResult:
    """Continue a stage that was interrupted, with the same recipe and the same users.

    Raises:
        DprlhfError: the folder is no run of a stage, was altered, or its data changed.
    """
    held = RunFolder(Path(folder))
    with _prepared(
        stage_recipe(held.recipe),
        held,
        data,
        evaluation_data,
        create=False,
        callbacks=callbacks,
        quiet=quiet,
    ) as run:
        return _run(run)


def stage_recipe(path: str | Path, overrides: Sequence[str] = ()) -> StageRecipe:
    """Read the YAML recipe of a supervised stage.

    Raises:
        DprlhfError: the file cannot be read, is of another kind, or a key or value is wrong.
    """
    recipe = load_any_recipe(path, overrides)
    if not isinstance(recipe, SFTRecipe | RewardRecipe):
        raise DprlhfError(
            f"{path}: not a recipe of a supervised stage: it needs stage: sft or stage: reward"
        )
    return recipe


@contextlib.contextmanager
def _prepared(
    recipe: StageRecipe,
    folder: RunFolder,
    data: Any,
    evaluation_data: Any,
    *,
    create: bool,
    callbacks: Sequence[Callback],
    quiet: bool,
) -> Iterator[StageRun]:
    """Make everything that the stage needs; see :func:`dprlhf.training.build.prepared`."""
    processes = Processes.connect()
    if create:
        processes.on_main(folder.refuse_to_overwrite)
    parts = assemble_stage(recipe, data, evaluation_data, processes)
    recipe, plan, task, policy = parts.recipe, parts.plan, parts.task, parts.policy
    with opened(recipe, plan, folder, parts.users, parts.earlier, processes, create=create) as held:
        yield StageRun(
            recipe=recipe,
            plan=plan,
            earlier=parts.earlier,
            folder=folder,
            key=held.key,
            processes=processes,
            users=parts.users,
            allocation=allocate(plan, held.key),
            policy=policy,
            optimizer=make_optimizer(
                recipe.optimizer,
                policy.parameters.values(),
                plan.noise_std / plan.expected_batch_size,
            ),
            task=task,
            public=parts.public,
            gate=held.gate,
            progress=Progress(
                task.rows * recipe.data.max_prompts_per_user,
                disable=quiet or not processes.main,
            ),
            callbacks=[
                *held.trackers,
                *as_functions(callbacks, folder.path, plan.rounds),
            ],
        )


@dataclass(frozen=True)
class StageParts:
    """What a stage is made of before anything is written or charged."""

    recipe: StageRecipe
    plan: Plan
    earlier: Earlier
    users: Users
    task: Task
    policy: CausalLMPolicy
    public: Prompts | None


def assemble_stage(
    recipe: StageRecipe, data: Any, evaluation_data: Any, processes: Processes
) -> StageParts:
    """Load and check everything that a recipe names; see :func:`dprlhf.training.build.assemble`."""
    hush_libraries()
    check_installed(recipe.tracking.report_to)
    recipe = processes.on_main(lambda: resolve_dtype(recipe))
    earlier = processes.on_main(lambda: read_earlier(recipe))
    task = task_of(recipe)
    rows = rows_of(recipe.data, data)
    users = Users(rows, recipe.data)
    task.check(rows)
    processes.on_main(lambda: check_disjoint(recipe, users))
    plan = plan_of(recipe, users)
    policy = _load(recipe)
    if isinstance(recipe, SFTRecipe):
        check_template(recipe.data, users, policy)
    processes.place(policy)
    public = public_users(recipe, evaluation_data)
    _align(recipe, task, policy, public)
    return StageParts(recipe, plan, earlier, users, task, policy, evaluated(recipe, public))


def _load(recipe: StageRecipe) -> CausalLMPolicy:
    if isinstance(recipe, SFTRecipe):
        policy = load_policy(recipe.policy, seed=recipe.seed)
        longest = recipe.data.max_prompt_tokens + recipe.data.max_completion_tokens
    else:
        policy = load_reward_model(recipe.model, recipe.labels, seed=recipe.seed)
        longest = recipe.data.max_tokens
    policy.check_context_length(
        longest, f"data: {longest} tokens are", recipe.trained.model_name_or_path
    )
    return policy


def _align(recipe: StageRecipe, task: Task, policy: CausalLMPolicy, public: Users | None) -> None:
    """Start the adapter along the activations of public documents that the evaluation leaves."""
    if recipe.trained.adapter.init != "public-activations" or public is None:
        return
    some: Responses = task.encode(policy, held_out(recipe, public))
    align_with_activations(policy, some.tokens, some.mask, recipe.update.batch_size)


def _run(run: StageRun) -> StageResult:
    card = privacy_card(run.recipe, run.plan, run.policy.dimension, run.key, run.earlier)
    card |= audit_of(run.folder)
    if run.processes.main:
        write_json(run.folder.privacy, card)
    with run.policy.base():
        before = _evaluate(run, "evaluation before")
    if run.public is not None:
        size = run.recipe.update.batch_size
        some = run.public.first(size)
        of_row = seconds_a_row(run.policy, run.task, some, size, run.plan.clip_norm)
        rows = run.plan.expected_batch_size * run.recipe.data.max_prompts_per_user
        run.progress.expect(of_row * rows / run.processes.count)
    try:
        run_rounds(run)
    finally:
        run.progress.close()
    after = _evaluate(run, "evaluation after")
    if run.processes.main:
        if after:
            both = {"before": before, "after": after}
            write_json(
                run.folder.evaluation,
                {k: {n: e.as_dict() for n, e in v.items()} for k, v in both.items()},
            )
        with replaced_folder(run.folder.policy) as fresh:
            run.policy.save(fresh)
            (fresh / "README.md").write_text(model_card(run.recipe, card))
        merge(run.folder.path, run.folder.model, replace=True)
    run.processes.wait()
    return StageResult(run.folder, run.plan, before, after, run.policy)


def _evaluate(run: StageRun, description: str) -> dict[str, RewardEstimate]:
    if run.public is None:
        return {}
    with run.progress.bar(description, len(run.public)) as tick:
        encoded = run.task.encode(run.policy, run.public)
        found = run.task.losses(run.policy, encoded, run.recipe.update.batch_size)
        tick(len(run.public))
    return {name: estimate(v) for name, v in zip(run.task.metrics, found, strict=True)}
