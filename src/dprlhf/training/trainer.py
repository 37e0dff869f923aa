"""The training loop: the one-pass meta-algorithm of He & Zhou (2025, Algorithm 1), for every stage.

Every user's rows are drawn once (or k times, as planned). Values computed from them are ``Private``
until the gate releases them; only released values reach policy and optimizer.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from dprlhf.policies.foreign_hooks import refuse_foreign_hooks
from dprlhf.policies.optimizers import set_learning_rate, set_noise
from dprlhf.privacy.file_times import first_day
from dprlhf.rewards.isolation import without_warnings
from dprlhf.runs.card import audits_of, carried_with, privacy_card
from dprlhf.runs.folder import replaced_folder, write_json
from dprlhf.runs.lineage import attach
from dprlhf.runs.model_card import model_card
from dprlhf.training.interrupt import Interruptible
from dprlhf.training.rounds import (
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
from dprlhf.training.run import Batch, Outcome, Run


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
            set_noise(run.optimizer, run.plan.noise_std_of(t) / run.plan.expected_batch_size)
            with without_warnings():
                outcome = run.stage.update(
                    run, Batch(t, users, release, bar, interrupt.checked(bar.tick))
                )
                check_finite(run, t)
            if run.average is not None:
                run.average.update(t)
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
        with run.averaged(), run.progress.unlogged():
            metrics |= run.stage.public_metrics(run, t)
    # All processes tell their callbacks the same, so that one that stops the run stops them all.
    log_metrics(run, run.processes.from_main(metrics))


def complete(run: Run) -> Any:
    """Evaluate, run the remaining rounds, evaluate again, and write policy and results.

    Returns:
        The stage's result, such as :class:`dprlhf.training.reinforcement.Result`.
    """
    stage, main = run.stage, run.processes.main
    card = privacy_card(run.recipe, run.plan, run.policy.dimension, run.key, run.earlier)
    card |= audits_of(run.folder)
    card["date"] = first_day(run.folder.path)
    card["rounding"] = run.rounding
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
    try:
        run_rounds(run)
    finally:
        run.progress.close()
    if run.average is not None:
        run.average.apply()
    before = before if during else of_base()
    after = stage.evaluate(run, "evaluation after")
    if main:
        with replaced_folder(run.folder.policy) as fresh:
            run.policy.save(fresh)
            (fresh / "README.md").write_text(model_card(run.recipe, card), encoding="utf-8")
            attach(fresh, carried_with(card, records_of_run(run)))
        stage.write(run, before, after)
    run.processes.wait()
    return stage.result(run, before, after)
