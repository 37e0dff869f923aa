"""The privacy card: what a run guarantees, in ``privacy.json``.

:mod:`dprlhf.runs.model_card` renders it as the model's README.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from dprlhf.errors import DprlhfError
from dprlhf.privacy.plan import Plan, json_ready
from dprlhf.privacy.randomness import commitment
from dprlhf.recipe import IN_MEMORY, AnyRecipe, Source, experimental, load_any_recipe
from dprlhf.runs.earlier import Earlier, Record, all_records, risk_of, runs_of_model, total
from dprlhf.runs.folder import RunFolder, write_atomically, write_json
from dprlhf.runs.lineage import FILE, Carried, in_card
from dprlhf.runs.model_card import (
    ABOUT_RESPONSES,
    ABOUT_SECRET_FOLDER,
    audits_on,
    guarantee_sentence,
    in_plain_words,
    is_hub_id,
    model_card,
)

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
    text = model_card(load_any_recipe(folder.recipe), card)
    if (folder.policy / FILE).is_file():
        text = in_card(text, json.loads((folder.policy / FILE).read_text("utf-8")))
    write_atomically(folder.policy / "README.md", text.encode())


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
