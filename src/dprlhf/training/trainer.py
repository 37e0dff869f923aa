"""The training loop: the one-pass meta-algorithm of He & Zhou (2025, Algorithm 1), for every stage.

Every user's rows are drawn once (or k times, as planned). Values computed from them are ``Private``
until the gate releases them; only released values reach policy and optimizer.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dprlhf.errors import EXITS, DprlhfError, one_line
from dprlhf.policies.causal_lm import CausalLMPolicy, random_adapter
from dprlhf.policies.optimizers import set_learning_rate
from dprlhf.policies.refusals import refuse_foreign_hooks
from dprlhf.privacy.file_times import first_day
from dprlhf.privacy.gaussian import upwards
from dprlhf.recipe import AnyRecipe, Recipe, dump_recipe
from dprlhf.rewards.isolation import without_warnings
from dprlhf.runs.card import audits_of, carried_with, model_card, privacy_card
from dprlhf.runs.earlier import Record
from dprlhf.runs.folder import RunFolder, replaced_folder, write_json
from dprlhf.runs.lineage import attach
from dprlhf.runs.opening import runs_beside
from dprlhf.training.rounds import (
    Interruptible,
    check_finite,
    gate_for_round,
    log_metrics,
    record_secret,
    records_of_run,
    released_metrics,
    remaining_rounds,
    save,
    users_of_round,
)
from dprlhf.training.run import Batch, Outcome, PreparedRun, Run, Stage
from dprlhf.training.timing import in_words


def run_rounds(run: Run) -> None:
    """Run all remaining rounds t = 1, …, T.

    A round takes its users from the allocation, which was drawn before the first round. The stage
    computes each user's contribution, clips it to the norm S, sends the sum through the gate (which
    charges the ledger and adds the noise), and moves the policy along what comes back. Then the
    checkpoint is saved and the charge committed. A warning that private values cause is dropped.
    """
    for t in remaining_rounds(run):
        # A thread or a callback of the program's may have changed them since they were checked.
        refuse_foreign_hooks(run.policy.model, "the model")
        run.put_back_torch_state()
        with Interruptible() as interrupt, run.progress.round(t) as bar:
            users = users_of_round(run, t)
            release = gate_for_round(run, t, interrupt)
            set_learning_rate(run.optimizer, run.recipe.optimizer, t, run.plan.rounds)
            with without_warnings():
                outcome = run.stage.update(
                    run, Batch(t, users, release, bar, interrupt.checked(bar.tick))
                )
                check_finite(run, t)
            save(run, t)
            _report(run, t, outcome)
            bar.stop()
            with without_warnings():
                record_secret(run, t, users, outcome, bar.seconds)
        run.stage.check_round(run, t)


def _report(run: Run, t: int, outcome: Outcome) -> None:
    """Write the round's line of public and released values, and call the callbacks."""
    metrics = released_metrics(run, t, outcome.released) | outcome.metrics
    every = run.recipe.evaluation.every if run.recipe.evaluation else None
    if every and t % every == 0 and t < run.plan.rounds and run.processes.main:
        with run.progress.unlogged():
            metrics |= run.stage.public_metrics(run, t)
    # All processes tell their callbacks the same, so that one that stops the run stops them all.
    log_metrics(run, run.processes.from_main(metrics))


def complete(run: Run) -> Any:
    """Evaluate, run the remaining rounds, evaluate again, and write policy and results."""
    stage, main = run.stage, run.processes.main
    card = privacy_card(run.recipe, run.plan, run.policy.dimension, run.key, run.earlier)
    card |= audits_of(run.folder)
    card["date"] = first_day(run.folder.path)
    card["rounding"] = run.rounding
    if run.plan.private and not run.earlier and (beside := runs_beside(run.folder, run.earlier)):
        # Whether they share users is private; that they are there is not.
        card["earlier_runs"] += f"; {len(beside)} private run(s) in the same folder are not counted"
    if run.reservation is not None:
        card["book"] = asdict(run.reservation)
    if main:
        write_json(run.folder.privacy, card)
        for warning in stage.warnings:
            print(f"dprlhf: warning: {warning}", file=sys.stderr)

    def of_base() -> Any:
        with run.policy.base():
            return stage.evaluate(run, "evaluation before")

    # Evaluations during the run are compared with the base model. Without them it can be evaluated
    # at the end, and the first round comes earlier.
    during = run.recipe.evaluation is not None and run.recipe.evaluation.every is not None
    before = of_base() if during else None
    seconds = stage.seconds_a_round(run)
    if seconds is not None:
        run.progress.expect(seconds / run.processes.count)
    run.progress.say(*plan_lines(run, seconds, card))
    try:
        run_rounds(run)
        stage.finish(run)
    finally:
        run.progress.close()
    before = before if during else of_base()
    after = stage.evaluate(run, "evaluation after")
    if main:
        write_policy(run.policy, run.folder, run.recipe, card, records_of_run(run))
        stage.write(run, before, after)
    run.progress.say(f"ended; about the private rows, for you alone: {run.folder.operator}")
    run.processes.wait()
    return stage.result(run, before, after)


def plan_lines(run: Run, seconds: float | None, card: dict[str, Any]) -> list[str]:
    """Return what an operator wants to read before the first round; all of it is public."""
    plan, trained = run.plan, run.recipe.policy
    rollout = run.recipe.rollout if isinstance(run.recipe, Recipe) else None
    whole = card.get("total", card)
    promise = "none: no noise is added (a baseline)"
    if plan.private:
        promise = f"epsilon {upwards(float(whole['epsilon']), 4)} at delta {whole['delta']:g}"
        promise += f", in total with {whole['runs']}" if "total" in card else ""
    if seconds is None:
        time = "unknown without public rows (evaluation)"
    else:
        rows = "public rows" if run.public is not None else "stand-in rows, which may be shorter"
        time = f"about {in_words(seconds / run.processes.count * plan.rounds)}, by {rows}"
    step = "is a round"
    if getattr(run.recipe.update, "loss_type", None) == "linear_reward":
        step = "is one of several after the only round"
    return [
        f"privacy   {promise}; {card['unit']}",
        f"users     {plan.users:,}, in {plan.rounds} round(s); each takes part"
        f" {plan.participations} time(s)",
        f"a step    {step}: about {plan.expected_batch_size:,.1f} users with at most"
        f" {run.recipe.data.prompts_in_round} prompt(s) each"
        + (f", {rollout.responses} responses to a prompt" if rollout is not None else ""),
        f"rows      {run.recipe.data.kept}"
        + (", and that is what rewards see" if rollout is not None else ""),
        f"machine   {run.processes.count} process(es), {run.policy.device}, {trained.dtype};"
        f" {run.policy.dimension:,} trained parameters of {trained.model_name_or_path}",
        f"time      {time}",
        f"folder    {run.folder.path}; about the private rows, for you alone:"
        f" {run.folder.operator}",
    ]


def write_policy(
    policy: CausalLMPolicy,
    folder: RunFolder,
    recipe: AnyRecipe,
    card: dict[str, Any],
    records: Sequence[Record],
) -> None:
    """Write ``policy/``: the trained weights with their model card and privacy record."""
    with replaced_folder(folder.policy) as fresh:
        policy.save(fresh)
        (fresh / "README.md").write_text(model_card(recipe, card), encoding="utf-8")
        attach(fresh, carried_with(card, records))


def rehearse_end(stage: Stage, prepared: PreparedRun, beside: Path | None) -> None:
    """Do what a run does at its end, in a temporary folder: what fails fails before a charge.

    Weights that are tied, for example, can be trained by an adapter and not be saved once it is
    merged. An adapter that starts at zero would not show it; so each parameter is moved at random
    for the time of the rehearsal. Only public rows are read.
    """
    policy, recipe, records = prepared.policy, stage.recipe, prepared.earlier.records
    card = privacy_card(recipe, prepared.plan, policy.dimension, bytes(32), prepared.earlier)
    try:
        with tempfile.TemporaryDirectory(dir=beside, prefix=".dprlhf-rehearsal-") as place:
            folder = RunFolder(Path(place))
            folder.recipe.write_text(dump_recipe(recipe), encoding="utf-8")
            write_json(folder.privacy, card)
            # Whole weights do not start at zero; an adapter may.
            whole = policy.network is policy.model
            with contextlib.nullcontext() if whole else random_adapter(policy, 0.05):
                write_policy(policy, folder, recipe, card, records)
                stage.rehearse(prepared, folder)
    except (DprlhfError, *EXITS):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:
            raise DprlhfError(f"{beside}: {error.strerror}; choose another output_dir") from None
        raise DprlhfError(
            "the end of the run was tried before its first round, and failed:"
            f" {type(error).__name__}: {one_line(error)}"
        ) from None
