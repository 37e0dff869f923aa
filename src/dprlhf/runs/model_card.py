"""The model card: the README of a run's policy, with the guarantee in words.

It is made from the run's recipe and its privacy card (:mod:`dprlhf.runs.card`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dprlhf.privacy.gaussian import downwards, upwards
from dprlhf.recipe import ADAPTERS, AnyRecipe

ABOUT_SECRET_FOLDER = (
    "not published; dprlhf never deletes it, so the operator decides how long it is kept: it is"
    " needed to continue the run, to audit it, and to check that later runs have other users. It"
    " holds what would undo the guarantee, and is deleted when none of these is wanted any more"
)
"""What both cards state of the folder ``secret/`` of a run."""

ABOUT_RESPONSES = (
    "may contain anything that the base model could write: the guarantee is about what they can"
    " tell of the users, not about their content"
)
"""What both cards state of the responses of the trained model."""


def model_card(recipe: AnyRecipe, card: dict[str, Any], *, merged: bool = False) -> str:
    """Return the model's README with the standard metadata and a privacy section."""
    public = "\n".join(f"- {line}" for line in card["assumed_public"])
    assumptions = "\n".join(f"- {line}" for line in card["assumptions"])
    trained = recipe.policy
    base = trained.model_name_or_path
    adapter = ADAPTERS[trained.adapter.type].description.format(
        rank=trained.adapter.rank, peft_type=(trained.adapter.peft or {}).get("peft_type")
    )
    if merged and trained.adapter.type != "full":
        adapter = f"Whole weights with the adapter merged ({adapter[0].lower()}{adapter[1:]})"
    lower = downwards(float(card["epsilon_lower"]), 4)
    rounding = card.get("rounding") or "not checked; assumed not to depend on the other rows"
    valued = "; ".join(
        f"the {name} policy {value}" for name, value in card.get("value", {}).items()
    )
    if valued:
        valued = f"Mean feedback by the users' logs: {valued}.\n\n"
    return f"""{_hub_metadata(recipe, merged)}
# {base} tuned with dprlhf

{adapter}, {recipe.purpose}.

## Privacy

{guarantee_sentence(card)}

In plain words: {in_plain_words(card)}

{valued}Data set of the users: {card.get("dataset", recipe.data.path)}.

Earlier runs: {card.get("earlier_runs", "see above")}.

Software: dprlhf {card["version"]}. Day on which the run began:
{card.get("date", "not on record")}.

The folder `secret/` of the run: {ABOUT_SECRET_FOLDER}.

Responses {ABOUT_RESPONSES}.

Accountant: {card["accountant"]}; lower bound on the same ε: {lower}.

Hyperparameter tuning: {card["tuning"]}.

Audit: {_audited(card)}.

Budget book: {_counted(card)}.

Rounding of a row in its batch: {rounding}.

Assumed public:

{public}

Assumptions:

{assumptions}
"""


def _hub_metadata(recipe: AnyRecipe, merged: bool) -> str:
    """Return the YAML header of a model's README, which the hub reads."""
    base, whole = recipe.policy.model_name_or_path, merged or recipe.policy.adapter.type == "full"
    # The hub refuses a card whose base model is no repository.
    relation = "finetune" if whole else "adapter"
    named = f"base_model: {base}\nbase_model_relation: {relation}\n" if is_hub_id(base) else ""
    return f"""---
{named}library_name: {"transformers" if whole else "peft"}
pipeline_tag: {recipe.hub_task}
tags:
- dprlhf
- differential-privacy
- {recipe.hub_tag}
---
"""


def guarantee_sentence(card: dict[str, Any]) -> str:
    """Return the guarantee in one sentence."""
    if not card["private"]:
        return "No privacy: this run adds no noise. It is a baseline for comparison."
    alone = (
        f"({upwards(card['epsilon'], 4)}, {upwards(card['delta'], 3)})-differential privacy where"
        f" neighbouring datasets differ in that {card['neighbouring']}; {card['unit']}; partition"
        f" {card['partition']}, {card['rounds']} rounds, noise multiplier"
        f" {card['noise_multiplier']:.4g}."
    )
    if "total" not in card:
        return alone
    whole = card["total"]
    return (
        f"In total, with {whole['runs']}: ({upwards(whole['epsilon'], 4)},"
        f" {upwards(whole['delta'], 3)})-differential privacy. This run alone: {alone}"
    )


def in_plain_words(card: dict[str, Any]) -> str:
    """Return what the guarantee leaves to a guess about one user, without mathematics."""
    if not card["private"]:
        return "nothing is promised: whoever has the model may find out who took part."
    if card["risk"] is None:
        return "with the earlier runs together, nothing is promised."
    return (
        "take somebody who knows everything but whether one user's data took part, which was"
        " decided by the toss of a fair coin. Whatever they compute from what the run published,"
        f" they guess right in at most {percent(card['risk']['best_guess'])} of 100 cases; without"
        f" it, in 50. {hit_rates(card['risk'])}"
    )


def hit_rates(risk: dict[str, Any]) -> str:
    """Return in a sentence how many of those who took part a test can tell."""
    rates = risk["tpr_at_fpr"].items()
    pairs = ", ".join(f"{percent(tpr)}% at {100 * float(fpr):g}%" for fpr, tpr in rates)
    return f"Largest true-positive rates of a test, at false-positive rates: {pairs}."


def percent(share: float) -> str:
    """Format an upper bound on a share in percent, rounded up to three digits.

    >>> percent(0.7310586), percent(0.5), percent(0.00094431)
    ('73.2', '50', '0.0945')
    """
    return upwards(100 * share, 3)


def audits_on(card: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all audits that a card states, in their order."""
    several = card.get("audits", [])
    held = several if isinstance(several, list) else []
    return [audit for audit in held if isinstance(audit, dict)]


def _audited(card: dict[str, Any]) -> str:
    audits = audits_on(card)
    if not audits:
        return "not run"
    refuted = [audit for audit in audits if not audit["holds"]]
    audit = refuted[0] if refuted else audits[-1]
    word = "refuted: " if refuted else ""
    terms = " in the accountant's terms" if audit.get("accountants_terms") else ""
    shown = (
        f"{word}an attack with {audit['canaries']} canary users ({audit['space']} space) shows"
        f" epsilon >= {downwards(float(audit['bound']), 4)}{terms} at confidence"
        f" {audit['confidence']:.0%}"
    )
    power = audit.get("power")
    if power:
        shown += (
            f"; it would have seen noise {power['noise']:.2%} too small with probability"
            f" {power['probability']:g}"
        )
    if not audit.get("can_refute", True):
        shown += "; with so few canaries its guesses could not refute the claim"
    if len(audits) > 1:
        shown += f"; of {len(audits)} audits on record {len(refuted)} refuted the claim"
    return shown


def _counted(card: dict[str, Any]) -> str:
    if "book" not in card:
        return "none; other runs on the same users count only where they are named above"
    book = card["book"]
    return (
        f"reservation {book['number']} in book {book['book']}; each user's budget over all runs is"
        f" epsilon {upwards(book['epsilon'], 4)} at delta {upwards(book['delta'], 3)}"
    )


def is_hub_id(model: str) -> bool:
    """Return whether a model's name is a hub repository's, and not a folder's or an asset's."""
    return bool(re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", model)) and not Path(model).exists()
