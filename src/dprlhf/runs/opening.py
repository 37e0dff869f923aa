"""Opening a run folder: its key, its ledger, and the check that the users are the same as before.

Users are identified in ``secret/`` only: by a digest of the data, so that a run is continued with
the same users, and by hashes of the users, so that a later run can check that it shares none.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dprlhf.boundary import Private, open_private
from dprlhf.data.columns import MOST_BYTES
from dprlhf.data.public import Guides, used_rows
from dprlhf.data.users import LOOKED_AT, Prompts, Users
from dprlhf.errors import DprlhfError
from dprlhf.privacy.ledger import Ledger, read_opened
from dprlhf.privacy.plan import Plan
from dprlhf.privacy.randomness import commitment
from dprlhf.recipe import IN_MEMORY, AnyRecipe, dump_recipe
from dprlhf.runs.earlier import Earlier, records_of
from dprlhf.runs.folder import RunFolder, write_atomically


def open_folder(folder: RunFolder, recipe: AnyRecipe, *, create: bool) -> bytes:
    """Return the secret key of a run; a new run gets its folder, key and recipe first."""
    if not create:
        return folder.open()
    key = folder.create()
    write_atomically(folder.recipe, dump_recipe(recipe))
    return key


def how_to_continue(folder: RunFolder, recipe: AnyRecipe) -> str:
    """Return the command that continues a run, or the call where its users were given in Python."""
    if recipe.data.path != IN_MEMORY:
        return f"dprlhf resume {folder.path}"
    call = "resume" if recipe.stage == "rl" else "resume_stage"
    return (
        f"dprlhf.{call}({str(folder.path)!r}, …) with what was passed before; a trainer with"
        " train(resume_from_checkpoint=True)"
    )


_OTHER_USERS = "the users are not the ones that this run started with"


def open_ledger(
    recipe: AnyRecipe, plan: Plan, folder: RunFolder, key: bytes, users: Users, earlier: Earlier
) -> Ledger:
    """Open the ledger of a new run or of one that is continued."""
    # The digest of the data stays in secret/: published, it would confirm a guess at the data.
    digest_file = folder.secret / "data-digest"
    digest = open_private(users.digest())
    held = digest_file.read_text("utf-8") if digest_file.exists() else None
    if (held is None) == folder.ledger.exists():
        lost = digest_file if held is None else folder.ledger
        raise DprlhfError(
            f"{lost}: missing; this run cannot be continued, because what it spent is no longer"
            " known. Start a new run"
        )
    if held is None:
        hashes = io.BytesIO()
        np.save(hashes, open_private(users.identities()))
        write_atomically(folder.identities, hashes.getvalue(), mode=0o600)
        write_atomically(digest_file, digest, mode=0o600)
    elif held != digest:
        raise DprlhfError(
            f"data {recipe.data.path!r}: {_OTHER_USERS}; some would be drawn twice. Start a new run"
        )
    return Ledger(
        folder.ledger,
        {
            **plan.terms(),
            **earlier.terms(),
            "unit": recipe.data.unit,
            "recipe_sha256": recipe_digest(recipe),
            "key_commitment": commitment(key),
        },
    )


def present(folder: RunFolder, users: Users) -> Users:
    """Return a run's users without those who have withdrawn."""
    held = _withdrawn(folder)
    if not held["users"]:
        return users
    if "groups" in held:  # the rows of those who have withdrawn may be gone, and decide nothing
        users = users.of_groups(held["groups"])
    digest = open_private(users.digest())
    if digest not in held["digests"]:  # of other data: the check of the run's users says so
        return users
    deleted = held["digests"].index(digest)
    before, after = held["users"][:deleted], held["users"][deleted:]
    users = users.with_gaps({number for numbers in before for number in numbers})
    gone = {number for numbers in after for number in numbers}
    return users.without(gone) if gone else users


def withdraw(folder: RunFolder, recipe: AnyRecipe, users: Users, names: Sequence[str]) -> int:
    """Leave users out of the rest of a run, and return how many have withdrawn so far."""
    digest_file, digest = folder.secret / "data-digest", open_private(users.digest())
    held = _withdrawn(folder)
    if digest in held["digests"][-1:]:  # also after a crash between the two files written below
        write_atomically(digest_file, digest, mode=0o600)
    elif digest != digest_file.read_text("utf-8"):
        raise DprlhfError(f"data {recipe.data.path!r}: {_OTHER_USERS}")
    gone = {number for numbers in held["users"] for number in numbers}
    new = sorted(set(open_private(users.numbers_of(names))) - gone)
    if new:
        left = users.without(new)
        after = open_private(left.digest())
        if groups := left.groups():
            held["groups"] = groups
        held["users"].append(new)
        held["digests"] = [*(held["digests"] or [digest]), after]
        # In this order: after a crash between both the run is refused, and erasing again mends it.
        write_atomically(folder.withdrawn, json.dumps(held), mode=0o600)
        write_atomically(digest_file, after, mode=0o600)
    return len(gone) + len(new)


def _withdrawn(folder: RunFolder) -> dict[str, list[Any]]:
    """Return the numbers of users by withdrawal, and the data's digests before and after each."""
    if not folder.withdrawn.is_file():
        return {"users": [], "digests": []}
    held: dict[str, list[Any]] = json.loads(folder.withdrawn.read_text("utf-8"))
    return held


def check_declared_rows_unchanged(
    folder: RunFolder, recipe: AnyRecipe, public: Users | None
) -> None:
    """Hold ``declared_public`` to the rows for which it was said, when a run is continued.

    The rows are checked anew at each start, but for those that were declared; without this, a
    resumed run could be handed the users' own rows under the old declaration.
    """
    if public is None or recipe.evaluation is None or not recipe.evaluation.declared_public:
        return
    file, digest = folder.secret / "declared-public.txt", open_private(public.digest())
    if not file.exists():
        write_atomically(file, digest, mode=0o600)
    elif file.read_text("utf-8") != digest:
        raise DprlhfError(
            "evaluation.data: declared_public was said of other rows than the run has now: give the"
            " same rows, or set it to false for rows of nobody among the users"
        )


def check_same_users(users: Users, gathered: Callable[[str], Sequence[str]]) -> None:
    """Check that all processes of a launch have read the same rows in the same order.

    Each takes its share of a round's users by their numbers. A list that a program shuffles anew in
    each process would put a user on two of them, or in two rounds.
    """
    if len(set(gathered(open_private(users.digest())))) > 1:
        raise DprlhfError(
            "the processes of this launch have read other users, or the same in another order, so"
            " that some would be drawn twice: give each of them the same rows (shuffle with a fixed"
            " seed, or once, before the launch)"
        )


def recipe_digest(recipe: AnyRecipe) -> str:
    """Return a digest of the settings that must stay the same when a run is continued.

    What the evaluation declares may change later.
    """
    free: Any = {
        "output_dir": True,
        "tracking": True,
        "evaluation": {"declared_public"},
        "privacy": {"book", "dataset"},
    }
    fixed = recipe.model_dump(mode="json", exclude=free)
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()


def check_disjoint(recipe: AnyRecipe, users: Users, beside: Path | None = None) -> list[str]:
    """Check that runs declared disjoint have no user of the same name or with the same row.

    Of the runs that are returned this is declared alone: the hashes of their users are not at hand.
    """
    declared = [p.run for p in recipe.previous if p.users == "disjoint"]
    if not declared:
        return []
    from dprlhf.runs.comparing import overlap, users_of

    own = open_private(users.identities())
    uncompared = []
    for run in declared:
        earlier = records_of(Path(run))[0].run
        held = users_of(Path(run), earlier, beside)
        if held is None:
            uncompared.append(earlier)
            print(
                f"dprlhf: previous: {run}: users: disjoint is declared, and was not compared: the"
                " run's folder, which has the hashes of its users, is not at hand",
                file=sys.stderr,
            )
        elif np.isin(own, held).any():
            raise overlap(Path(run).name, "this run")
    return uncompared


def uncounted(folder: RunFolder, users: Users, earlier: Earlier) -> list[str]:
    """Return the names of private runs that share users with this run and are not counted.

    They are in the same parent folder, and not among those under ``previous`` or before these.

    The answer depends on the users, so it is for ``secret/`` and a terminal, never for a log.
    """
    runs = runs_beside(folder, earlier)
    if not runs:
        return []
    from dprlhf.runs.comparing import read_identities

    beside: list[tuple[str, NDArray[np.uint64]]] = []
    for run in runs:
        with contextlib.suppress(DprlhfError):  # a broken one is not this run's
            beside.append((run.path.name, read_identities(run.identities)))
    own = open_private(users.identities())
    return [name for name, held in beside if np.isin(own, held).any()]


def runs_beside(folder: RunFolder, earlier: Earlier) -> list[RunFolder]:
    """Return the private runs in the same parent folder that a run does not count; public facts."""
    counted, beside = {record.run for record in earlier.records}, []
    for held in sorted(folder.path.absolute().parent.glob("*/secret/users.npy")):
        run = RunFolder(held.parent.parent)
        if run.path == folder.path.absolute():
            continue
        with contextlib.suppress(DprlhfError, OSError, KeyError):
            terms = read_opened(run.ledger)[0].body
            if terms["noise_multiplier"] and terms["key_commitment"] not in counted:
                beside.append(run)
    return beside


def left_out(users: Users, cut: Callable[[Prompts], Sequence[bool]], most: int) -> list[str]:
    """Return lines with the number of rows that a run leaves out, cannot read, or cuts.

    The numbers depend on the users, so they are for ``secret/`` and a terminal, never for a log.
    """
    counts = open_private(users.left_out(cut))
    meaning = {
        "unmatched": "of people of whom one is a user with somebody else (data.user_column): left"
        " out",
        "beyond": f"beyond the first {most} of their user (data.max_prompts_per_user): left out",
        "missing": "without a prompt, or another value that is read: they contribute nothing",
        "unreadable": "that cannot be read, as where the chat template refuses a conversation, or"
        f" of more than {MOST_BYTES:,} bytes: they contribute nothing",
        "empty": "empty: only a start token is read",
        "cut": "longer than the recipe keeps: cut to the tokens that it does keep",
    }
    lines = [f"{counts[kind]:,} {about}" for kind, about in meaning.items() if counts[kind]]
    if lines and users.count > LOOKED_AT:
        lines.append(f"(of the prompts, those of {LOOKED_AT:,} users were looked at)")
    return lines


def check_public(
    recipe: AnyRecipe,
    users: Users,
    public: Users | None,
    guides: Guides | None = None,  # The rows to which update.subspace is fitted; None without one
    *,
    probed: int | None = 0,
) -> None:
    """Check that no public row is a user's, whatever the two sources are called.

    Rows are the same if their texts are (with the completions, in a supervised stage), and also if
    they name the same user in ``data.user_column``. One bit about the users is shown: whether the
    run is refused, not for which row or how many. ``evaluation.declared_public`` skips the check of
    its rows, unless they are the users' rows as a whole: no declaration makes those public.
    """
    owners = recipe.data.owners
    shown: dict[str, Private[dict[str, NDArray[np.uint64]]]] = {}
    evaluation = recipe.evaluation
    if public is not None and evaluation is not None and evaluation.declared_public:
        if public.has_rows_of(users):
            raise DprlhfError(
                "evaluation.data: these are the users' rows, all of them, and"
                f" {_SHOWN['evaluation']}: take rows of nobody among the users. declared_public is"
                " for public rows that some user has as well, and does not make the users' data"
                " public"
            )
    elif public is not None and evaluation is not None:
        used = used_rows(recipe)
        first = None  # all rows
        if used is not None and probed is not None:
            first = max(used, evaluation.prompts + probed)
        shown["evaluation"] = public.traces(owners, first)
    if guides is not None and guides.rows is not public:
        shown["update.subspace"] = guides.rows.traces(owners)
    private = open_private(users.traces(owners)) if shown else {}
    for section, traces in shown.items():
        public_hashes = open_private(traces)
        # A prompt that was cut is compared with whole texts alone: many texts begin alike.
        pairs = (("text", "text"), ("text", "prompt"), ("prompt", "text"), ("user", "user"))
        if any(np.isin(public_hashes[a], private[b]).any() for a, b in pairs):
            raise DprlhfError(
                f"{section}.data: some of its rows are users' rows, too (the same text"
                + (f", or the same {' or '.join(owners)}" if owners else "")
                + f"), and {_SHOWN[section]}: take rows of nobody among the users"
                + _DECLARE[section]
            )


_SHOWN = {
    "evaluation": "evaluation writes prompts and scores in the open",
    "update.subspace": "the directions that are fitted to them are used without noise",
}

_DECLARE = {
    "evaluation": "; or, if they were public before, set evaluation.declared_public=true (of a"
    " trainer: privacy_declared_public=True, for the eval_dataset of its making)",
    "update.subspace": "",
}
