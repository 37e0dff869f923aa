"""The assembly of a run from its recipe, up to the first round, for every stage.

:func:`load_parts` reads and checks what a recipe names and writes nothing; :func:`open_run` then
makes or opens the run folder. So an error in the recipe, the data, the model or a reward occurs
before a folder exists.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, cast

import torch

from dprlhf import budget
from dprlhf.data.columns import person_column
from dprlhf.data.in_memory import InMemoryInputs, R, rows_of
from dprlhf.data.public import check_form, guides, public_users
from dprlhf.data.users import Users
from dprlhf.errors import EXITS, DprlhfError, InterruptedRunError
from dprlhf.hardware import default_torch_state, native_dtype
from dprlhf.hub import hush_libraries
from dprlhf.policies.optimizers import make_optimizer
from dprlhf.privacy.file_times import stamp_run
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import opened_terms
from dprlhf.privacy.partition import allocate
from dprlhf.privacy.plan import Plan, check_promise, make_plan
from dprlhf.recipe import IN_MEMORY, AnyRecipe, experimental, without_effect
from dprlhf.rewards.isolation import captured
from dprlhf.runs.budget import NO_BOOK, follow, reserve
from dprlhf.runs.card import released_dimension
from dprlhf.runs.earlier import (
    Earlier,
    check_lineage,
    check_lineage_of_objects,
    read_earlier,
    records_of,
)
from dprlhf.runs.folder import RunFolder, write_atomically
from dprlhf.runs.lineage import mark
from dprlhf.runs.opening import (
    check_declared_rows_unchanged,
    check_disjoint,
    check_public,
    check_same_users,
    how_to_continue,
    left_out,
    open_folder,
    open_ledger,
    present,
    uncounted,
)
from dprlhf.training.made_up_rounds import check_layout
from dprlhf.training.processes import Processes
from dprlhf.training.progress import Progress
from dprlhf.training.run import PreparedRun, Run, Stage
from dprlhf.training.trainer import rehearse_end


def resolve_dtype(recipe: R, sources: InMemoryInputs) -> R:
    """Settle the dtype, so that a resumed run computes as it did before.

    It is the machine's choice; of a model that was given in Python, that of its weights.
    """
    if recipe.policy.dtype != "auto":
        return recipe
    dtype = str(native_dtype()).removeprefix("torch.")
    if recipe.classifier:
        dtype = "float32"
    elif recipe.policy.model_name_or_path == IN_MEMORY and sources.policy is not None:
        own = sources.policy.network.get_input_embeddings().weight.dtype
        dtype = "bfloat16" if own == torch.bfloat16 else "float32"
    trained = recipe.policy.model_copy(update={"dtype": dtype})
    return cast(R, recipe.model_copy(update={"policy": trained}))


def plan_of_run(
    recipe: AnyRecipe, users: Users, opened: Mapping[str, Any], sources: InMemoryInputs
) -> Plan:
    """Return the plan of a private run, or that of a run on stand-ins, which states no ε."""
    if sources.stand_in_plan is None:
        return plan_of(recipe, users, opened)
    plan = sources.stand_in_plan(recipe)
    if plan.private or plan.users != users.count:
        raise ValueError(
            "the plan of a run on stand-ins is for its own users and states no epsilon"
        )
    return plan


def plan_of(
    recipe: AnyRecipe, users: Users | int, opened: Mapping[str, Any] = MappingProxyType({})
) -> Plan:
    """Return the privacy plan of a recipe of any stage.

    ``opened`` has the terms that the ledger of a continued run states, whose adjacency, noise and ε
    it keeps; a new run has none.
    """
    privacy = recipe.privacy
    stated = opened.get("adjacency")
    if stated is None:
        check_promise(privacy.adjacency)
    settings: dict[str, Any] = {
        "users": users if isinstance(users, int) else users.count,
        "rounds": recipe.rounds,
        "delta": privacy.delta,
        "clip_norm": recipe.update.clip_norm,
        "partition": privacy.partition,
        "adjacency": stated or privacy.adjacency,
        "participations": privacy.participations,
        "releases_per_round": recipe.update.releases,
        "bands": privacy.bands,
    }
    if opened and privacy.max_guess is not None:
        # The search for the noise may end elsewhere on another processor: the stated one stays.
        privacy = privacy.asking(noise_multiplier=opened["noise_multiplier"])
    if privacy.max_guess is None:
        settings |= {"epsilon": privacy.epsilon, "noise_multiplier": privacy.noise_multiplier}
        return make_plan(**settings).continued(opened)
    from dprlhf.privacy.max_guess import plan_within

    return plan_within(privacy.max_guess, **settings).continued(opened)


Callback = Callable[[dict[str, Any]], None] | Any
"""A function of a round's metrics, or a ``transformers.TrainerCallback``."""

STAGES = {
    "rl": "reinforcement.Reinforcement",
    "sft": "supervised.fine_tuning",
    "reward": "supervised.reward_modelling",
    "dpo": "dpo.preference_optimization",
    "feedback": "linear_reward.learning_from_feedback",
}
"""The stages by the ``stage`` of their recipe, which :func:`load_parts` loads by name."""


_SHOWN = 3
"""Most runs beside this one that a warning names."""

_RUNNING = threading.Lock()

_LEAST_SPACE = 2**20
"""Bytes on a disk below which an error is put down to the full disk."""


def load_parts(
    recipe: AnyRecipe,
    sources: InMemoryInputs,
    processes: Processes,
    *,
    quiet: bool,
    folder: RunFolder | None = None,  # The run folder, new or to be continued; None for a dry run
    counted: bool = True,
) -> tuple[Stage, PreparedRun]:
    """Load and check everything that a recipe names, and settle what it leaves open."""
    hush_libraries()
    if recipe.tracking.report_to:
        from dprlhf.runs.trackers import check_installed

        check_installed(recipe.tracking.report_to)
    recipe = processes.on_main(lambda: resolve_dtype(recipe, sources))
    module, _, name = STAGES[recipe.stage].partition(".")
    make = getattr(importlib.import_module(f"dprlhf.training.{module}"), name)
    stage: Stage = make(recipe, sources)
    # Stand-ins are nobody's users: what earlier runs cost is for the real run to count.
    real = sources.stand_in_plan is None
    earlier = processes.on_main(lambda: read_earlier(recipe)) if real else Earlier()
    rows = rows_of(recipe.data, sources.prompts)
    users = Users(rows, recipe.data, may_lack_prompts=recipe.rows_may_lack_prompts)
    if folder is not None:
        users = present(folder, users)
    stage.check_rows(rows)
    if real and processes.main:
        owner = person_column(users.column_names)
        if recipe.data.user_column is None and owner is not None:
            print(
                "dprlhf: warning: every row is a user of its own, and the column"
                f" {owner!r} looks like the name of whoever a row is from: give it as user_column"
                " to protect all that each of them wrote",
                file=sys.stderr,
            )
    if processes.count > 1:
        check_same_users(users, processes.gathered)
    beside = folder.path.absolute().parent if folder else None
    apart = processes.on_main(lambda: check_disjoint(recipe, users, beside))
    earlier = Earlier(**{**vars(earlier), "uncompared": apart})
    public = public_users(recipe, sources.evaluation_prompts)
    check_form(users, public)
    guiding = guides(recipe, public)
    processes.on_main(lambda: check_public(recipe, users, public, guiding))
    opened = processes.on_main(lambda: opened_terms(folder.ledger) if folder else {})
    plan = plan_of_run(recipe, users, opened, sources)
    if counted:  # before the model is loaded, which may take long
        processes.on_main(lambda: reserve(recipe, plan, users, earlier, folder, commit=False))
    policy = stage.load_policy(public)
    # Before the checks, which leave in it what public prompts lead to.
    policy.encode([""], 1)  # a fast tokenizer holds the padding of its last call
    policy.set_up.keep(policy, "tokenizer")
    policy.set_up.keep(policy.network, "generation_config")
    stage.check_policy(users, policy)
    processes.place(policy)
    prepared = PreparedRun(
        recipe, plan, earlier, users, policy, public, processes, quiet, guides=guiding
    )
    with default_torch_state():  # a reward's module may set threads as it is loaded
        stage.settle(prepared)
    prepared.recipe = stage.recipe
    prepared.rounding = check_layout(policy, stage.shapes, processes)
    policy.set_up.keep(policy.network, "config")
    prepared.plan = plan_of_run(stage.recipe, users, opened, sources)
    with default_torch_state():
        stage.load(prepared)
    known, own = [record.run for record in earlier.records], opened.get("key_commitment")
    if real:
        # What came from the hub is on this machine now, and with it the records that it carries.
        processes.on_main(lambda: check_lineage(recipe, known))
        processes.on_main(lambda: check_lineage_of_objects(sources.models, known, own))
    return stage, prepared


@contextlib.contextmanager
def open_run(
    recipe: AnyRecipe,
    folder: RunFolder,
    sources: InMemoryInputs,
    *,
    create: bool,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    counted: bool = True,
) -> Iterator[Run]:
    """Yield a run that is ready for its next round, and close its files afterwards.

    An unexpected error inside the block becomes one line that quotes no user's data.
    """
    hush_libraries()  # before transformers is asked for its callbacks, for which it loads PEFT
    processes = Processes.connect()
    own_callbacks: list[Callback] = []
    if callbacks:
        from dprlhf.runs.trackers import as_functions, taken

        own_callbacks = as_functions(taken(callbacks), folder.path, recipe.rounds)
    if create:
        processes.on_main(folder.refuse_to_overwrite)
    with _only_run(), default_torch_state() as put_back_torch_state:
        stage, prepared = load_parts(
            recipe, sources, processes, quiet=quiet, folder=folder, counted=counted
        )
        if create and counted:
            place = folder.path.absolute()
            beside = next(p for p in (place, *place.parents) if p.is_dir())
            processes.on_main(lambda: rehearse_end(stage, prepared, beside))
        key, reservation = processes.on_main(
            lambda: _start(prepared, folder, create=create, counted=counted)
        )
        prepared.users.tell = folder.tell_operator
        if create and counted:
            processes.on_main(lambda: say_what_is_left_out(stage, prepared, folder))
        with _one_line_errors(folder, prepared.recipe), contextlib.ExitStack() as stack:
            gate: Gate | None = None
            trackers: list[Callback] = []
            policy = prepared.policy
            stack.enter_context(policy.without_dropout())
            stack.callback(policy.set_up.end)
            policy.set_up.put_back()
            if processes.main:
                stack.callback(stamp_run, folder.path)
                gate, trackers = _open_gate(prepared, folder, key, stack)
                if reservation is not None:
                    gate.ledger.note_book(reservation.entry(), resumed=not create)
            if reservation is not None:
                processes.on_main(lambda: _followed(prepared.recipe, gate, stack, create=create))
            if counted:  # a program may go on with the model that it passed, or that is returned
                records = processes.on_main(lambda: records_of(folder.path))
                mark(prepared.policy.network, {"runs": [asdict(record) for record in records]})
                policy.set_up.keep(policy.network, "config")
            stage.attach(folder)
            if processes.main:
                stamp_run(folder.path)  # after a kill, a file may have the time of its writing
            plan, settings = prepared.plan, stage.recipe.optimizer
            yield Run(
                **vars(prepared) | {"recipe": stage.recipe},
                stage=stage,
                reservation=reservation,
                folder=folder,
                key=key,
                allocation=allocate(plan, key),
                optimizer=make_optimizer(settings, policy.parameters.values()),
                gate=gate,
                progress=Progress(stage.rows_a_user, disable=quiet or not processes.main),
                callbacks=[*trackers, *own_callbacks],
                put_back_torch_state=put_back_torch_state,
            )


@contextlib.contextmanager
def _only_run() -> Iterator[None]:
    """Refuse a second run in this process, also one inside a callback of the first.

    What user code prints is kept secret for the whole process, and so are torch's settings.
    """
    if not _RUNNING.acquire(blocking=False):
        raise DprlhfError(
            "another run is under way in this process, whose output and settings of torch it would"
            " change: start this one after it has ended, or in a process of its own"
        )
    try:
        yield
    finally:
        _RUNNING.release()


def _start(
    prepared: PreparedRun, folder: RunFolder, *, create: bool, counted: bool
) -> tuple[bytes, budget.Reservation | None]:
    """Make or open the folder and reserve the run's cost; a refused new run leaves no folder."""
    recipe = prepared.recipe
    key = open_folder(folder, recipe, create=create)
    if not counted:
        return key, None
    try:
        reservation = reserve(
            recipe, prepared.plan, prepared.users, prepared.earlier, folder, commit=True
        )
    except budget.BrokenOffError:
        raise  # it may have been written down: the folder has the key to find it by
    except DprlhfError:
        if create:
            folder.discard()
        raise
    if reservation is None and prepared.plan.private:
        print(f"dprlhf: {NO_BOOK}", file=sys.stderr)
        if create and (beside := uncounted(folder, prepared.users, prepared.earlier)):
            named = ", ".join(beside[:_SHOWN]) + ", …" * (len(beside) > _SHOWN)
            warning = (
                f"warning: {len(beside)} private run(s) beside this one had some of the same users,"
                f" and their cost is not counted here ({named}): name under previous those that are"
                " kept"
            )
            folder.tell_operator(warning)
            # A terminal alone: that two runs share a user depends on who the users are, and a
            # job's log is passed on.
            if sys.stderr.isatty():
                print(f"dprlhf: {warning}", file=sys.stderr)
    return key, reservation


def say_what_is_left_out(
    stage: Stage, prepared: PreparedRun, folder: RunFolder | None = None
) -> None:
    """Say how many private rows are left out, unreadable or cut: to the operator, who has the rows.

    The numbers tell of users. They go to ``secret/operator.txt`` and, since a job's log is passed
    on, otherwise to a terminal alone.
    """
    if folder is None and not prepared.quiet:  # the plan of a run says so itself
        print(f"dprlhf: {prepared.recipe.data.kept}", file=sys.stderr)
    if folder is None and not sys.stderr.isatty():
        return
    with captured(None):  # a panic in compiled code prints the text that it failed on
        lines = left_out(
            prepared.users,
            lambda rows: stage.cut(prepared.policy, rows),
            prepared.recipe.data.max_prompts_per_user,
        )
    if folder is not None:
        folder.tell_operator(*(lines or ["no private row is left out, unreadable or cut"]))
    if lines and sys.stderr.isatty():
        print("dprlhf: of the private rows (said on a terminal alone):", file=sys.stderr)
        print("\n".join(f"  {line}" for line in lines), file=sys.stderr)


def _followed(
    recipe: AnyRecipe, gate: Gate | None, stack: contextlib.ExitStack, *, create: bool
) -> None:
    """Let the budget book see the ledger, at once where the run is resumed and when it ends."""
    assert gate is not None  # on the main process
    if not create:
        follow(recipe, gate.ledger)

    def ended() -> None:
        try:
            follow(recipe, gate.ledger)
        except DprlhfError as error:  # a book that is down must not cost a finished run
            print(f"dprlhf: warning: {error}", file=sys.stderr)

    stack.callback(ended)


def _open_gate(
    prepared: PreparedRun, folder: RunFolder, key: bytes, stack: contextlib.ExitStack
) -> tuple[Gate, list[Callback]]:
    """Open the ledger and the trackers, and return the gate and the trackers' callbacks."""
    recipe = prepared.recipe
    for feature in experimental(recipe):
        print(f"dprlhf: experimental: {feature}", file=sys.stderr)
    warnings = prepared.plan.warnings(released_dimension(recipe, prepared.policy.dimension))
    for warning in without_effect(recipe) + warnings:
        print(f"dprlhf: warning: {warning}", file=sys.stderr)
    check_declared_rows_unchanged(folder, recipe, prepared.public)
    ledger = open_ledger(recipe, prepared.plan, folder, key, prepared.users, prepared.earlier)
    stack.callback(ledger.close)
    config = {**recipe.model_dump(mode="json"), "plan": prepared.plan.terms()}
    gate = Gate(prepared.plan, ledger, key)
    if not recipe.tracking.report_to:
        return gate, []
    from dprlhf.runs.trackers import tracked

    return gate, list(stack.enter_context(tracked(recipe.tracking, folder, config)))


@contextlib.contextmanager
def _one_line_errors(folder: RunFolder, recipe: AnyRecipe) -> Iterator[None]:
    """Hide the text of an unexpected error, which may quote a user's data."""
    again = how_to_continue(folder, recipe)
    try:
        yield
    except DprlhfError:
        raise
    except KeyboardInterrupt:
        raise InterruptedRunError(f"interrupted at a safe point; continue with: {again}") from None
    except (*EXITS, GeneratorExit):
        raise
    except BaseException as error:  # a panic in compiled code is no Exception
        if _disk_is_full(error, folder):
            raise DprlhfError(
                f"the disk of {folder.path} is full: free some space, then continue with: {again}"
            ) from None
        report = folder.secret / "error.txt"
        try:
            write_atomically(report, traceback.format_exc(), mode=0o600)
        except Exception:  # shown, it would show the first error with it
            raise DprlhfError(
                f"{type(error).__name__} during the run; its text may quote a user, and it is lost,"
                f" as {report} cannot be written; continue with: {again}"
            ) from None
        raise DprlhfError(
            f"{type(error).__name__} during the run; its text may quote a user, so it is in"
            f" {report}; continue with: {again}"
        ) from None


def _disk_is_full(error: BaseException, folder: RunFolder) -> bool:
    """Return whether an error comes from a full disk, whatever type a library gave it."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    # torch and safetensors raise errors of their own types for a write that failed.
    try:
        return shutil.disk_usage(folder.path).free < _LEAST_SPACE
    except OSError:  # the folder is gone, or on another machine
        return False
