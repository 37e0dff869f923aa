"""The audit of a finished run: of the plan that its ledger records, with the result on its card."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from dprlhf.audit.judgement import Audit
from dprlhf.audit.one_run import audit
from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import equal_but_for_rounding
from dprlhf.privacy.ledger import read_opened
from dprlhf.recipe import AnyRecipe, load_any_recipe
from dprlhf.runs.card import note_audit, read_card
from dprlhf.runs.folder import RunFolder
from dprlhf.runs.opening import recipe_digest
from dprlhf.training.build import plan_of


def audit_run(run: str | Path, folder: str | Path, **options: Any) -> Audit:
    """Audit the ε of a finished run of any stage, as :func:`audit` does; add it to its card."""
    # The canaries take part in a new run with the noise multiplier of the finished run's ledger.
    audited = RunFolder(Path(run))
    audited.require()
    recipe = load_any_recipe(audited.recipe)
    if not audited.privacy.is_file() or not audited.policy.is_dir():
        raise DprlhfError(f"{run}: not finished; finish it first with: dprlhf resume {run}")
    read_card(audited)  # a damaged one could not state what the audit found
    result = audit(_as_recorded(recipe, audited), folder, **options)
    note_audit(audited, result.as_dict())
    return result


def _as_recorded(recipe: AnyRecipe, run: RunFolder) -> AnyRecipe:
    """Return a run's recipe with the noise of its ledger, where both make the same plan."""
    # The search for the noise of an ε may end elsewhere in another version.
    if not run.ledger.is_file():
        raise DprlhfError(f"{run.ledger}: missing; what this run was planned with is not known")
    terms = read_opened(run.ledger)[0].body
    if recipe_digest(recipe) != terms.get("recipe_sha256"):
        raise DprlhfError(
            f"{run.recipe}: not the recipe that its ledger was opened with, so an audit of it would"
            " say nothing about this run; put the recipe back"
        )
    stated = recipe.privacy.asking(noise_multiplier=terms.get("noise_multiplier"))
    made = recipe.model_copy(update={"privacy": stated})
    _check_same_plan(made, terms, run)
    return made


def _check_same_plan(recipe: AnyRecipe, terms: dict[str, Any], run: RunFolder) -> None:
    """Refuse a recipe whose plan is not the one that a ledger opened with."""
    try:
        users = int(terms["users"])
    except (KeyError, TypeError, ValueError):
        raise DprlhfError(f"{run.ledger}: its first entry does not state the run's plan") from None
    plan = plan_of(recipe, users)
    planned = plan.terms()
    for name in (*asdict(plan.mechanism), "delta", "epsilon"):
        stated = terms.get(name)
        if not equal_but_for_rounding(stated, planned.get(name)):
            raise DprlhfError(
                f"{run.ledger}: the ledger records {name} {stated}, and the recipe with the"
                f" ledger's noise multiplier {terms['noise_multiplier']} makes {planned[name]}; a"
                " run that another version of dprlhf planned is audited with that version"
            )
