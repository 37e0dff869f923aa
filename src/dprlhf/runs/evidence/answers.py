"""The answers to the five requirements, drawn from a run's public records.

Each answer says what is shown, what is missing with the command that would supply it, and which
files it rests on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scipy.stats import binom

from dprlhf.runs.evidence.findings import audit_facts, lineage_problem, threshold_crossed
from dprlhf.runs.evidence.records import Records
from dprlhf.runs.evidence.requirements import REQUIREMENTS, Requirement
from dprlhf.runs.evidence.words import at_least, of_hundred, pair, right_guesses
from dprlhf.runs.model_card import guarantee_sentence

SHOWN, PARTLY, MISSING = "shown", "partly shown", "missing"
CONTRADICTED, NONE = "contradicted", "no guarantee"
_CHANCE = 0.05
"""An attack counts as better than guessing if chance alone does so well less often than this."""

Answer = dict[str, Any]


def answers_of(records: Records, limit: float | None) -> list[Answer]:
    """Return the answer to each requirement, in their order."""
    given = (
        _documented(records),
        _attacked(records),
        _by_round(records, limit),
        _audited(records),
        _all_covered(records),
    )
    return [
        _quoted(requirement) | answer
        for requirement, answer in zip(REQUIREMENTS, given, strict=True)
    ]


# --- the five answers ----------------------------------------------------------------------------


def _quoted(requirement: Requirement) -> Answer:
    return {
        "title": requirement.title,
        "number": requirement.number,
        "draft_number": requirement.draft,
        "level": requirement.level,
        "text": requirement.text,
        "source": requirement.source,
        "draft_text": requirement.draft_text,
        "draft_source": requirement.draft_source,
    }


def _answer(
    status: str,
    said: list[str],
    files: list[str],
    facts: list[tuple[str, str]] | None = None,
    missing: list[tuple[str, str]] | None = None,
) -> Answer:
    return {
        "status": status,
        "answer": said,
        "facts": [list(fact) for fact in facts or []],
        "missing": [{"what": what, "command": command} for what, command in missing or []],
        "files": files,
    }


def _standing(records: Records, otherwise: str) -> str:
    """Return the status of an answer that rests on the stated ε."""
    if records.contradictions:
        return CONTRADICTED
    return otherwise if records.private else NONE


def _documented(records: Records) -> Answer:
    files = ["privacy.json", "ledger.jsonl", "recipe.yaml"]
    status = _standing(records, SHOWN)
    if status == NONE:
        return _answer(
            NONE,
            [
                "No. The run added no noise, or builds on one that added none. It is a baseline for"
                " comparison, and nothing limits what it gives away about a person."
            ],
            files,
        )
    if status == CONTRADICTED:
        return _answer(
            CONTRADICTED,
            ["The run's records contradict one another (see the alerts), so no ε is confirmed."],
            files,
        )
    unit = records.runs[0].unit
    said = [
        "Yes. The run was trained with differential privacy, and its ε is recorded twice: on its"
        " privacy card, and in the first line of its ledger, written before training began. For"
        " this page ε was computed again from the recorded noise, and nothing smaller is stated"
        " here than was found.",
        "One person is one row of the training data. Somebody with several rows is not protected"
        " as a whole, but row by row."
        if unit is None
        else f"One person is everybody's rows with the same value in the column '{unit}', taken"
        " together.",
    ]
    facts = [
        ("In total", pair(records.total.epsilon, records.total.delta)),
        ("This run alone", pair(records.alone.epsilon, records.alone.delta)),
        ("Compared are", f"data sets in which {records.card['neighbouring']}"),
        ("Unit", str(records.card["unit"])),
        ("Method", records.alone.accountant),
        ("Statement", guarantee_sentence(records.card)),
    ]
    return _answer(SHOWN, said, files, facts)


def _attacked(records: Records) -> Answer:
    run, audit = records.name, audit_facts(records)
    own = (
        "An attack on this very model with its own people's data. Its result depends on them"
        " without protection, so it must not be published; it is no file of the run folder.",
        "in Python: dprlhf.audit.membership_scores and dprlhf.audit.roc; keep the result secret",
    )
    if audit is None or not audit["guesses"]:
        return _answer(
            MISSING,
            [
                "No attack on this run is on record. What is there is the promise itself, which"
                f" limits every attack: {_limit_on_attacks(records)}."
            ],
            ["privacy.json"],
            missing=[
                ("A simulated attack with invented users.", f"dprlhf audit {run} --space prompt"),
                own,
            ],
        )
    guesses, right = int(audit["guesses"]), int(audit["right"] or 0)
    better = bool(binom.sf(right - 1, guesses, 0.5) < _CHANCE)
    said = [
        f"In part. In a simulated attack on the same training procedure, {_thousands(audit)}"
        " invented users were put in or left out by a coin, and the attacker, who chose the cases"
        f" that he was surest of, was right in {right} of {guesses} guesses; blind guessing gives"
        f" about {guesses // 2}.",
        "That is more than chance explains, so the requirement in its strict wording, no better"
        " than guessing, is not met by this attack. The attacker here is far stronger than a real"
        f" one: he designed the users that he looks for. The promise allows {_allowed(records)}."
        if better
        else "That is no more than chance explains.",
    ]
    missing = [own]
    if audit["space"] != "prompt":
        missing.insert(
            0,
            (
                "An attack through the recipe's own model; the one on record is on a small model"
                " of known weights.",
                f"dprlhf audit {run} --space prompt",
            ),
        )
    return _answer(
        CONTRADICTED if audit["refuted"] else PARTLY,
        said,
        ["privacy.json"],
        [("Right guesses", f"{right} of {guesses}"), ("Kind of attack", _kind(audit))],
        missing,
    )


def _by_round(records: Records, limit: float | None) -> Answer:
    charged = records.charged
    said = [
        "Yes. Each round is written to the ledger before anything computed from people leaves the"
        " run. Each line holds the fingerprint of the one before it; the chain was checked for this"
        " page and is unbroken.",
        "The budget is spent as a whole: ε and δ of the full plan are owed from the first round"
        " on, and further rounds of the plan add nothing. That is the cautious reading: a run that"
        " stops early has no smaller ε.",
        "A round that is not in the plan, or was recorded before, is refused while training.",
    ]
    crossed = threshold_crossed(records, limit)
    if crossed:
        said.append(f"Alert: {crossed}")
    elif limit is not None:
        said.append(f"The threshold of ε = {limit:g} was not crossed in any round.")
    missing = []
    if limit is None:
        missing.append(
            (
                "Your organisation's threshold for ε. Without one, this page can only compare with"
                " the run's own plan.",
                f"dprlhf comply {records.name} --limit EPSILON",
            )
        )
    lost = sorted(set(charged) - set(records.committed))
    facts = [
        ("Rounds recorded", f"{len(charged)} of {records.rounds} planned"),
        ("Spent before this run", pair(*_spent(records.before)) if records.before else "nothing"),
        ("Spent now", pair(*_spent(records.total)) if charged else "nothing by this run"),
    ]
    if lost:
        facts.append(
            ("Recorded, then lost in a crash", f"round {', '.join(map(str, lost))}; counted fully")
        )
    status = _standing(records, SHOWN if limit is not None else PARTLY)
    if status in (CONTRADICTED, NONE):
        said = ["No. See the alerts."] if status == CONTRADICTED else [
            "The rounds are recorded, but without noise there is no ε to add up."
        ]  # fmt: skip
    return _answer(status, said, ["ledger.jsonl", "metrics.jsonl"], facts, missing)


def _audited(records: Records) -> Answer:
    run, audit = records.name, audit_facts(records)
    if audit is None or audit["bound"] is None:
        return _answer(
            MISSING,
            ["No. Nobody has audited this run, or the result is not on its privacy card."],
            ["privacy.json"],
            missing=[("An audit.", f"dprlhf audit {run}")],
        )
    confidence = audit["confidence"]
    sure = "a confidence that is not on record" if confidence is None else f"{confidence:.0%}"
    if audit["refuted"] and audit["bound"] > records.alone.epsilon:
        verdict = "It is larger than the stated ε: the statement is refuted."
    elif audit["refuted"]:
        verdict = (
            "It is not larger than the stated ε, but a test of the noise, the clipping or the draw"
            " of the rounds failed: the statement is refuted."
        )
    else:
        verdict = (
            "It is not larger than the stated ε, so the two are consistent. An audit can refute a"
            " statement, but it cannot prove one: a small value means that this attack saw little."
        )
    what = "ε in the accountant's terms" if audit["accountants_terms"] else "the true ε"
    said = [
        f"An audit found that {what} is at least {at_least(audit['bound'])}, at {sure}.",
        verdict,
        "The tolerance is zero: any value above the stated ε counts as a refutation.",
        *_of_several(audit),
    ]
    missing = []
    if not audit["can_refute"]:
        said.append("With so few invented users its guesses could not have refuted the statement.")
        missing.append(("An audit with more of them.", f"dprlhf audit {run} --canaries 4000"))
    if audit["space"] != "prompt":
        said.append(
            "The attack was not black-box but stronger: it saw every released number, not only the"
            " model's answers."
        )
        missing.append(("An attack that asks the model.", f"dprlhf audit {run} --space prompt"))
    facts = [
        ("Measured from below", f"ε ≥ {at_least(audit['bound'])}"),
        ("Confidence", sure),
        ("Stated for this run", pair(*_spent(records.alone))),
        ("Invented users", _thousands(audit)),
        *([("It would have noticed", audit["power"])] if audit["power"] else []),
        (
            "Audits on record",
            f"{audit['count']}, of which {audit['refuting']} refuted the statement",
        ),
    ]
    whole = SHOWN if audit["can_refute"] else PARTLY
    status = CONTRADICTED if audit["refuted"] else _standing(records, whole)
    return _answer(status, said, ["privacy.json"], facts, missing)


def _all_covered(records: Records) -> Answer:
    own, *earlier = records.runs
    names = ", ".join(f"{r.name} ({r.stage})" for r in earlier) or "none"
    tuning = str(records.card.get("tuning", "not on record"))
    doubtful = [p for s in records.recipe.sources if (p := lineage_problem(s, records))]
    said = [
        "The total counts this run, all earlier runs that it names, and the trial runs that its"
        " recipe declares. The proofs for each kind of run, and for adding them up, are in the"
        " software's documentation (docs/proofs).",
        "What this page cannot see: a run on the same people that this one does not name. dprlhf"
        " makes no embeddings of private data that outlast a run.",
        *doubtful,
    ]
    missing = []
    if own.tuning_runs == 0 and not tuning.startswith("declared"):
        missing.append(
            (
                "A statement on trial runs: how many runs on the same people chose the settings.",
                "privacy.tuning_runs=NUMBER in the recipe of the next run",
            )
        )
    missing.append(
        (
            "Other runs on the same people, if there are any: their sum.",
            f"dprlhf privacy total {records.name} OTHER_RUN",
        )
    )
    if "book" not in records.card:
        missing.append(
            (
                "A budget book, which counts what each person spends over all runs and refuses a"
                " run that would exceed it.",
                "dprlhf budget create, then privacy.book in the recipe of the next run",
            )
        )
    facts = [
        ("In total", pair(*_spent(records.total)) if records.private else "no guarantee"),
        ("Earlier runs counted", names),
        ("Trial runs", tuning),
        ("Counted over all runs by", _counted(records)),
        ("Models it starts from", "; ".join(source.label for source in records.recipe.sources)),
        ("Proofs", ", ".join(f"docs/proofs/{note}.md" for note in _proofs(records))),
    ]
    status = _standing(records, PARTLY)
    return _answer(status, said, ["ledger.jsonl", "recipe.yaml", "privacy.json"], facts, missing)


def _proofs(records: Records) -> list[str]:
    """Return the names of the notes that prove what the runs state, in ``docs/proofs``."""
    update = getattr(records.recipe, "update", None)
    oracle = getattr(getattr(update, "least_squares", None), "name", None)
    holds = {
        "users_and_clipping": True,
        "resume": True,
        "composition": len(records.runs) > 1 or any(run.tuning_runs for run in records.runs),
        "subspace": getattr(update, "subspace", None) is not None,
        "sufficient_statistics": oracle == "sufficient-statistics",
        "gradient_oracles": oracle in ("projected-sgd", "improper-batch-sgd"),
    }
    of_accountant = (_accounting_notes(run.mechanism) for run in records.runs)
    return sorted({name for name in holds if holds[name]}.union(*of_accountant))


def _accounting_notes(mechanism: Mapping[str, Any]) -> set[str]:
    """Return the notes about a mechanism's ε. Poisson sampling's is that of dp-accounting."""
    partition, correlated = mechanism["partition"], mechanism.get("bands", 1) > 1
    allocated = partition == "random-allocation"
    holds = {
        "random_allocation_accounting": allocated and not correlated,
        "correlated_random_allocation": allocated and correlated,
        "correlated_noise": correlated,
        "disjoint_batches": partition in ("fixed", "stream"),
        "releases_in_a_round": mechanism.get("releases_per_round", 1) > 1,
    }
    return {name for name in holds if holds[name]}


# --- parts of answers ----------------------------------------------------------------------------


def _spent(cost: Any) -> tuple[float, float]:
    return cost.epsilon, cost.delta


def _limit_on_attacks(records: Records) -> str:
    if not records.private or records.contradictions:
        return "here, however, there is no confirmed ε"
    return f"somebody who has to say whether a person's data were used is {_allowed(records)}"


def _allowed(records: Records) -> str:
    if not records.private:
        return "any number of right guesses"
    share = right_guesses(records.total.epsilon, records.total.delta)
    return f"right in at most {of_hundred(share)} of 100 cases where a coin decided"


def _of_several(audit: dict[str, Any]) -> list[str]:
    """Return what it means that more than one audit was run; nothing for one."""
    count, chance = audit["count"], audit["chance"]
    if count == 1:
        return []
    said = f"{count} audits of this run are on record, and {audit['refuting']} of them refuted it."
    if chance is not None:
        said += f" All together refute a true statement with probability at most {chance:.0%}."
    return [said]


def _thousands(audit: dict[str, Any]) -> str:
    count = audit["canaries"]
    return "an unknown number of" if count is None else f"{int(count):,}"


def _counted(records: Records) -> str:
    """Return who counts what the same people spend in other runs."""
    book = records.card.get("book")
    if not isinstance(book, dict):
        return "nobody, but for the runs named here"
    return f"budget book {book.get('book')}, reservation {book.get('number')}"


def _kind(audit: dict[str, Any]) -> str:
    kinds = {
        "gradient": "sees every released number, knows what each invented user adds to it",
        "prompt": "asks the recipe's own model how likely certain answers are",
    }
    return kinds.get(str(audit["space"]), str(audit["space"] or "not on record"))
