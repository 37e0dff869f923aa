"""A one-run audit: many canary users in a single run, and tests that can refute its ε.

Each canary is included with probability ½, by the audit's own randomness. The run uses the recipe's
stage, update, partition and noise on the canaries alone, in its own folder. The attack guesses from
the releases who was included (:mod:`dprlhf.audit.guesses`), and the noise in every released
coordinate, which the audit knows, is tested (:mod:`dprlhf.audit.judgement`). In ``gradient``
space, on a small model, each canary moves one known coordinate of a release by S, as the strongest
adversary would. In ``prompt`` space, on the recipe's own model, a canary is a unique prompt whose
reward depends on a hash of the prompt and the response's first letter, and is read along a
direction of its own (:mod:`dprlhf.audit.watched_gate`). Of the released policy alone, and where
noise is correlated, a user has several rounds, or a regression is released, the bound is that of
Steinke et al. 2023 (arXiv 2305.08846, Theorem 5.2), which no dependence invalidates.

All tests together refute a claim that is true with probability at most 1 − confidence: each has a
share of that (Bonferroni).
"""

from __future__ import annotations

import math
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from dprlhf.audit.canaries import gradient_run, prompt_run, vector_run
from dprlhf.audit.guesses import check_confidence, noise_refuted
from dprlhf.audit.judgement import GUESSES_SHARE, SHARES, Audit, judge, smallest_shortfall
from dprlhf.audit.watched_gate import values_tested
from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import equal_but_for_rounding
from dprlhf.privacy.gaussian import downwards, upwards
from dprlhf.privacy.ledger import read_opened
from dprlhf.privacy.plan import Plan
from dprlhf.privacy.relations import Space
from dprlhf.recipe import AnyRecipe, Recipe, load_any_recipe
from dprlhf.runs.card import note_audit, read_card
from dprlhf.runs.folder import RunFolder, time_stamp, write_json
from dprlhf.runs.opening import recipe_digest
from dprlhf.training.build import plan_of

Array = NDArray[np.float64]
Bits = NDArray[np.bool_]

CANARIES = 10_000
"""Number of canaries unless another one is asked for: they take about half a minute."""

CONFIDENCE = 0.97
"""Probability, at least, with which a claim that is true is not refuted."""

_FEW = 1000  # where an update releases a number for each pair of parameters
_PROBES = 64
_PROBABILITY = 0.9


def audit(
    recipe: AnyRecipe,
    folder: str | Path,
    *,
    canaries: int | None = None,
    space: Space | str = "gradient",
    confidence: float = CONFIDENCE,
    seed: int | None = None,
    quiet: bool = False,
    announce: Callable[[str], None] | None = None,
) -> Audit:
    """Audit the ε of a recipe in one run on canaries; see :mod:`dprlhf.audit.one_run`."""
    check_confidence(confidence)
    if canaries is None:
        oracle = recipe.update.least_squares if isinstance(recipe, Recipe) else None
        few = oracle is not None and oracle.name == "sufficient-statistics"
        canaries = max(_FEW if few else CANARIES, recipe.rounds)
    _check_options(recipe, canaries, space, Path(folder))
    included = _coins(canaries, seed)
    # As many probes as make all users fill the rounds.
    probes = _PROBES + -(canaries + _PROBES) % recipe.rounds if space == "gradient" else 0
    signs = _signs(included, probes, recipe.privacy.adjacency == "replace-one")
    power: dict[str, float | None] = {}

    def started(plan: Plan, tested: int, move: float) -> None:
        power.update(power_of(plan, canaries, tested, space, confidence, move))
        if announce is not None:
            announce(power_sentence(power))

    run_folder = RunFolder(Path(folder))
    run = gradient_run if space == "gradient" else prompt_run
    record = run(recipe, run_folder, signs, quiet, started)
    update = recipe.update.name if isinstance(recipe, Recipe) else recipe.stage
    result = judge(record, included, space, confidence, power, recipe.stage, update)
    write_json(
        run_folder.path / "audit.json",
        {"audit": "canaries only, no private data", **result.as_dict()},
    )
    return result


def audit_plan(
    plan: Plan,
    key: bytes,
    *,
    confidence: float = CONFIDENCE,
    seed: int | None = None,
    state: bool = True,
) -> Audit:
    """Audit partition, clipping, ledger and gate of a plan on given vectors, without a model."""
    # In milliseconds, so that the audit's own error rates can be measured.
    check_confidence(confidence)
    canaries = plan.users - _PROBES - (plan.users - _PROBES) % plan.rounds
    included = _coins(canaries, seed)
    signs = _signs(included, plan.users - canaries, plan.adjacency == "replace-one")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as at:
        record = vector_run(plan, Path(at), key, signs)
    tested = values_tested(plan.users) * plan.rounds * plan.releases_per_round
    power = power_of(plan, canaries, tested, "gradient", confidence) if state else {}
    return judge(record, included, "gradient", confidence, power, "none", "vectors", bounds=state)


def audit_folder() -> Path:
    """Return the path of a new audit folder."""
    return Path(f"runs/audit-{time_stamp()}")


# --- before the run, and in words ---------------------------------------------------------------


def power_of(
    plan: Plan, canaries: int, tested: int, space: str, confidence: float, move: float = 1.0
) -> dict[str, float | None]:
    """Return what an audit would see, from its plan and size alone; see :attr:`Audit.power`."""
    if not plan.private:
        return {}
    alpha = 1 - confidence
    power: dict[str, float | None] = {
        "probability": _PROBABILITY,
        "noise": smallest_shortfall(tested, alpha * SHARES["variance"], _PROBABILITY),
    }
    if space == "gradient":
        power["guesses"] = noise_refuted(canaries, plan, alpha * GUESSES_SHARE, _PROBABILITY, move)
    return power


def power_sentence(power: dict[str, float | None]) -> str:
    """Return the power of an audit in words."""
    if not power:
        return "no claim to refute: the run adds no noise"
    seen = f"noise {power['noise']:.2%} too small"
    guesses = power.get("guesses")
    if guesses is not None:
        seen += f", or {guesses:.0%} too small by the guesses alone,"
    return f"would see {seen} with probability {power['probability']:g}"


def report(result: Audit) -> str:
    """Return an audit's result as lines of text."""
    terms = " in the accountant's terms" if result.accountants_terms else ""
    lines = [
        f"claimed: epsilon <= {upwards(result.epsilon, 4)} at delta {result.delta:.3g}",
        f"audited: epsilon >= {downwards(result.bound, 4)}{terms} at confidence"
        f" {result.confidence:.0%} ({result.right} of {result.guesses} guesses right,"
        f" {result.canaries} canaries, {result.space} space), >= {downwards(result.bound_any, 4)}"
        " however canaries depend on one another",
    ]
    if result.tests:
        name, p = min(result.tests.items(), key=lambda test: test[1] / SHARES[test[0]])
        lines.append(
            f"noise: {result.released:,} released values in {len(result.tests)} tests; the nearest"
            f" to failing is {name}, p = {p:.2g} (fails below"
            f" {(1 - result.confidence) * SHARES[name]:.2g})"
        )
    reasons = "; ".join(result.refuted_by)
    if result.verdict == "cannot refute at this size":
        reasons = (
            f"even {result.guesses} right guesses would not be enough: give more canaries"
            if math.isfinite(result.epsilon)
            else "the run adds no noise, so it claims nothing"
        )
    return "\n".join([*lines, f"verdict: {result.verdict}" + (f": {reasons}" if reasons else "")])


def _coins(canaries: int, seed: int | None) -> Bits:
    random = np.random.default_rng(secrets.randbits(128) if seed is None else seed)
    included: Bits = random.random(canaries) < 0.5
    return included


def _signs(included: Bits, probes: int, replace: bool) -> Array:
    signs = np.where(included, 1.0, -1.0 if replace else np.nan)
    return np.concatenate([signs, np.ones(probes)])


def _check_options(recipe: AnyRecipe, canaries: int, space: str, folder: Path) -> None:
    """Refuse a number of canaries, a space or a folder with which a recipe cannot be audited."""
    if folder.is_dir() and any(folder.iterdir()):  # the message of a run would say: resume it
        raise DprlhfError(f"{folder}: exists; give the audit another folder (--output-dir)")
    if canaries < recipe.rounds:
        raise DprlhfError(
            f"{canaries} canaries cannot fill {recipe.rounds} rounds: give --canaries"
            f" {recipe.rounds} or more"
        )
    if space not in get_args(Space):
        raise DprlhfError(f"--space must be gradient or prompt, not {space!r}")
    if space == "prompt" and not isinstance(recipe, Recipe):
        raise DprlhfError(
            f"--space prompt plants rewards, and stage {recipe.stage} has none: use gradient"
        )


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
