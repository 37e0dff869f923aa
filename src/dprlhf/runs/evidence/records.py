"""A run's public records, read and checked against one another for the evidence.

Nothing here reads ``secret/``, and nothing outside the run folder. A record that contradicts
another one is reported, never mended.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Mechanism, PrivacyCost, epsilon
from dprlhf.privacy.ledger import Entry, read_opened
from dprlhf.recipe import AnyRecipe, load_any_recipe
from dprlhf.runs.card import read_card
from dprlhf.runs.checkpoint import last_checkpoint
from dprlhf.runs.earlier import Record, records_of, total_of
from dprlhf.runs.folder import RunFolder
from dprlhf.runs.opening import recipe_digest


@dataclass
class Records:
    """The public records of one run."""

    folder: RunFolder
    recipe: AnyRecipe
    card: dict[str, Any]  # Content of privacy.json; empty where it is missing or damaged
    entries: list[Entry]  # The ledger's entries, verified by their chain of hashes
    runs: list[Record]  # The terms of this run, then those of the earlier runs that it names
    alone: PrivacyCost  # Cost of this run by itself; ε is infinite without noise
    total: PrivacyCost  # Cost with all earlier runs and declared tuning runs
    before: PrivacyCost | None  # Cost of everything that ran before this run; None if nothing did
    finished: bool
    contradictions: list[str] = field(default_factory=list)  # Sentences on records that disagree

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.runs[0].name

    @property
    def terms(self) -> dict[str, Any]:
        """The terms that the ledger opened with."""
        return self.entries[0].body

    @property
    def private(self) -> bool:
        """Whether a finite total ε is stated."""
        return math.isfinite(self.total.epsilon)

    @property
    def charged(self) -> list[int]:
        """The charged rounds, in the ledger's order."""
        return [int(entry.body["round"]) for entry in self.entries if entry.is_charge]

    @property
    def committed(self) -> list[int]:
        """The rounds that the ledger has as saved, in its order."""
        return [int(entry.body["round"]) for entry in self.entries if entry.kind == "commit"]


def read_records(path: Path) -> Records:
    """Read and check a run's public records."""
    folder = RunFolder(path)
    folder.require()
    if not folder.ledger.is_file():
        raise DprlhfError(f"{folder.ledger}: missing; what this run spent is not known")
    entries = read_opened(folder.ledger)
    try:
        runs, recipe = records_of(path), load_any_recipe(folder.recipe)
        try:
            card, damaged = read_card(folder), []
        except DprlhfError:
            card, damaged = {}, ["The privacy card (privacy.json) is missing or damaged."]
        alone, total, before = _costs(runs)
        records = Records(
            folder=folder,
            recipe=recipe,
            card=card,
            entries=entries,
            runs=runs,
            alone=_no_smaller(alone, entries[0].body.get("epsilon")),
            total=_no_smaller(total, card.get("total", {}).get("epsilon")),
            before=before,
            finished=(folder.policy / "README.md").is_file(),
        )
        records.contradictions = [*damaged, *_contradictions(records, alone, total)]
    except DprlhfError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DprlhfError(f"{path}: the run's records lack or misstate {error}") from None
    return records


def _costs(runs: list[Record]) -> tuple[PrivacyCost, PrivacyCost, PrivacyCost | None]:
    """Compute again what the run costs alone, with all others, and what was spent before it."""
    own, *earlier = runs
    total = total_of(runs)
    if own.mechanism["noise_multiplier"]:
        alone = epsilon(Mechanism(**own.mechanism), own.delta)
    else:
        alone = total
    trials = own.tuning_runs - 1  # beside the one that stands for itself
    tuned = [Record(**{**asdict(own), "tuning_runs": trials})] if own.tuning_runs else []
    before = [*earlier, *tuned]
    return alone, total, total_of(before) if before else None


def _no_smaller(computed: PrivacyCost, stated: Any) -> PrivacyCost:
    """Return the cost, with the stated ε where that is larger."""
    if isinstance(stated, int | float) and stated > computed.epsilon:
        return PrivacyCost(**{**asdict(computed), "epsilon": float(stated)})
    return computed


def _contradictions(records: Records, alone: PrivacyCost, total: PrivacyCost) -> list[str]:
    terms, card = records.terms, records.card
    charges = _charges(records)
    # A page that asks for trust must not repeat a number that is certainly too small.
    for stated, computed, of in (
        (terms.get("epsilon"), alone, "the ledger"),
        (card.get("total", {}).get("epsilon"), total, "the total on the privacy card"),
    ):
        if isinstance(stated, int | float) and stated < computed.epsilon_lower * (1 - 1e-6):
            charges.append(
                f"The ε in {of} is {stated:.4g}, but the recorded noise costs at least"
                f" {computed.epsilon_lower:.4g}."
            )
    shared = (terms.keys() & card.keys()) - {"unit"}  # the card says the unit in words
    differing = sorted(name for name in shared if terms[name] != card[name])
    if differing:
        charges.append(f"Ledger and privacy card disagree on: {', '.join(differing)}.")
    if card and card.get("run") != terms["key_commitment"]:
        charges.append("The privacy card belongs to another run than the ledger.")
    if recipe_digest(records.recipe) != terms.get("recipe_sha256"):
        charges.append("recipe.yaml is not the recipe that the ledger was opened with.")
    return charges


def _charges(records: Records) -> list[str]:
    """Compare the charges with the plan, and with what the run left after its rounds."""
    charged, committed, rounds = records.charged, records.committed, records.terms["rounds"]
    planned = ("noise_multiplier", "clip_norm", "releases_per_round")
    charges = []
    if charged != sorted(set(charged)) or any(not 1 <= t <= rounds for t in charged):
        charges.append("The ledger charges a round twice, out of order or beyond the plan.")
    if any(
        entry.is_charge and entry.body.get(name) != records.terms[name]
        for entry in records.entries
        for name in planned
    ):
        charges.append("The ledger charges a round with other noise or another limit than planned.")
    metrics = records.folder.metrics
    lines = metrics.read_text("utf-8").splitlines() if metrics.is_file() else []
    logged = [int(json.loads(line)["round"]) for line in lines if line.endswith("}")]
    shown = {"metrics.jsonl": logged, "the ledger": committed}
    place, saved = last_checkpoint(records.folder), None
    if place is not None and (place / "state.json").is_file():
        saved = int(json.loads((place / "state.json").read_text("utf-8"))["round"])
    if saved:
        shown["the checkpoint"] = [saved]
    for name, its in shown.items():
        unpaid = sorted(set(its) - set(charged))
        if unpaid:
            which = ", ".join(map(str, unpaid))
            charges.append(f"Round {which} stands in {name}, but the ledger has no charge for it.")
    if saved is not None and saved < max(committed, default=0):
        charges.append("The checkpoint is older than the last round that the ledger has as saved.")
    if records.finished and not charged:
        charges.append("There is a final policy, but the ledger has no charge.")
    return charges
