"""A one-run audit: many canary users in a single run, and tests that can refute its ε.

Each canary is included with probability ½, by the audit's own randomness. The run uses the recipe's
stage, update, partition and noise on the canaries alone; it reads no private data and keeps its
ledger in its own folder (:mod:`dprlhf.audit.canaries`). Two kinds of test follow:

- Guesses: the attack sees what was released and guesses who was included
  (:mod:`dprlhf.audit.guesses`). Many right guesses are unlikely under a small ε.
- Noise: the audit knows the noise in every released coordinate, and tests whether it is as large
  and as independent as the plan says (:mod:`dprlhf.audit.noise_tests`).

Where the canaries stand:

- ``gradient``: on a small model (:mod:`dprlhf.audit.bandit`) each canary moves one known coordinate
  of a release by S. This takes seconds, and is the strongest adversary.
- ``prompt``: on the recipe's own model, each canary is a unique prompt whose reward depends on a
  hash of the prompt and the response's first letter. The attack computes how likely the rewarded
  letters are under the released policy. This takes as long as training on that many users with
  responses of one token. Canaries share the model's parameters here, so the bound is that of
  Steinke et al. 2023 (arXiv 2305.08846, Theorem 5.2), which no dependence between them invalidates.

All tests together refute a claim that is true with probability at most 1 − confidence: each has a
share of that (Bonferroni).
"""

from __future__ import annotations

import math
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from dprlhf.audit.bounds import chance_of_right, check_confidence, epsilon_lower_bound
from dprlhf.audit.canaries import Record, gradient_run, prompt_run, vector_run
from dprlhf.audit.guesses import (
    bound_from_guesses,
    fewest_right,
    is_exact,
    noise_refuted,
    planned_guesses,
    right_guesses,
    surest_guesses,
)
from dprlhf.audit.likelihood import log_likelihood_ratio, matched
from dprlhf.audit.noise_tests import SENTENCES, SHARES, in_units, noise_tests, smallest_shortfall
from dprlhf.audit.watched_gate import values_tested
from dprlhf.errors import DprlhfError
from dprlhf.privacy.gaussian import downwards, upwards
from dprlhf.privacy.plan import Plan, json_ready
from dprlhf.privacy.relations import Space
from dprlhf.recipe import AnyRecipe, Recipe
from dprlhf.runs.folder import RunFolder, time_stamp, write_json
from dprlhf.training.recipe_plan import check_settled

Array = NDArray[np.float64]
Bits = NDArray[np.bool_]

CANARIES = 10_000
"""Number of canaries unless another one is asked for: they take about half a minute."""

CONFIDENCE = 0.97
"""Probability, at least, with which a claim that is true is not refuted."""

_FEW = 1000  # where an update releases a number for each pair of parameters
_PROBES = 64
_GUESSES = 0.25
_ANY_GUESSES = 0.05
_PROBABILITY = 0.9
_LEAST_NOISE = 1e-3  # of the attack's model of the noise, in units of S


@dataclass(frozen=True)
class Audit:
    """Result of an audit.

    Attributes:
        bound: Lower bound on ε. In gradient space it holds if the noise of different coordinates is
            independent, which the audit tests.
        accountants_terms: Whether ``bound`` holds in the accountant's terms alone: it is what the
            accountant states for noise that the guesses rule out, and the true ε may be smaller.
        bound_any: Lower bound on ε that holds whatever the dependence between canaries.
        epsilon: Claimed ε of this run alone, without earlier runs; infinite without noise.
        delta: The δ at which all ε are stated.
        canaries: Number of canaries.
        guesses: Number of guesses.
        right: Number of right guesses.
        space: Where the canaries stand, ``gradient`` or ``prompt``; see this module.
        stage: The recipe's stage: ``rl``, ``sft``, ``reward`` or ``dpo``.
        partition: The recipe's partition.
        update: The recipe's update, or its stage where that is supervised.
        confidence: Probability, at least, with which no test refutes a claim that is true and both
            lower bounds hold.
        tests: The p-value of each test of the noise; empty for a run without noise.
        released: Number of released values whose noise was tested.
        power: ``probability``; by which share the noise must be too small for the test of its
            variance to see it with that probability, ``noise``; and by which share for the guesses
            to, ``guesses`` (None where no noise is too small for them). Stated before the run.
        refuted_by: What refutes the claim, in words; empty where nothing does.
        can_refute: Whether guesses of this number could refute the claim.
    """

    bound: float
    bound_any: float
    epsilon: float
    delta: float
    canaries: int
    guesses: int
    right: int
    space: str
    stage: str
    partition: str
    update: str
    confidence: float
    tests: dict[str, float]
    released: int
    power: dict[str, float | None]
    refuted_by: tuple[str, ...]
    can_refute: bool
    accountants_terms: bool

    @property
    def holds(self) -> bool:
        """Whether no test refutes the claimed ε."""
        return not self.refuted_by

    @property
    def verdict(self) -> str:
        """``refuted``, ``consistent``, or ``cannot refute at this size``."""
        if self.refuted_by:
            return "refuted"
        return "consistent" if self.can_refute else "cannot refute at this size"

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, JSON-ready."""
        shown: dict[str, Any] = json_ready(
            {**asdict(self), "holds": self.holds, "verdict": self.verdict}
        )
        return shown


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
    """Audit the ε of a recipe in one run on canaries; see :mod:`dprlhf.audit.one_run`.

    Args:
        recipe: Recipe, of private updates or a supervised stage, whose rounds, partition and noise
            are audited; its data are not read.
        folder: Folder to write, which must not exist. Do not publish or resume it.
        canaries: Number of canaries; more of them see smaller faults and give a higher bound. None:
            :data:`CANARIES`, or 1,000 for an update with sufficient statistics.
        space: Where the canaries stand, ``gradient`` or ``prompt``.
        confidence: Probability, at least, with which a claim that is true is not refuted.
        seed: Seed of who is included; None draws from the operating system.
        quiet: Show no progress bars.
        announce: Called before the first round with the power of the audit, in words.

    Raises:
        DprlhfError: a setting is out of range, the folder exists, or no canary moved anything.
    """
    check_confidence(confidence)
    check_settled(recipe)
    if canaries is None:
        canaries = max(_default_canaries(recipe), recipe.rounds)
    _check_options(recipe, canaries, space, Path(folder))
    included = _coins(canaries, seed)
    probes = _probes(canaries, recipe.rounds) if space == "gradient" else 0
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
    found = judge(record, included, space, confidence, power, recipe.stage, update)
    write_json(
        run_folder.path / "audit.json",
        {"audit": "canaries only, no private data", **found.as_dict()},
    )
    return found


def audit_plan(
    plan: Plan,
    key: bytes,
    *,
    confidence: float = CONFIDENCE,
    seed: int | None = None,
    state: bool = True,
) -> Audit:
    """Audit partition, clipping, ledger and gate of a plan on given vectors, without a model.

    This is :func:`audit` in ``gradient`` space without sampling, rewards and gradients: it takes
    milliseconds, so that the audit's own error rates can be measured.

    Args:
        plan: The plan; of its users, 64 or a few more are probes.
        key: The run's key.
        confidence: As for :func:`audit`.
        seed: Seed of who is included; None draws from the operating system.
        state: Whether to state the bounds and the power, which takes longer than the run; without,
            they are 0 and empty.

    Raises:
        DprlhfError: the confidence is not above 0 and below 1.
    """
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
    """Return what an audit would see, from its plan and size alone; see :attr:`Audit.power`.

    Args:
        plan: The plan.
        canaries: Number of canaries.
        tested: Number of released values whose noise is tested, in all rounds together.
        space: Where the canaries stand.
        confidence: Confidence of all tests together.
        move: How far a canary moves a release, in units of S: below 1 where other coordinates have
            their share of a user's contribution.
    """
    if not plan.private:
        return {}
    alpha = 1 - confidence
    power: dict[str, float | None] = {
        "probability": _PROBABILITY,
        "noise": smallest_shortfall(tested, alpha * SHARES["variance"], _PROBABILITY),
    }
    if space == "gradient":
        power["guesses"] = noise_refuted(canaries, plan, alpha * _GUESSES, _PROBABILITY, move)
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


def report(found: Audit) -> str:
    """Return an audit's result as lines of text."""
    terms = " in the accountant's terms" if found.accountants_terms else ""
    lines = [
        f"claimed: epsilon <= {upwards(found.epsilon, 4)} at delta {found.delta:.3g}",
        f"audited: epsilon >= {downwards(found.bound, 4)}{terms} at confidence"
        f" {found.confidence:.0%} ({found.right} of {found.guesses} guesses right,"
        f" {found.canaries} canaries, {found.space} space), >= {downwards(found.bound_any, 4)}"
        " however canaries depend on one another",
    ]
    if found.tests:
        name, p = min(found.tests.items(), key=lambda test: test[1] / SHARES[test[0]])
        lines.append(
            f"noise: {found.released:,} released values in {len(found.tests)} tests; the nearest"
            f" to failing is {name}, p = {p:.2g} (fails below"
            f" {(1 - found.confidence) * SHARES[name]:.2g})"
        )
    reasons = "; ".join(found.refuted_by)
    if found.verdict == "cannot refute at this size":
        reasons = (
            f"even {found.guesses} right guesses would not be enough: give more canaries"
            if math.isfinite(found.epsilon)
            else "the run adds no noise, so it claims nothing"
        )
    return "\n".join([*lines, f"verdict: {found.verdict}" + (f": {reasons}" if reasons else "")])


def _coins(canaries: int, seed: int | None) -> Bits:
    random = np.random.default_rng(secrets.randbits(128) if seed is None else seed)
    included: Bits = random.random(canaries) < 0.5
    return included


def _probes(canaries: int, rounds: int) -> int:
    """Return a number of probes with which all users fill the rounds."""
    return _PROBES + -(canaries + _PROBES) % rounds


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


def _default_canaries(recipe: AnyRecipe) -> int:
    oracle = recipe.update.least_squares if isinstance(recipe, Recipe) else None
    return _FEW if oracle is not None and oracle.name == "sufficient-statistics" else CANARIES


# --- after the run ------------------------------------------------------------------------------


def judge(
    record: Record,
    included: Bits,
    space: str,
    confidence: float,
    power: dict[str, float | None],
    stage: str,
    update: str,
    *,
    bounds: bool = True,
) -> Audit:
    """Return what a run's releases prove against its plan.

    Args:
        record: What the run released.
        included: Whether each canary was in, ``[canaries]``; further users are probes.
        space: Where the canaries stand.
        confidence: Confidence of all tests together.
        power: What :func:`power_of` returned.
        stage: The run's stage.
        update: The run's update.
        bounds: Whether to compute the lower bounds.
    """
    plan, alpha = record.plan, 1 - confidence
    tests = _tested(record)
    refuted = [SENTENCES[name] for name, p in tests.items() if p < alpha * SHARES[name]]
    refuted += _broken_rules(record)
    found = _guessed(record, included, alpha, bounds=bounds)
    return Audit(
        bound=found.bound,
        bound_any=found.bound_any,
        epsilon=plan.guarantee.epsilon,
        delta=plan.guarantee.delta,
        canaries=len(included),
        guesses=found.guesses,
        right=found.right,
        space=space,
        stage=stage,
        partition=plan.partition,
        update=update,
        confidence=confidence,
        tests=tests,
        released=sum(len(s.noise) for r in record.rounds for s in r),
        power=power,
        refuted_by=(*refuted, *found.refuted_by),
        can_refute=found.can_refute,
        accountants_terms=record.gains is None and not is_exact(plan.mechanism),
    )


@dataclass(frozen=True)
class _Guessed:
    """What the guesses of who was in prove; the names are those of :class:`Audit`."""

    guesses: int
    right: int
    bound: float
    bound_any: float
    refuted_by: list[str]
    can_refute: bool


def _guessed(record: Record, included: Bits, alpha: float, *, bounds: bool) -> _Guessed:
    """Guess which canaries were in, and return what the number of right guesses proves.

    Args:
        record: What the run released.
        included: Whether each canary was in, ``[canaries]``.
        alpha: Error probability of all tests together, of which the guesses have their shares.
        bounds: Whether to compute the lower bounds, which are 0 without.
    """
    plan, canaries, refuted = record.plan, len(included), []
    epsilon, delta = plan.guarantee.epsilon, plan.guarantee.delta
    if record.gains is None:
        scores = attack_scores(record, canaries)
        level, any_level = alpha * _GUESSES, alpha * _ANY_GUESSES
        guesses, right = canaries, right_guesses(scores, included)
        fewest = fewest_right(canaries, plan, level)
        if right >= fewest:
            refuted.append("more canaries were recognised than the claim allows")
        can_refute = fewest <= canaries
    else:
        scores = record.gains[:canaries]
        any_level = alpha * (_GUESSES + _ANY_GUESSES)
    planned = planned_guesses(canaries, epsilon, delta, 1 - any_level)
    surest = surest_guesses(scores, included, planned)
    if chance_of_right(canaries, planned, surest, epsilon, delta) < any_level:
        refuted.append("the surest guesses are right more often than the claim allows")
    bound = bound_any = 0.0
    if bounds:
        bound_any = epsilon_lower_bound(canaries, planned, surest, delta, 1 - any_level)
        bound = bound_any
    if record.gains is not None:
        guesses, right = planned, surest
        can_refute = chance_of_right(canaries, planned, planned, epsilon, delta) < any_level
    elif bounds:
        bound = bound_from_guesses(right, canaries, plan, level)
    return _Guessed(guesses, right, bound, bound_any, refuted, can_refute)


def _tested(record: Record) -> dict[str, float]:
    """Return the p-values of the noise; none for a run that has no noise."""
    if not record.plan.private:
        return {}
    noise = [[seen.noise for seen in round_] for round_ in record.rounds]
    return noise_tests(in_units(noise, record.plan))


def attack_scores(record: Record, canaries: int) -> Array:
    """Return the log-likelihood ratio of "in" against "out" of each canary, ``[canaries]``.

    How far a user moves each release, and how large the noise is, is learned from the probes. They
    come behind the canaries, have coordinates of their own, and are not guessed.

    Args:
        record: What a run in gradient space released.
        canaries: Number of canaries.
    """
    plan = record.plan
    given = np.array([[s.given for s in round_] for round_ in record.rounds])  # [T, J, users]
    released = np.array([[s.released for s in round_] for round_ in record.rounds])
    moves = _moves(given[:, :, canaries:])
    seen = np.einsum("tju,j->tu", released, moves) / (moves @ moves)
    noise = seen - np.einsum("tju,j->tu", given, moves) / (moves @ moves)
    if plan.bands > 1:
        seen, noise = (matched(x.T, plan).T for x in (seen, noise))
    size = max(_LEAST_NOISE, float(noise[:, canaries:].std()))
    known = None if record.known is None else record.known[:canaries]
    return log_likelihood_ratio(seen[:, :canaries].T, plan, known, size)


def _moves(probes: Array) -> Array:
    """Return by how much of S a user moves each release of its rounds, ``[releases]``."""
    joined = probes != 0
    mean: Array = probes.sum((0, 2)) / np.maximum(joined.sum((0, 2)), 1)
    return mean if mean.any() else np.ones_like(mean)


def _broken_rules(record: Record) -> list[str]:
    """Return what no chance explains.

    That is a canary that moves a sum by more than S, riders above their bound, and a policy that
    moved by what was not released.
    """
    broken = []
    largest = max((np.abs(s.given).max(initial=0.0) for r in record.rounds for s in r), default=0.0)
    if largest > 1 + 1e-6:
        broken.append(f"a canary moved a sum by {largest:.3g} times the clip norm")
    riders = max((s.riders for r in record.rounds for s in r), default=0.0)
    if riders > 1 + 1e-6:
        broken.append(f"what rides beside the gradient was {riders:.3g} times what users may bring")
    if record.moved is not None:
        scale = record.plan.clip_norm / record.plan.expected_batch_size
        sums = np.array([sum(s.released for s in r) for r in record.rounds]) * scale
        error = np.abs(record.moved - sums).max()
        if error > 1e-4 * max(np.abs(sums).max(), 1e-300):
            broken.append("the policy moved by something that was not released")
    return broken
