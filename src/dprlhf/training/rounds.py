"""The steps around a round in every stage: remaining rounds, users, gate, checkpoint, Ctrl-C."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from types import FrameType
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf.boundary import BoundedSum, Private, Released, open_private, open_released
from dprlhf.errors import DprlhfError
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.plan import json_ready
from dprlhf.rewards.isolation import kept_process_state
from dprlhf.runs.checkpoint import load_checkpoint, save_checkpoint
from dprlhf.runs.earlier import Record, records_in
from dprlhf.runs.folder import JsonLines, append_secret
from dprlhf.training.run import Outcome, Run


class Interruptible:
    """Ctrl-C at a safe point: between charges at once, within a charge after it is saved.

    Turns SIGINT and SIGTERM into ``KeyboardInterrupt`` at a tick, or when the block ends. Raising
    inside a write would leave half a line. Outside the main thread nothing is installed.
    """

    def __init__(self) -> None:
        self._pending = False
        self._deferred = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._pending and kind is None:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending = True

    def defer(self) -> None:
        """Raise an interrupt that is pending, and defer later ones to the end of the block."""
        if self._pending and not self._deferred:  # an update may release several times a round
            raise KeyboardInterrupt
        self._deferred = True

    def checked(self, tick: Callable[[int], None]) -> Callable[[int], None]:
        """Return ``tick`` with a check for an interrupt after it."""

        def check(rows: int) -> None:
            tick(rows)
            if self._pending and not self._deferred:
                raise KeyboardInterrupt

        return check


def remaining_rounds(run: Run) -> Iterator[int]:
    """Load the last checkpoint of all parts of the run; yield the rounds not yet charged.

    A round that was charged but not saved is skipped, never repeated: its users are spent.
    """
    saved = load_checkpoint(run.folder, run.policy, run.optimizer, run.stage.stateful)

    def confirmed() -> int:
        assert run.gate is not None
        run.gate.ledger.confirm(saved)
        return run.gate.ledger.next_round

    first = run.processes.on_main(confirmed)
    run.progress.total(run.plan.rounds, done=first - 1)
    yield from range(first, run.plan.rounds + 1)


def users_of_round(run: Run, t: int) -> Private[NDArray[np.int64]]:
    """Return this process's users of round t."""
    return Private(run.processes.share(open_private(run.allocation).round(t)))


def gate_for_round(
    run: Run, t: int, interrupt: Interruptible
) -> Callable[[BoundedSum], Released[torch.Tensor]]:
    """Return the round's release function; every process gets the main process's release."""

    def release(bounded: BoundedSum) -> Released[torch.Tensor]:
        # From the charge to the checkpoint, Ctrl-C is deferred: a charged round that is not saved
        # has spent its users' budget without an update.
        interrupt.defer()
        return run.processes.on_main(lambda: cast("Gate", run.gate).release(t, bounded))

    return release


def records_of_run(run: Run) -> list[Record]:
    """Return the run's own privacy terms and those of the runs before it; main process only."""
    assert run.gate is not None
    terms = run.gate.ledger.entries[0].body
    return records_in(terms, run.recipe, run.folder.path.resolve().name)


def check_finite(run: Run, t: int) -> None:
    """Stop the run where the step of round t broke the policy or the optimizer's state.

    All of it is computed from RELEASED values and one made-up text. The weights from before the
    step stay in the checkpoint.
    """
    # The last one is a label of a classifier, which may have two.
    tokens = torch.arange(7, -1, -1, device=run.policy.device)[None]
    with torch.no_grad():
        answer = run.policy.response_logprobs(tokens, torch.ones_like(tokens), 1)
    state = [x for of_one in run.optimizer.state.values() for x in of_one.values()]
    tensors = [x for x in (*run.policy.parameters.values(), *state) if isinstance(x, torch.Tensor)]
    # A response that may not be sampled has the log-probability −∞.
    broken = bool(answer.isnan().any()) or any(not bool(x.isfinite().all()) for x in tensors)
    # With sharded weights a process sees its own part alone.
    if float(run.processes.sum(torch.tensor([float(broken)], dtype=torch.float64))) > 0:
        rounds, epsilon = run.plan.rounds, run.plan.guarantee.epsilon
        raise DprlhfError(
            f"after the step of round {t} the policy computes no numbers: lower"
            f" optimizer.learning_rate ({run.recipe.optimizer.learning_rate:g}) and start a run"
            f" anew with this one under previous; of its {rounds} rounds {rounds - t} are not"
            f" charged, but its users are owed the whole epsilon {epsilon:.4g} from the first on"
        )


def save(run: Run, t: int) -> None:
    """Write the checkpoint of round t, then commit the round in the ledger."""
    if run.gate is not None:
        carried = {"runs": [asdict(record) for record in records_of_run(run)]}
        save_checkpoint(run.folder, t, run.policy, run.optimizer, run.stage.stateful, carried)
        run.gate.ledger.commit(t)


def released_metrics(run: Run, t: int, released: Released[torch.Tensor]) -> dict[str, Any]:
    """Return the metrics that every stage logs, from a round's first release, ``[dimension]``."""
    vector = open_released(released, "released_metrics")
    return {
        "round": t,
        "epsilon": run.plan.guarantee.epsilon,
        "delta": run.plan.guarantee.delta,
        "released_gradient_norm": float(vector.norm()),
        "expected_noise_norm": math.sqrt(len(vector))
        * run.plan.noise_std_of(t)
        / run.plan.expected_batch_size,
    }


def released_values(released: Released[torch.Tensor]) -> list[float]:
    """Return the coordinates of a short vector that was released, such as statistics of users."""
    values: list[float] = open_released(released, "released_metrics").tolist()
    return values


def log_metrics(run: Run, metrics: dict[str, Any]) -> None:
    """Write a round's public and released values, and hand them to the callbacks.

    A callback gets numbers, also infinity as the ε of a baseline, which the file says in words.
    The working directory is afterwards what it was: the run folder may have a relative name.
    """
    if run.processes.main:
        in_file = metrics | {"epsilon": json_ready(metrics["epsilon"])}
        JsonLines(run.folder.metrics).write(in_file)
    for callback in run.callbacks:
        run.policy.set_up.put_back()  # it may save the tokenizer, which a reward may have used
        with kept_process_state():
            callback(dict(metrics))
    run.progress.show(metrics)


def record_secret(
    run: Run,
    t: int,
    users: Private[NDArray[np.int64]],  # Indices of this process's users of round t, [users]
    outcome: Outcome,  # The stage's result of the round; its norms are empty without clipping
    seconds: dict[str, float],
) -> None:
    """Keep the raw values of this process's users in ``secret/``, for the operator alone."""
    taken = open_private(outcome.norms)
    clipped = math.isfinite(run.plan.clip_norm)  # else there are no norms to count
    finite = taken[np.isfinite(taken)]
    quartiles = np.quantile(finite, [0.25, 0.5, 0.75]).tolist() if len(finite) else None
    name = f"telemetry-{run.processes.accelerator.process_index}.jsonl"
    values = {
        "round": t,
        "time": time.time(),
        "users": len(open_private(users)),
        "users_not_readable": len(open_private(users)) - len(taken) if clipped else None,
        **open_private(outcome.secret),
        "gradient_norm_quartiles": quartiles,
        "clipped_share": float((taken > run.plan.clip_norm).mean()) if len(taken) else None,
        "not_finite": int((~np.isfinite(taken)).sum()),
        "seconds": seconds,
    }
    append_secret(run.folder.secret / name, json.dumps(values) + "\n")
    where = f"round {t}"
    if run.processes.count > 1:
        where += f", process {run.processes.accelerator.process_index}"
    failed = sum((values.get("reward_failures") or {}).values())
    run.folder.tell_operator(
        f"{where}: {values['users']} users, {values['users_not_readable'] or 0} of them unreadable,"
        f" {failed} rewards failed"
    )
    problem = values.get("reward_problem")
    if problem and not run.told_operator:
        run.told_operator = True
        run.folder.tell_operator(f"round {t}: the first reward that failed: {problem}")
