"""The privacy card: what a run guarantees, in ``privacy.json``; the model card, made from it.

The model card is the README of a run's policy, with the guarantee in words.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from dprlhf.errors import DprlhfError
from dprlhf.privacy.gaussian import downwards, upwards
from dprlhf.privacy.plan import Plan, json_ready
from dprlhf.privacy.randomness import commitment
from dprlhf.recipe import ADAPTERS, IN_MEMORY, AnyRecipe, Source, experimental, load_any_recipe
from dprlhf.runs.earlier import Earlier, Record, all_records, risk_of, runs_of_model, total
from dprlhf.runs.folder import RunFolder, write_atomically, write_json
from dprlhf.runs.lineage import FILE, Carried, in_card

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


_NEIGHBOURS = {
    "add-remove": "one user is added or removed",
    "zero-out": "one user's data is replaced by nothing",
    "replace-one": "one user's data is replaced by another user's",
}

_TUNING = {
    None: "not declared; each tuning run on the same users would cost its own ε",
    0: "declared: none on the same users",
}


def privacy_card(
    recipe: AnyRecipe, plan: Plan, dimension: int, key: bytes, earlier: Earlier
) -> dict[str, Any]:
    """Return the guarantee and everything that it rests on, JSON-ready.

    With earlier runs it states their ``total`` beside the guarantee of this run alone.
    """
    owners, most = recipe.data.owners, recipe.data.prompts_in_round
    columns = " and ".join(map(repr, owners))
    unit = f"all rows with one value of {columns}" if owners else "one row of the prompt dataset"
    graph = []  # of who shares rows with whom
    if len(owners) > 1:
        unit = (
            f"one person; each row belongs to all whom {columns} name, and each person is in the"
            " rows of one such group, which are clipped together"
        )
        graph = [f"who shares rows with whom ({columns}), from which the groups are chosen"]
    risk = None  # what a guess about one person can gain from this run and the earlier ones
    if plan.private and math.isfinite(total(plan, earlier).epsilon):
        risk = asdict(risk_of(all_records(plan, earlier)))
    declared, guides = "", []
    if recipe.evaluation is not None and recipe.evaluation.declared_public:
        declared = " (declared to be public even where a user has the same text)"
    spec = getattr(recipe.update, "subspace", None)
    if spec is not None:
        where = "evaluation.data" if spec.data is None else spec.data.path
        guides = [f"the prompts that the directions of update.subspace are fitted to, {where}"]
    card = {
        "private": plan.private,
        "dataset": _dataset(recipe),
        "unit": f"user = {unit}, at most {most} prompt{'s' if most > 1 else ''}",
        "neighbouring": _NEIGHBOURS[plan.adjacency],
        **plan.terms(),
        **({"total": _total(plan, earlier)} if earlier else {}),
        "risk": risk,
        "sensitivity": plan.sensitivity if plan.private else None,
        "dimension": dimension,
        "noise_to_clip_ratio": plan.noise_to_clip_ratio(released_dimension(recipe, dimension)),
        "released": recipe.released(plan.releases_per_round, plan.noise_multiplier),
        "assumed_public": [
            f"the {source.label}: {_origin(source, earlier)}" for source in recipe.sources
        ]
        + [
            f"the number of {'groups' if graph else 'users'}, {plan.users}",
            *graph,
            "the names of the data's columns, and whether each holds texts, numbers or dates",
            f"the recipe, its seed, and the public evaluation prompts{declared}",
            *guides,
            *_selection(recipe),
        ],
        "assumptions": [
            *plan.guarantee.assumptions,
            "secret/ stays secret: it holds the key that allocation and noise come from",
            "no copy or backup of the run folder is run on: each time, the rounds that run again"
            " release once more about their users",
            *recipe.assumptions,
            *([] if earlier.tuning_runs else ["the recipe was not tuned on the same users"]),
        ],
        "experimental": list(experimental(recipe)),
        "tuning": _TUNING.get(recipe.privacy.tuning_runs)
        or f"declared: {_runs(earlier)} on the same users, which the total counts",
        "earlier_runs": ", ".join(record.name for record in earlier.records)
        or "none declared: other runs on the same users would cost their own ε",
        "secret_folder": ABOUT_SECRET_FOLDER,
        "responses": ABOUT_RESPONSES,
        "version": software_version(),
        "run": commitment(key),
    }
    return {"in_plain_words": in_plain_words(card), **card}


def software_version() -> str:
    """Return the version of this package, or that it runs from its source without installation."""
    try:
        return metadata.version("dprlhf")
    except metadata.PackageNotFoundError:
        return "unknown (run from its source, not installed)"


def released_dimension(recipe: AnyRecipe, dimension: int) -> int:
    """Return the number of coordinates of a release, for a model of ``dimension`` parameters."""
    subspace = getattr(recipe.update, "subspace", None)
    return dimension if subspace is None else int(subspace.rank)


def _selection(recipe: AnyRecipe) -> list[str]:
    data = recipe.data
    given = {"skip": bool(data.skip), "limit": data.limit is not None, "split": "[" in data.split}
    named = " and ".join(f"data.{name}" for name, selects in given.items() if selects)
    if not named:
        return []
    # Removing a row would let another one in under the limit, or within 90% of all rows, and so
    # change two users, unless neighbouring datasets differ among the selected rows only.
    verb = "select" if " and " in named else "selects"
    return [f"which rows {named} {verb}: neighbouring datasets differ among these"]


def read_card(folder: RunFolder) -> dict[str, Any]:
    """Return a run's card, from which its model card can be written."""
    recipe = load_any_recipe(folder.recipe)
    try:
        card: dict[str, Any] = json.loads(folder.privacy.read_text("utf-8"))
        model_card(recipe, card)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise DprlhfError(f"{folder.privacy}: the privacy card is missing or damaged") from None
    return card


def audits_of(folder: RunFolder) -> dict[str, Any]:
    """Return the audits on a run's existing card, to keep them in a new one; empty without any."""
    if not folder.privacy.is_file():
        return {}
    held = audits_on(read_card(folder))
    return {"audits": held} if held else {}


def note_audit(folder: RunFolder, audit: dict[str, Any]) -> None:
    """Add an audit's result to the card of a finished run, and write it into its model card.

    Earlier results stay: an audit that refuted the claim is not undone by one that did not.
    """
    card = read_card(folder)
    _rewrite(folder, card | {"audits": [*audits_on(card), audit]})


def note_value(folder: RunFolder, value: dict[str, str]) -> None:
    """Add what a run released of the value of its policy to its card, and to its model card."""
    _rewrite(folder, read_card(folder) | {"value": value})


def _rewrite(folder: RunFolder, card: dict[str, Any]) -> None:
    write_json(folder.privacy, card)
    recipe = load_any_recipe(folder.recipe)
    for place in (folder.policy, folder.model):
        if not place.is_dir():  # only supervised stages write the merged model
            continue
        text = model_card(recipe, card, merged=place == folder.model)
        if (place / FILE).is_file():
            text = in_card(text, json.loads((place / FILE).read_text("utf-8")))
        write_atomically(place / "README.md", text.encode())
    if folder.model.is_dir():
        write_json(folder.model / "privacy.json", card)


def carried_with(card: dict[str, Any], records: Sequence[Record]) -> Carried:
    """Return the record that travels with the weights: the guarantee, and the terms of all runs."""
    return {"statement": guarantee_sentence(card), "runs": [asdict(r) for r in records]}


def _dataset(recipe: AnyRecipe) -> str:
    """Return the data set's name; of a file of one's own its last part, not where it is."""
    data = recipe.data
    if recipe.privacy.dataset is not None:
        return recipe.privacy.dataset
    if data.path == IN_MEMORY:
        return "given in Python"
    return (
        data.path
        if is_hub_id(data.path) or data.path.startswith("asset:")
        else Path(data.path).name
    )


def _origin(source: Source, earlier: Earlier) -> str:
    runs = runs_of_model(source.path, source.revision) if source.key is not None else set()
    for record in earlier.records:
        if record.run in runs:
            return f"released by the earlier run {record.name}, whose cost the total counts"
    return "it was not fitted on the users"


def _total(plan: Plan, earlier: Earlier) -> dict[str, Any]:
    cost = total(plan, earlier)
    apart = dict.fromkeys(earlier.disjoint, "other users")
    apart |= dict.fromkeys(earlier.uncompared, "other users, as declared and not compared")
    return {
        "epsilon": json_ready(cost.epsilon),
        "epsilon_lower": json_ready(cost.epsilon_lower),
        "delta": cost.delta,
        "accountant": cost.accountant,
        "runs": ", ".join(
            ([_runs(earlier)] if earlier.tuning_runs else [])
            + [
                f"{record.name} ({record.stage}, {apart.get(record.run, 'users may be shared')})"
                for record in earlier.records
            ]
        ),
    }


def _runs(earlier: Earlier) -> str:
    return f"{earlier.tuning_runs} tuning run" + ("s" if earlier.tuning_runs > 1 else "")
