"""A one-run audit: many canary users in a single run, and tests that can refute its ε.

Each canary is included with probability ½, by the audit's own randomness. The run uses the recipe's
stage, update, partition and noise on the canaries alone, in its own folder. The attack guesses from
the releases who was included (:mod:`dprlhf.audit.guesses`), and the noise in every released
coordinate, which the audit knows, is tested (:mod:`dprlhf.audit.noise_tests`). In ``gradient``
space, on a small model, each canary moves one known coordinate of a release by S, as the strongest
adversary would. In ``prompt`` space, on the recipe's own model, a canary is a unique prompt whose
reward depends on a hash of the prompt and the response's first letter, and is read along a
direction of its own (:mod:`dprlhf.audit.prompt_readings`). Of the released policy alone, and where
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
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from dprlhf.audit.bounds import check_confidence
from dprlhf.audit.canaries import gradient_run, prompt_run, vector_run
from dprlhf.audit.guesses import noise_refuted
from dprlhf.audit.judgement import GUESSES_SHARE, Audit, judge
from dprlhf.audit.noise_tests import SHARES, smallest_shortfall
from dprlhf.audit.watched_gate import values_tested
from dprlhf.errors import DprlhfError
from dprlhf.privacy.gaussian import downwards, upwards
from dprlhf.privacy.plan import Plan
from dprlhf.privacy.relations import Space
from dprlhf.recipe import AnyRecipe, Recipe
from dprlhf.runs.folder import RunFolder, time_stamp, write_json

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
