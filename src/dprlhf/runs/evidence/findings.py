"""What a run's public records show: alerts, the charge of each round, the runs that count.

Alerts are what a reader has to know before relying on any answer of the evidence.
"""

from __future__ import annotations

import math
import re
from typing import Any

from dprlhf.privacy.gaussian import upwards
from dprlhf.privacy.plan import delta_warning, epsilon_warning, json_ready
from dprlhf.recipe import Source
from dprlhf.runs.evidence.records import Records
from dprlhf.runs.evidence.words import pair
from dprlhf.runs.model_card import audits_on


def alerts_of(records: Records, limit: float | None) -> list[dict[str, str]]:
    """Return what has to be known before any answer, each with what to do about it."""
    found: list[dict[str, str]] = []

    def alert(what: str, do: str) -> None:
        found.append({"what": what, "do": do})

    for sentence in records.contradictions:
        alert(sentence, "Do not rely on this run's ε until the cause is known.")
    if not records.private:
        alert(
            "No guarantee: this run, or one that it builds on, added no noise.",
            "Do not publish what it left if its users expect privacy.",
        )
    threshold = threshold_crossed(records, limit)
    if threshold is not None:
        alert(threshold, "Decide whether the result may be used at all; noise cannot be added now.")
    asked = records.recipe.privacy.epsilon
    if asked is not None and records.alone.epsilon > asked * (1 + 1e-6) and records.private:
        alert(
            f"This run alone costs {pair(records.alone.epsilon, records.alone.delta)}, more than"
            f" the ε of {asked:g} that its recipe asks for.",
            "Do not rely on this run's ε until the cause is known.",
        )
    if not records.finished:
        alert(
            f"The run is not finished: {len(records.committed)} of {records.rounds} rounds"
            " are saved.",
            f"dprlhf resume {records.name}",
        )
    for source in records.recipe.sources:
        problem = lineage_problem(source, records)
        if problem:
            alert(problem, "Establish what it was trained on, by whom, and on whose data.")
    large = epsilon_warning(records.total.epsilon)
    if large and records.private:
        alert(f"{large}.", "Do not present this as a strong guarantee; train with a smaller ε.")
    warning = delta_warning(records.total.delta, int(records.terms.get("users") or 1))
    if warning and records.private:
        alert(f"{warning}.", "Train with a smaller privacy.delta.")
    audit = audit_facts(records)
    if audit is not None and audit["refuted"]:
        alert("An audit refuted the stated ε.", "Do not rely on this run's ε; report it.")
    return found


def rounds_of(records: Records) -> list[dict[str, Any]]:
    """Return each planned round with its charge, and ε and δ spent up to it.

    The whole plan's ε is owed from the first charge on: under random allocation nobody may know
    which round a user was in, and with known batches the users of the first round have spent all of
    it. So the sum steps up once, and never down.
    """
    charged, saved = set(records.charged), set(records.committed)
    before = records.before
    spent: dict[str, Any] = {
        "epsilon": before.epsilon if before else 0.0,
        "delta": before.delta if before else 0.0,
    }
    rows = [{"round": 0, "charged": False, "saved": False, **spent}]
    for t in range(1, max([records.rounds, *charged, *saved]) + 1):
        if t in charged:
            spent = {"epsilon": records.total.epsilon, "delta": records.total.delta}
        rows.append({"round": t, "charged": t in charged, "saved": t in saved, **spent})
    return [json_ready(row) for row in rows]


def runs_of(records: Records) -> list[dict[str, Any]]:
    """Return this run and the earlier ones that count towards the total, latest first."""
    return [
        {
            "name": record.name,
            "stage": record.stage,
            "this": index == 0,
            "commitment": record.run,
            "noise_multiplier": record.mechanism["noise_multiplier"],
            "rounds": record.mechanism["rounds"],
            "partition": record.mechanism["partition"],
            "tuning_runs": record.tuning_runs,
        }
        for index, record in enumerate(records.runs)
    ]


def audit_facts(records: Records) -> dict[str, Any] | None:
    """Return what the card says of its audits, whichever version wrote it; None without one.

    The numbers are those of the first audit that refuted the claim; if none did, of the latest.
    ``count`` and ``refuting`` are the numbers of all audits and of those that refuted, and
    ``chance`` is the probability, at most, with which one of them refutes a claim that is true.
    """
    found = [_facts_of(audit, records) for audit in audits_on(records.card)]
    if not found:
        return None
    refuting = [audit for audit in found if audit["refuted"]]
    sure = [audit["confidence"] for audit in found if audit["confidence"] is not None]
    return {
        **(refuting[0] if refuting else found[-1]),
        "count": len(found),
        "refuting": len(refuting),
        "chance": min(1.0, sum(1 - c for c in sure)) if len(sure) == len(found) else None,
    }


def _facts_of(audit: dict[str, Any], records: Records) -> dict[str, Any]:
    """Return one audit's numbers; whether the claim is refuted is decided again from them."""

    def number(name: str) -> float | None:
        value = audit.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if math.isfinite(value) else None

    bound = number("bound")
    return {
        "bound": bound,
        "confidence": number("confidence"),
        "canaries": number("canaries"),
        "guesses": number("guesses"),
        "right": number("right"),
        "space": audit.get("space"),
        "can_refute": audit.get("can_refute") is not False,
        "power": _power(audit.get("power")),
        "accountants_terms": audit.get("accountants_terms") is True,
        "refuted": audit.get("holds") is False
        or bool(audit.get("refuted_by"))
        or (bound is not None and bound > records.alone.epsilon),
    }


def threshold_crossed(records: Records, limit: float | None) -> str | None:
    """Return a sentence on the first round at which ε was above the threshold."""
    if limit is None or not records.private:
        return None
    for row in rounds_of(records):
        if row["epsilon"] > limit:
            when = "before this run began" if row["round"] == 0 else f"in round {row['round']}"
            return (
                f"ε rose above the threshold of {limit:g} {when}: it is"
                f" {upwards(row['epsilon'], 4)}."
            )
    return None


def _power(power: Any) -> str | None:
    """Return what the audit stated beforehand that it would notice; None if it stated nothing."""
    try:
        return f"noise {power['noise']:.1%} too small, with probability {power['probability']:g}"
    except (TypeError, KeyError, ValueError):
        return None  # an audit of an earlier version, or of a run without noise


def lineage_problem(source: Source, records: Records) -> str | None:
    """Return a sentence if nobody can say what a model that the run starts from was trained on."""
    if source.trained_on_private_users:
        return (
            f"The {source.label} was declared as trained on the same people, at a cost that no"
            " total counts."
        )
    if source.key is None or not source.path or source.path.startswith("asset:"):
        return None
    told = f"the {source.label}: released by the earlier run "
    if any(str(line).startswith(told) for line in records.card.get("assumed_public", [])):
        return None
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source.path):
        return None  # a name on the Hugging Face hub; the recipe declares it public
    return (
        f"The {source.label} comes from a folder, not from a public place; that it never saw the"
        " same people's data is the operator's word alone."
    )
