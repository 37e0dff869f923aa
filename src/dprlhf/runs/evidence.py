"""The evidence on a run for an assessor: one page, and the same content as JSON.

Each answer is a figure of this run with the files that it rests on, or "not measured". Alerts are
what a reader has to know before relying on any answer.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import binom

from dprlhf.errors import DprlhfError, extra
from dprlhf.privacy.accounting import Mechanism, PrivacyCost, epsilon
from dprlhf.privacy.gaussian import downwards, upwards
from dprlhf.privacy.ledger import Entry, read_opened
from dprlhf.privacy.plan import delta_warning, epsilon_warning, json_ready
from dprlhf.recipe import AnyRecipe, Source, load_any_recipe
from dprlhf.runs.card import (
    audits_on,
    guarantee_sentence,
    hit_rates,
    in_plain_words,
    percent,
    read_card,
    software_version,
)
from dprlhf.runs.checkpoint import last_checkpoint
from dprlhf.runs.earlier import Record, records_of, risk_of, total_of
from dprlhf.runs.folder import RunFolder, write_atomically, write_json
from dprlhf.runs.opening import recipe_digest
from dprlhf.runs.report import finite_number


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


NOT_MEASURED = "not measured"
_DISTRUST = "Do not rely on this run's ε until the cause is known."


class Written(NamedTuple):
    """The files of the evidence, and its alerts as sentences."""

    page: Path
    json: Path
    alerts: list[str]


def write_evidence(
    run: str | Path,
    out: str | Path | None = None,  # The folder to write to; None takes comply in the run folder
    *,
    limit: float | None = None,
    date: datetime.date | None = None,  # The day to state; None takes today's, in UTC
) -> Written:
    """Write the evidence on a run, from its public files alone."""
    with extra("report", "dprlhf comply"):
        import jinja2

    if limit is not None and not 0 < limit < math.inf:
        raise DprlhfError(f"--limit must be a positive number, not {limit:g}")
    day = date or datetime.datetime.now(datetime.UTC).date()
    records = read_records(Path(run))
    stands, total = records.private and not records.contradictions, records.total
    risk = json_ready(asdict(risk_of(records.runs))) if records.private else None
    counted = {**records.card, "risk": risk}
    none = "no confirmed guarantee" if records.private else "no guarantee"
    statement: dict[str, Any] = {
        "format": "dprlhf evidence 2",
        "date": day.isoformat(),
        "software": f"dprlhf {software_version()}",
        "run": records.name,
        "commitment": records.terms["key_commitment"],
        "guarantee": {
            "stands": stands,
            "epsilon": json_ready(total.epsilon) if stands else None,
            "delta": total.delta if stands else None,
            "sentence": guarantee_sentence(records.card) if stands else none,
            "in_plain_words": in_plain_words(counted) if stands else none,
            "risk": risk if stands else None,
        },
        "limit": limit,
        "alerts": [{"what": what, "do": do} for what, do in alerts_of(records, limit)],
        "answers": [
            {"question": question, "answer": answer, "files": files}
            for question, answer, files in answers_of(records, risk if stands else None)
        ],
        "assumed_public": list(records.card.get("assumed_public", [])),
        "assumptions": list(records.card.get("assumptions", [])),
        "files": hashes(records.folder),
    }
    source = resources.files("dprlhf").joinpath("runs/evidence.html.j2").read_text("utf-8")
    page = jinja2.Template(source, autoescape=True, undefined=jinja2.StrictUndefined).render(
        s=statement
    )
    folder = Path(out) if out is not None else Path(run) / "comply"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "evidence.html", page)
    except OSError as error:
        raise DprlhfError(f"{folder}: {error.strerror}; name another folder with --out") from None
    # With the page's hash in the JSON, a signature of the JSON covers both.
    statement["page_sha256"] = hashlib.sha256(page.encode()).hexdigest()
    write_json(folder / "evidence.json", statement)
    alerts = [alert["what"] for alert in statement["alerts"]]
    return Written(folder / "evidence.html", folder / "evidence.json", alerts)


def answers_of(records: Records, risk: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    """Return each question with its answer and the files that the answer rests on."""
    total, before, card = records.total, records.before, records.card
    rounds = records.terms["rounds"]
    own, *earlier = records.runs
    audit = audit_facts(records)
    paid, plan, book = "ledger.jsonl, privacy.json", "ledger.jsonl", card.get("book")

    def cost(epsilon: float, delta: float) -> str:
        return f"ε ≤ {upwards(epsilon, 4)}, δ = {delta:g}" if risk else "not confirmed"

    guesses = rates = mu = "not confirmed"
    if risk:
        guesses, rates = f"at most {percent(risk['best_guess'])} of 100", hit_rates(risk)
        mu = f"μ ≤ {upwards(risk['gdp_mu'], 4)}, δ = {risk['delta']:g}"
    attacked = bounded = could = NOT_MEASURED
    if audit and audit["guesses"]:
        count, right = int(audit["guesses"]), int(audit["right"] or 0)
        chance = binom.sf(right - 1, count, 0.5)
        attacked = f"{right} of {count} ({audit['space']} space); by chance p = {chance:.2g}"
    if audit and audit["bound"] is not None:
        terms = " in the accountant's terms" if audit["accountants_terms"] else ""
        bounded = f"ε ≥ {downwards(audit['bound'], 4)}{terms}, confidence {audit['confidence']}"
        could = "yes" if audit["can_refute"] else "no: too few canary users"
    names = ", ".join(f"{record.name} ({record.stage})" for record in earlier) or "none"
    counted = f"{book['book']}, reservation {book['number']}" if isinstance(book, dict) else "none"
    return [
        ("Cost with all earlier runs", cost(total.epsilon, total.delta), paid),
        ("Cost of this run alone", cost(records.alone.epsilon, records.alone.delta), paid),
        ("Spent before this run", cost(before.epsilon, before.delta) if before else "0", plan),
        ("Right guesses about one user that the guarantee allows",
         guesses, paid),
        ("Tests of membership that the guarantee allows", rates, paid),
        ("Gaussian differential privacy, but for δ", mu, paid),
        ("Noise multiplier", f"{own.mechanism['noise_multiplier']:.4g}", plan),
        ("Accountant", records.alone.accountant, plan),
        # Whoever was in round 1 has spent all of it, so the whole ε is owed from the first on.
        ("Rounds charged, each before its release",
         f"{len(records.charged)} of {rounds}; the whole ε is owed from the first", plan),
        ("Right guesses of an attack with canary users", attacked, "privacy.json"),
        ("Right guesses of an attack with the run's own users", NOT_MEASURED, "privacy.json"),
        ("Lower bound on ε by an audit", bounded, "privacy.json"),
        ("Could that audit refute the claim", could, "privacy.json"),
        ("Audits on record, and those that refuted the claim",
         f"{audit['count']}, {audit['refuting']}" if audit else "0, 0", "privacy.json"),
        ("Earlier runs counted", names, "ledger.jsonl, recipe.yaml"),
        ("Trial runs", str(card.get("tuning", NOT_MEASURED)), "privacy.json"),
        ("Budget book of all runs on these users", counted, "privacy.json"),
        ("Models it starts from", "; ".join(s.label for s in records.recipe.sources),
         "recipe.yaml"),
    ]  # fmt: skip


def alerts_of(records: Records, limit: float | None) -> list[tuple[str, str]]:
    """Return what has to be known before any answer, each with what to do about it."""
    alerts = [(sentence, _DISTRUST) for sentence in records.contradictions]
    total, before, audit = records.total, records.before, audit_facts(records)
    if not records.finished:
        saved = f"The run is not finished: {len(records.committed)} rounds are saved."
        alerts.append((saved, f"dprlhf resume {records.name}"))
    unknown = [p for s in records.recipe.sources if (p := _unknown_origin(s, records))]
    alerts += [(p, "Establish what it was trained on, by whom, on whose data.") for p in unknown]
    if audit and audit["refuted"]:
        alerts.append(("An audit refuted the stated ε.", _DISTRUST))
    if not records.private:
        said = "No guarantee: this run, or one that it builds on, added no noise."
        return [*alerts, (said, "Do not publish what it left if its users expect privacy.")]
    if limit is not None and total.epsilon > limit and (records.charged or before):
        early = before is not None and before.epsilon > limit
        when = "before this run began" if early else f"in round {min(records.charged, default=1)}"
        said = f"ε rose above the threshold of {limit:g} {when}: it is {upwards(total.epsilon, 4)}."
        alerts.append((said, "Decide whether the result may be used: noise cannot be added now."))
    asked = records.recipe.privacy.epsilon
    if asked is not None and records.alone.epsilon > asked * (1 + 1e-6):
        said = f"ε = {upwards(records.alone.epsilon, 4)} is more than the recipe's {asked:g}."
        alerts.append((said, _DISTRUST))
    if large := epsilon_warning(total.epsilon):
        do = "Do not present this as a strong guarantee; train with a smaller ε."
        alerts.append((f"{large}.", do))
    if loose := delta_warning(total.delta, int(records.terms.get("users") or 1)):
        alerts.append((f"{loose}.", "Train with a smaller privacy.delta."))
    return alerts


def audit_facts(records: Records) -> dict[str, Any] | None:
    """Return what the card says of its audits: of the first that refuted, else of the latest.

    Whether the claim is refuted is decided again, from each audit's numbers.
    """
    lines = []
    for audit in audits_on(records.card):
        names = ("bound", "confidence", "guesses", "right")
        facts = {name: finite_number(audit.get(name)) for name in names}
        bound = facts["bound"]
        lines.append({
            **facts,
            "space": audit.get("space"),
            "can_refute": audit.get("can_refute") is not False,
            "accountants_terms": audit.get("accountants_terms") is True,
            "refuted": audit.get("holds") is False
            or bool(audit.get("refuted_by"))
            or (bound is not None and bound > records.alone.epsilon),
        })  # fmt: skip
    refuting = [facts for facts in lines if facts["refuted"]]
    counts = {"count": len(lines), "refuting": len(refuting)}
    return {**[*refuting, *reversed(lines)][0], **counts} if lines else None


def hashes(folder: RunFolder) -> dict[str, str]:
    """Return the SHA-256 hash of each public file that the evidence is about, by its path.

    Links are left out, because they could lead into ``secret/``.
    """
    named = [folder.recipe, folder.privacy, folder.ledger, folder.metrics, folder.evaluation]
    places = [folder.path / name for name in ("policy", "model", "checkpoint")]
    digests = {}
    for file in [*named, *(file for place in places for file in sorted(place.rglob("*")))]:
        name = file.relative_to(folder.path)
        if file.is_file() and file.resolve() == folder.path.resolve() / name:
            with file.open("rb") as content:  # which may be larger than the memory
                digests[name.as_posix()] = hashlib.file_digest(content, "sha256").hexdigest()
    return digests


def _unknown_origin(source: Source, records: Records) -> str | None:
    """Return a sentence if nobody can say what a model that the run starts from was trained on."""
    if source.key is None or not source.path or source.path.startswith("asset:"):
        return None
    prefix = f"the {source.label}: released by the earlier run "
    if any(str(line).startswith(prefix) for line in records.card.get("assumed_public", [])):
        return None
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source.path):
        return None  # a name on the Hugging Face hub; the recipe declares it public
    return (
        f"The {source.label} comes from a folder, not from a public place; that it never saw the"
        " same people's data is the operator's word alone."
    )
