"""A run's reservation in the budget book, and what ledgers on disk say of the book.

The whole planned cost is reserved before the ledger has its first charge. The ledger then records
the book's counter, which only rises. A book that is behind a ledger, be it the run's own, that of
a run beside it or of an earlier run, was restored from a backup and is refused. So is a ledger that
is behind the book, which sees it when a run is resumed and when it ends: another copy went on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from dprlhf import budget
from dprlhf.boundary import open_private
from dprlhf.data.in_memory import rows_of
from dprlhf.data.users import Users
from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Mechanism
from dprlhf.privacy.ledger import Ledger
from dprlhf.privacy.plan import Plan
from dprlhf.privacy.randomness import commitment
from dprlhf.recipe import AnyRecipe
from dprlhf.runs.earlier import Earlier, cost_terms
from dprlhf.runs.folder import RunFolder

NO_BOOK = (
    "no budget book (privacy.book or DPRLHF_BOOK): nobody counts what these users spend in other"
    " runs"
)


def reserve(
    recipe: AnyRecipe,
    plan: Plan,
    users: Users,
    earlier: Earlier,
    folder: RunFolder | None,
    *,
    commit: bool,
) -> budget.Reservation | None:
    """Reserve a run's whole planned cost for each of its users; None without a budget book.

    A resumed run finds the reservation that it has and pays nothing. Earlier runs that the book
    does not know are written down in it for these users, unless they are declared to have others.
    Without ``commit`` the book is only asked whether it would refuse.
    """
    name = budget.book_name(recipe.privacy.book)
    own = list(_marks([folder.path])) if folder is not None else []
    if name is None:
        if folder is not None and own:
            raise DprlhfError(
                f"{folder.ledger}: this run's cost is reserved in budget book {own[0].book}: name"
                " that book in DPRLHF_BOOK to continue"
            )
        return None
    if not plan.private:
        raise DprlhfError(
            "budget book: a run without privacy (epsilon = infinity) would exceed any budget; run"
            " baselines on other people's data, with privacy.book=none"
        )
    book = budget.Book(name)
    if folder is not None and own and own[-1].book != book.id:
        raise DprlhfError(
            f"{folder.ledger}: this run's cost is reserved in budget book {own[-1].book}, and"
            f" privacy.book or DPRLHF_BOOK names book {book.id}"
        )
    near = list(folder.path.parent.glob("*/")) if folder is not None else []
    marks = _marks([*near, *(Path(p.run) for p in recipe.previous)])
    held = folder is not None and folder.key.is_file()
    return book.reserve(
        budget.Spending(
            run=commitment(folder.open()) if folder is not None and held else "",
            name=folder.path.resolve().name if folder is not None else "",
            stage=recipe.stage,
            mechanism=Mechanism(**cost_terms(vars(plan.mechanism))),
            times=1 + earlier.tuning_runs,
        ),
        open_private(users.hashed(book.hashed)),
        dataset=recipe.privacy.dataset,
        unit=recipe.data.unit,
        earlier=[
            budget.Spending(r.run, r.name, r.stage, Mechanism(**r.mechanism), 1 + r.tuning_runs)
            for r in earlier.records
            if r.run not in earlier.disjoint
        ],
        marks=[*own, *marks],
        commit=commit,
    )


def follow(recipe: AnyRecipe, ledger: Ledger) -> None:
    """Tell the budget book how far a run's ledger has got, when it is resumed and when it ends."""
    run = ledger.entries[0].body["key_commitment"]
    book = budget.book_name(recipe.privacy.book)
    if book is not None:
        budget.Book(book).follow(run, [entry.hash for entry in ledger.entries])


def enrol(recipe: AnyRecipe, name: str, source: str, dataset: str) -> budget.Reservation:
    """Make the users of a recipe's data known to a budget book before their first run."""
    rows = rows_of(recipe.data, None)
    book, hashes = budget.Book(name), set[bytes]()
    for owner in (*recipe.data.owners,) or (None,):  # all, not only those of a run's pairs
        spec = recipe.data.model_copy(update={"user_column": owner})
        users = Users(rows, spec, may_lack_prompts=recipe.rows_may_lack_prompts)
        hashes |= open_private(users.hashed(book.hashed))
    return book.enrol(hashes, source, dataset=dataset, unit=recipe.data.unit)


def _marks(runs: Iterable[Path]) -> Iterator[budget.Mark]:
    """Yield the entries about budget books in the ledgers of some runs, of each in its order.

    The runs may be in progress, so lines that cannot be read are passed over: a run's own ledger is
    verified when it is opened, and what others say can only refuse a book.
    """
    for run in runs:
        path = RunFolder(run).ledger
        try:
            lines = path.read_text("utf-8").splitlines() if path.is_file() else []
        except (OSError, UnicodeDecodeError):
            continue
        opened = None
        for line in lines:
            if '"kind": "book"' not in line and opened is not None:
                continue
            try:
                entry = json.loads(line)
                if entry["kind"] == "open":
                    opened = entry["body"]["key_commitment"]
                elif opened is not None and entry["kind"] == "book":
                    body = entry["body"]
                    yield budget.Mark(opened, body["book"], body["reservation"], body["counter"])
            except (ValueError, KeyError, TypeError):
                continue
