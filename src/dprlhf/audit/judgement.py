"""The judgement of an audit: what a run's releases prove against the plan of its recipe.

The guesses of who was included, the tests of the noise and the rules that hold with certainty are
compared with the claimed ε. :mod:`dprlhf.audit.one_run` makes the run and calls :func:`judge`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2, halfnorm, norm, poisson, t

from dprlhf.audit.canaries import AuditRecord
from dprlhf.audit.guesses import (
    bound_from_guesses,
    bound_from_noise,
    chance_of_right,
    epsilon_lower_bound,
    fewest_right,
    is_exact,
    log_likelihood_ratio,
    matched,
    planned_guesses,
    readings_refute,
    right_guesses,
    surest_guesses,
)
from dprlhf.privacy.correlated_noise import square_root
from dprlhf.privacy.plan import Plan, json_ready

_NEAR = 1e-6  # far above a grid that noise may be rounded to, far below the distance of two draws

SHARES = {
    "variance": 0.40,
    "release": 0.05,
    "coordinate": 0.05,
    "spread": 0.05,
    "between releases": 0.05,
    "within releases": 0.05,
    "repetitions": 0.05,
}
"""Share of the audit's error probability that each test of the noise may use; the attack has the
rest, so that all tests together keep the confidence (Bonferroni)."""

SENTENCES = {
    "variance": "the noise is smaller than planned",
    "release": "a release has less noise than planned",
    "coordinate": "a coordinate has less noise than planned",
    "spread": "too much of the noise is near zero",
    "between releases": "the noise of two releases is correlated",
    "within releases": "the noise of neighbouring coordinates or successive releases is correlated",
    "repetitions": "values of the noise are repeated",
}
"""What it means that a test fails, for reports."""


def in_units(noise: Sequence[Sequence[Array]], plan: Plan) -> list[Array]:
    """Return each release's noise as what must be independent standard normal draws."""
    # Noise that is correlated between rounds by design is multiplied by its matrix C.
    std = plan.noise_multiplier * plan.clip_norm  # what ε was computed for, not what was drawn
    if plan.bands == 1:
        return [release / std for round_ in noise for release in round_]
    root = square_root(plan.rounds, plan.bands)
    single = [round_[0] / std for round_ in noise]
    back = range(root.shape[1])
    return [
        np.sum([root[t, k] * single[t - k] for k in back if k <= t], axis=0)
        for t in range(len(single))
    ]


def noise_tests(draws: Sequence[Array]) -> dict[str, float]:
    """Return a p-value for each test in :data:`SHARES`, of the gate's noise itself.

    The auditor knows each sum before the gate and each value after it, hence the noise, which the
    plan says must be independent normal draws of standard deviation zS. No spread is estimated: a
    gate that draws all its noise too small would hide behind its own estimate. Tests are one-sided:
    noise that is larger than planned refutes nothing.
    """
    length = min(len(release) for release in draws)
    table = np.stack([release[:length] for release in draws])  # [releases, coordinates]
    every = np.concatenate(draws)
    squares = [float(release @ release) for release in draws]
    of_release = [chi2.cdf(s, len(release)) for s, release in zip(squares, draws, strict=True)]
    return {
        "variance": float(chi2.cdf(sum(squares), len(every))),
        "release": _any(min(of_release), len(draws)),
        "coordinate": _any(float(chi2.cdf((table**2).sum(0).min(), len(table))), length),
        "spread": _spread(np.abs(every)),
        "between releases": _between(table),
        "within releases": _neighbours(table),
        "repetitions": _repetitions(every),
    }


def smallest_shortfall(count: int, level: float, probability: float) -> float:
    """Return by how much the noise must be too small for the variance test to see it.

    With noise of f times the planned standard deviation, the sum of n squares over f² is
    chi-squared with n degrees of freedom; this is 1 − f for the f at which the test fails with
    ``probability``.

    >>> round(smallest_shortfall(8000, 0.02, 0.95), 3)
    0.029
    """
    return float(1 - math.sqrt(chi2.ppf(level, count) / chi2.ppf(probability, count)))


def _any(smallest: float, count: int) -> float:
    """Return the p-value of the smallest of so many p-values (Bonferroni)."""
    return min(1.0, float(smallest) * count)


def _spread(sizes: Array) -> float:
    """Return the p-value of too many small values (Dvoretzky, Kiefer, Wolfowitz; Massart 1990)."""
    ordered = np.sort(sizes)
    above = np.arange(1, len(ordered) + 1) / len(ordered) - halfnorm.cdf(ordered)
    return float(math.exp(-2 * len(ordered) * max(0.0, float(above.max())) ** 2))


def _between(table: Array) -> float:
    """Return the p-value of the largest correlation of two releases, whatever their scale."""
    # r √((n − 1)/(1 − r²)) has Student's t distribution with n − 1 degrees of freedom.
    releases, count = table.shape
    if releases < 2 or count < 3:
        return 1.0
    lengths = np.linalg.norm(table, axis=1)
    unit = table / np.maximum(lengths, 1e-300)[:, None]
    cosines = np.abs(np.triu(unit @ unit.T, 1))
    r = min(float(cosines.max()), 1 - 1e-15)
    value = r * math.sqrt((count - 1) / (1 - r * r))
    return _any(2 * float(t.sf(value, count - 1)), releases * (releases - 1) // 2)


def _neighbours(table: Array) -> float:
    """Return the p-value of the correlation of neighbours: in a release, or of successive ones."""
    pairs = [(table[:, :-1], table[:, 1:]), (table[:-1], table[1:])]
    near = []
    for first, second in pairs:
        scale = math.sqrt(float((first**2).sum() * (second**2).sum()))
        if first.size >= 100 and scale > 0:
            r = float((first * second).sum()) / scale
            near.append(2 * float(norm.sf(abs(r) * math.sqrt(first.size))))
    return _any(min(near, default=1.0), 2)


def _repetitions(every: Array) -> float:
    """Return the p-value of the number of values that equal another one but for rounding."""
    # Two normal draws are within c with probability about c/√π; pairs among n are nearly Poisson.
    count = len(every)
    expected = count * (count - 1) / 2 * _NEAR / math.sqrt(math.pi)
    near = int((np.diff(np.sort(every)) <= _NEAR).sum())
    return float(poisson.sf(near - 1, expected)) if near else 1.0


Array = NDArray[np.float64]
Bits = NDArray[np.bool_]

GUESSES_SHARE = 0.25
"""Share of an audit's error probability for the test of the number of right guesses."""

ANY_GUESSES_SHARE = 0.05
"""Share of an audit's error probability for the test that holds for dependent canaries too."""

_LEAST_NOISE = 1e-3  # of the attack's model of the noise, in units of S


@dataclass(frozen=True)
class Audit:
    """Result of an audit.

    Attributes:
        bound: Lower bound on ε. Where canaries are read along directions of their own it holds if
            the noise of different coordinates is independent, which the audit tests.
        accountants_terms: Whether ``bound`` holds in the accountant's terms alone: it is what the
            accountant states for noise that the guesses rule out, and the true ε may be smaller.
        bound_any: Lower bound on ε that holds whatever the dependence between canaries.
        epsilon: Claimed ε of this run alone, without earlier runs; infinite without noise.
        delta: The δ at which all ε are stated.
        canaries: Number of canaries.
        guesses: Number of guesses.
        right: Number of right guesses.
        space: Where the canaries stand, ``gradient`` or ``prompt``; see
            :mod:`dprlhf.audit.one_run`.
        stage: The recipe's stage: ``rl``, ``sft``, ``reward``, ``dpo`` or ``feedback``.
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


def judge(
    record: AuditRecord,
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
        power: What :func:`dprlhf.audit.one_run.power_of` returned.
        stage: The run's stage.
        update: The run's update.
        bounds: Whether to compute the lower bounds.
    """
    plan, alpha = record.plan, 1 - confidence
    tests: dict[str, float] = {}
    if plan.private:
        noise = [[seen.noise for seen in round_] for round_ in record.rounds]
        tests = noise_tests(in_units(noise, plan))
    refuted = [SENTENCES[name] for name, p in tests.items() if p < alpha * SHARES[name]]
    refuted += _broken_rules(record)
    guessed = _guessed(record, included, alpha, bounds=bounds)
    return Audit(
        bound=guessed.bound,
        bound_any=guessed.bound_any,
        epsilon=plan.guarantee.epsilon,
        delta=plan.guarantee.delta,
        canaries=len(included),
        guesses=guessed.guesses,
        right=guessed.right,
        space=space,
        stage=stage,
        partition=plan.partition,
        update=update,
        confidence=confidence,
        tests=tests,
        released=sum(len(s.noise) for r in record.rounds for s in r),
        power=power,
        refuted_by=(*refuted, *guessed.refuted_by),
        can_refute=guessed.can_refute,
        accountants_terms=record.prompts is not None
        or (record.gains is None and not is_exact(plan.mechanism)),
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


def _guessed(record: AuditRecord, included: Bits, alpha: float, *, bounds: bool) -> _Guessed:
    """Guess which canaries were in, and return what the number of right guesses proves.

    ``included`` is ``[canaries]``; without ``bounds`` the lower bounds are 0.
    """
    plan, canaries, refuted = record.plan, len(included), []
    epsilon, delta = plan.guarantee.epsilon, plan.guarantee.delta
    level, any_level = alpha * GUESSES_SHARE, alpha * ANY_GUESSES_SHARE
    policy_alone = record.gains is not None and record.prompts is None
    if policy_alone:
        any_level += level
    else:
        scores = attack_scores(record, canaries)
        right = right_guesses(scores, included)
    of_any = scores if record.gains is None else record.gains[:canaries]
    planned = planned_guesses(canaries, epsilon, delta, 1 - any_level)
    surest = surest_guesses(of_any, included, planned)
    if chance_of_right(canaries, planned, surest, epsilon, delta) < any_level:
        refuted.append("the surest guesses are right more often than the claim allows")
    bound_any = bound = 0.0
    if bounds:
        bound_any = epsilon_lower_bound(canaries, planned, surest, delta, 1 - any_level)
    if policy_alone:
        can_refute = chance_of_right(canaries, planned, planned, epsilon, delta) < any_level
        return _Guessed(planned, surest, bound_any, bound_any, refuted, can_refute)
    if record.prompts is None:
        fewest = fewest_right(canaries, plan, level)
        too_many, can_refute = right >= fewest, fewest <= canaries
        if bounds:
            bound = bound_from_guesses(right, canaries, plan, level)
    else:
        sizes = record.prompts.sizes[:canaries]

        def refuted_by(which: Bits, noise: float) -> bool:
            return readings_refute(which, sizes, plan, noise, level)

        which, z = (scores > 0) == included, plan.noise_multiplier
        too_many = plan.private and refuted_by(which, z)
        can_refute = plan.private and refuted_by(np.ones_like(which), z)
        if bounds:
            bound = bound_from_noise(plan, partial(refuted_by, which))
    if too_many:
        refuted.append("more canaries were recognised than the claim allows")
    return _Guessed(canaries, right, bound, bound_any, refuted, can_refute)


def attack_scores(record: AuditRecord, canaries: int) -> Array:
    """Return the log-likelihood ratio of "in" against "out" of each canary, ``[canaries]``.

    How far a user moves each release, and how large the noise is, is learned from the probes. They
    come behind the canaries, have coordinates of their own, and are not guessed.

    Args:
        record: What a run in gradient space released.
        canaries: Number of canaries.
    """
    plan = record.plan
    known = None if record.known is None else record.known[:canaries]
    if record.prompts is not None:
        sizes = record.prompts.sizes[:canaries, None]
        readings = record.prompts.readings[:canaries] / sizes
        return log_likelihood_ratio(readings, plan, known, record.prompts.noise.mean() / sizes)
    given = np.array([[s.given for s in round_] for round_ in record.rounds])  # [T, J, users]
    released = np.array([[s.released for s in round_] for round_ in record.rounds])
    moves = _moves(given[:, :, canaries:])
    seen = np.einsum("tju,j->tu", released, moves) / (moves @ moves)
    noise = seen - np.einsum("tju,j->tu", given, moves) / (moves @ moves)
    if plan.bands > 1:
        seen, noise = (matched(x.T, plan).T for x in (seen, noise))
    size = max(_LEAST_NOISE, float(noise[:, canaries:].std()))
    return log_likelihood_ratio(seen[:, :canaries].T, plan, known, size)


def _moves(probes: Array) -> Array:
    """Return by how much of S a user moves each release of its rounds, ``[releases]``."""
    joined = probes != 0
    mean: Array = probes.sum((0, 2)) / np.maximum(joined.sum((0, 2)), 1)
    return mean if mean.any() else np.ones_like(mean)


def _broken_rules(record: AuditRecord) -> list[str]:
    """Return what no chance explains.

    That is a canary that moves a sum by more than S, telemetry above its bound, and a policy that
    moved by what was not released.
    """
    broken = [] if record.prompts is None else list(record.prompts.faults)
    largest = max((np.abs(s.given).max(initial=0.0) for r in record.rounds for s in r), default=0.0)
    if largest > 1 + 1e-6:
        broken.append(f"a canary moved a sum by {largest:.3g} times the clip norm")
    telemetry = max((s.telemetry for r in record.rounds for s in r), default=0.0)
    if telemetry > 1 + 1e-6:
        broken.append(
            f"what rides beside the gradient was {telemetry:.3g} times what users may bring"
        )
    if record.moved is not None:
        scale = record.plan.clip_norm / record.plan.expected_batch_size
        sums = np.array([sum(s.released for s in r) for r in record.rounds]) * scale
        error = np.abs(record.moved - sums).max()
        if error > 1e-4 * max(np.abs(sums).max(), 1e-300):
            broken.append("the policy moved by something that was not released")
    return broken
