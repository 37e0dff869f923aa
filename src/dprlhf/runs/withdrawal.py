"""People who withdraw from a run: ``dprlhf erase``.

A withdrawn user stays in N and has no rows: fillers stand at its places in all rounds that have not
been released, so every other user's contribution is the same to the bit. That somebody withdrew is
written in ``secret/`` alone. What was released already cannot be taken back; the statement says
what it can still reveal.
"""

from __future__ import annotations

import contextlib
import datetime
import hmac
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dprlhf.data.in_memory import rows_of
from dprlhf.data.users import Users
from dprlhf.errors import DprlhfError
from dprlhf.privacy.ledger import Ledger, opened_terms
from dprlhf.privacy.plan import json_ready
from dprlhf.recipe import load_any_recipe
from dprlhf.runs.earlier import records_of, risk_of
from dprlhf.runs.folder import RunFolder, write_atomically
from dprlhf.runs.opening import present, withdraw

STATEMENTS = "withdrawals.jsonl"
"""The file in ``secret/`` with a statement for each call of :func:`erase`."""


def erase(run: str | Path, users: Sequence[str], *, prompts: Any = None) -> dict[str, Any]:
    """Leave withdrawn users out of all that a run has not released yet.

    The run must be stopped; ``dprlhf resume`` continues it. Afterwards the users' rows may be
    deleted from the data: the run continues on the rows that are left, as on all of them.

    Args:
        users: Their names in the user column; without one, the numbers of their rows, from 1, in
            the data that the run started with.
        prompts: The run's private rows, if they were in memory.

    Returns:
        The statement, which is added to ``secret/withdrawals.jsonl``: the number of ``people`` who
        have withdrawn so far, the rounds that were ``released`` of all ``rounds``, the ``risk``
        (upper bounds on what a guess whether all these people took part can gain, from everything
        that the run and its earlier runs may release), the ``ledger`` up to which this holds, and
        an HMAC-SHA256 of these under the run's key.

    Raises:
        DprlhfError: The run is under way, its data are not those that it started with, a name is
            nobody's, or nobody would be left.
    """
    folder = RunFolder(Path(run))
    key = folder.open()
    recipe = load_any_recipe(folder.recipe)
    if not folder.ledger.is_file():
        raise DprlhfError(
            f"{folder.path}: this run has not begun: leave their rows out of its data"
        )
    with contextlib.closing(Ledger(folder.ledger, opened_terms(folder.ledger))) as ledger:
        rows = rows_of(recipe.data, prompts)
        read = Users(rows, recipe.data, may_lack_prompts=recipe.rows_may_lack_prompts)
        people = withdraw(folder, recipe, present(folder, read), users)
        records = records_of(folder.path)
        private = all(record.mechanism["noise_multiplier"] for record in records)
        statement: dict[str, Any] = json_ready(
            {
                "run": records[0].run,
                "date": f"{datetime.date.today():%Y-%m-%d}",
                "people": people,
                "rounds": ledger.rounds,
                "released": len(ledger.charged),
                "risk": asdict(risk_of(records, people=people)) if private else None,
                "ledger": ledger.entries[-1].hash,
            }
        )
        text = json.dumps(statement, sort_keys=True)
        statement["hmac_sha256"] = hmac.new(key, text.encode(), "sha256").hexdigest()
        file, text = folder.secret / STATEMENTS, json.dumps(statement)
        before = file.read_text("utf-8") if file.is_file() else ""
        try:
            write_atomically(file, f"{before}{text}\n", mode=0o600)
        except DprlhfError as problem:
            raise DprlhfError(f"{problem}; they have withdrawn, and it would say: {text}") from None
    return statement
