"""The attack on canaries that each have a direction of their own, and what its guesses prove.

Each canary is in with probability ½. The attack computes the likelihood ratio of "in" against "out"
from the releases and the plan's noise, and guesses "in" above a threshold that is fixed beforehand:
a ratio of 1. All canaries are guessed. No guess depends on who is in.

Why the bound holds in a single run. For one canary, any guess is right with probability at most
½ (1 + δ(0)), where δ(0) bounds the total variation distance between the run's releases with it and
without it. Different canaries have orthogonal directions and each guess reads its own, so their
guesses are independent as long as the noise of different coordinates is: then the number of right
guesses is at most binomial, and Clopper & Pearson (1934) bound its rate. That independence is an
assumption on the implementation, which :mod:`dprlhf.audit.judgement` tests on all coordinates.
The theorem of Steinke et al. 2023, whose bound is stated beside this one, needs no such assumption,
and neither does that of Mahloujifar et al. 2024 (arXiv 2410.22235); both are far looser here: at
ε = 4 and 8,000 canaries they stay below 30% of ε.

The bound is in the accountant's terms: the ε that it states for the largest noise multiplier that
the guesses do not rule out. Where the accountant is not known to be exact (:func:`is_exact`), a
tighter analysis could show a true ε below that bound, without any fault.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, ndtri
from scipy.stats import beta, binom

from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Mechanism, epsilon, gaussian_delta, single_noise
from dprlhf.privacy.correlated_noise import noise_matrix
from dprlhf.privacy.plan import Plan
from dprlhf.privacy.risk import risk


def log_likelihood_ratio(
    observed: Array,  # [users, rounds]
    plan: Plan,
    known_round: NDArray[np.int64] | None = None,  # [users]
    noise: float | Array | None = None,  # a number, or [users, 1]
) -> Array:
    """Return log P(observed | took part) − log P(observed | did not), ``[users]``."""
    # Under replace-one, "did not": a user with the opposite vector took part instead.
    noise = noise_of(plan) if noise is None else noise
    return _took_part(observed, noise, plan, known_round) - (
        _took_part(-observed, noise, plan, known_round) if plan.adjacency == "replace-one" else 0.0
    )


def matched(observed: Array, plan: Plan) -> Array:
    """Return what one round's user moved in all releases together, ``[users, rounds]``."""
    # Releases r with noise C⁻¹ξ become Cᵀ C r: in the user's own round normal with deviation z and
    # mean 1, as with independent noise, because the columns of C have norm 1.
    if plan.bands == 1:
        return observed
    matrix = noise_matrix(plan.rounds, plan.bands)
    scores: Array = observed @ matrix.T @ matrix
    return scores


def noise_of(plan: Plan) -> float:
    """Return z/√J, the noise of the mean of a round's releases; 1e-3/√J for a baseline, z = 0."""
    return (plan.noise_multiplier or 1e-3) / math.sqrt(plan.releases_per_round)


def _took_part(
    observed: Array, noise: float | Array, plan: Plan, known_round: NDArray[np.int64] | None
) -> Array:
    """Return log P(observed | took part) − log P(observed | noise alone), ``[users]``."""
    of_round = (observed - 0.5) / noise**2
    if known_round is not None and (known_round >= 0).any():
        mine = of_round[np.arange(len(of_round)), known_round]
        return np.where(known_round >= 0, mine, 0.0)
    return plan.mechanism.spec.log_likelihood(of_round, plan.participations)


_LARGEST = 100.0


def epsilon_lower_bound(m: int, r: int, v: int, delta: float, confidence: float = 0.95) -> float:
    """Return a lower bound on ε from one run (Steinke et al. 2023, arXiv 2305.08846, Theorem 5.2).

    Each of m canaries was included with probability 1/2, independently. An attack on the run's
    releases guessed for r of them whether they were included; v guesses were right. Under
    (ε, δ)-differential privacy, with q = 1/(1 + e^{-ε}), that many right guesses have probability
    at most p(ε) = P[Bin(r, q) ≥ v] + 2mδ max_{1≤i≤v} P[v > Bin(r, q) ≥ v − i] / i. The bound is
    the largest ε with p(ε) below 1 − confidence. The guesses may depend on all that was released;
    their number r must not depend on which canaries were included.

    >>> round(epsilon_lower_bound(1000, 100, 75, 1e-4), 3)
    0.673
    """
    check_confidence(confidence)
    low, high = 0.0, _LARGEST
    if chance_of_right(m, r, v, low, delta) >= 1 - confidence:
        return 0.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        likely = chance_of_right(m, r, v, middle, delta) >= 1 - confidence
        low, high = (low, middle) if likely else (middle, high)
    return low


def chance_of_right(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Return p(ε) of :func:`epsilon_lower_bound`: a bound on the chance of v right guesses.

    >>> round(chance_of_right(1000, 100, 75, 0.673, 1e-4), 3)
    0.05
    """
    if not 0 <= v <= r <= m:
        raise ValueError(f"{v} right of {r} guesses on {m} canaries")
    q = 1 / (1 + math.exp(-epsilon))
    below = binom.pmf(np.arange(v - 1, -1, -1), r, q).cumsum()  # P[v > Bin >= v - i]
    slack = float((below / np.arange(1, v + 1)).max(initial=0.0))
    return float(binom.sf(v - 1, r, q) + 2 * m * delta * slack)


def largest_tpr(fpr: NDArray[np.float64], epsilon: float, delta: float) -> NDArray[np.float64]:
    """Return the largest true-positive rate that (ε, δ) allows at false-positive rates."""
    # min(e^ε FPR + δ, 1 − e^{-ε} (1 − δ − FPR)) (Kairouz et al. 2015, arXiv 1311.0776).
    if math.isinf(epsilon):
        return np.ones_like(fpr)
    steep, flat = math.exp(epsilon) * fpr + delta, 1 - math.exp(-epsilon) * (1 - delta - fpr)
    return np.clip(np.minimum(steep, flat), 0.0, 1.0)


def check_confidence(confidence: object) -> None:
    """Refuse a confidence that is no probability, or at which nothing could be refuted."""
    if not (isinstance(confidence, int | float | np.floating) and 0 < confidence < 1):
        raise DprlhfError(
            f"confidence must be above 0 and below 1, such as 0.95, not {confidence!r}"
        )


Array = NDArray[np.float64]
Bits = NDArray[np.bool_]

_LEAST_NOISE, _MOST_NOISE = 0.01, 1e4
_LEAST_FRACTION = 0.02  # of the planned noise: no audit is asked about less
_STEP = 1.03  # of a grid of noise multipliers
_DRAWN = 20  # simulated canaries for each one of the audit
_VALUES = 2**22  # most values of a simulation, which takes seconds
_AT_ONCE = 2**18  # of them in memory


@functools.lru_cache(maxsize=1024)
def advantage(mechanism: Mechanism) -> float:
    """Return an upper bound δ(0) on 2 P[right] − 1, for any guess about one user."""
    if mechanism.noise_multiplier == 0:
        return 1.0
    if mechanism.adjacency == "replace-one" and not mechanism.spec.disjoint:
        # The accountant's bound is loose at ε = 0; δ has no part in the best guess.
        return 2 * risk([mechanism], 1e-5).best_guess - 1
    single = gaussian_delta(single_noise(mechanism), 0.0)
    return min(single, mechanism.spec.delta(mechanism, 0.0, single, True))


def fewest_right(canaries: int, plan: Plan, level: float) -> int:
    """Return the least number of right guesses that refutes the plan; above all where none does."""
    likely = (1 + advantage(plan.mechanism)) / 2
    return int(binom.isf(level, canaries, likely)) + 1 if likely < 1 else canaries + 1


def bound_from_guesses(right: int, canaries: int, plan: Plan, level: float) -> float:
    """Return a lower bound on ε from the number of right guesses among all canaries.

    Args:
        right: Number of right guesses.
        canaries: Number of canaries, all of which were guessed.
        plan: Plan whose partition, adjacency and δ the bound is stated for.
        level: Probability, at most, with which the bound is above the true ε.
    """
    target = 2 * float(beta.ppf(level, right, canaries - right + 1)) - 1 if right else 0.0
    if target <= 0:
        return 0.0
    return bound_from_noise(plan, lambda z: advantage(plan.mechanism.with_noise(z)) < target)


def bound_from_noise(plan: Plan, refuted: Callable[[float], bool]) -> float:
    """Return the ε that the plan would have with the least noise multiplier that is refuted.

    Args:
        plan: The plan, whose δ the bound is stated for.
        refuted: Whether a noise multiplier is refuted; all larger ones are, too.
    """
    low, high = _LEAST_NOISE, 2 * _LEAST_NOISE
    if refuted(low):
        return 0.0
    while not refuted(high):
        low, high = high, 2 * high
        if high > _MOST_NOISE:
            return 0.0
    while high > low * 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return epsilon(plan.mechanism.with_noise(high), plan.guarantee.delta).epsilon


def readings_refute(right: Bits, sizes: Array, plan: Plan, noise: float, level: float) -> bool:
    """Return whether right guesses refute that the noise multiplier is at least ``noise``.

    Each guess reads one release (:mod:`dprlhf.audit.watched_gate`).

    Args:
        right: Whether each guess is right, ``[canaries]``.
        sizes: How far each canary moves its reading, in units of S, ``[canaries]``.
        plan: The plan, whose canaries take part in one round each.
        noise: The noise multiplier.
        level: Probability, at most, with which noise that large is refuted.
    """
    one = Mechanism(**{**vars(plan.mechanism), "releases_per_round": 1})
    # On a grid, rounded to less noise: the probability of a right guess is not understated.
    steps = np.floor(np.log(noise / sizes) / math.log(_STEP))
    known = {step: advantage(one.with_noise(_STEP**step)) for step in np.unique(steps)}
    rates = (1 + np.array([known[step] for step in steps])) / 2
    # Nearly the best weights where sizes are 0.6 or so; they follow from nothing later.
    weights = sizes * math.sqrt(20 * math.log(1 / level) / len(right))
    return float((weights * right - np.log1p(rates * np.expm1(weights))).sum()) >= -math.log(level)


def is_exact(mechanism: Mechanism) -> bool:
    """Return whether the accountant's ε is that of the worst user, up to rounding and grids.

    It is an upper bound that may be larger where several random rounds of a user are replaced, and
    where noise is correlated between random rounds.
    """
    several_replaced = mechanism.adjacency == "replace-one" and mechanism.participations > 1
    return mechanism.spec.disjoint or not (several_replaced or mechanism.bands > 1)


def right_guesses(scores: Array, included: Bits) -> int:
    """Return how many guesses are right: a canary is guessed in where its score is above 0."""
    return int(((scores > 0) == included).sum())


@functools.lru_cache(maxsize=64)
def planned_guesses(canaries: int, claim: float, delta: float, confidence: float) -> int:
    """Return for how many canaries to guess, where the guesses may depend on one another.

    With too few, the claim could not be refuted even if all were right (r must be well above 3e^ε);
    with more than needed, they are less sure. The choice uses public numbers alone.

    Args:
        canaries: Number of canaries.
        claim: Claimed ε.
        delta: Claimed δ.
        confidence: Confidence of the bound that will be computed.
    """
    low, high = 1, canaries
    while high - low > 1:  # the best possible bound grows with the number of guesses
        middle = (low + high) // 2
        most = epsilon_lower_bound(canaries, middle, middle, delta, confidence)
        low, high = (low, middle) if most > claim else (middle, high)
    return min(canaries, max(2 * high, canaries // 5, 2))


def surest_guesses(scores: Array, included: Bits, guesses: int) -> int:
    """Return how many guesses are right: half of them "in" for the highest scores, the rest "out".

    Args:
        scores: Score of each canary, ``[canaries]``.
        included: Whether it was in, ``[canaries]``.
        guesses: Number of guesses, fixed beforehand.
    """
    order = np.argsort(scores, kind="stable")
    out, in_ = order[: guesses // 2], order[len(order) - (guesses - guesses // 2) :]
    return int((~included[out]).sum() + included[in_].sum())


def noise_refuted(
    canaries: int, plan: Plan, level: float, probability: float, move: float = 1.0
) -> float | None:
    """Return by how much noise must be too small for the guesses to refute it.

    Args:
        canaries: Number of canaries.
        plan: The plan.
        level: Error probability of the test.
        probability: Probability with which noise that much too small is refuted.
        move: How far a canary moves a release, in units of S.

    Returns:
        1 − f for the largest fraction f of the planned standard deviation that is refuted; None if
        even noise of 2% of it is not. With disjoint batches f is exact. Otherwise it is the
        largest one that a simulation is sure of, so that the noise that is seen may be nearer to
        what was planned, but not farther from it.
    """
    needed = fewest_right(canaries, plan, level)
    if needed > canaries:
        return None
    # The rate at which so many guesses are right with that probability.
    rate = float(beta.ppf(probability, needed, canaries - needed + 1))
    if plan.mechanism.spec.disjoint:  # one Gaussian: a guess is right with probability Φ(1/(2fz))
        fraction = float(move / (2 * single_noise(plan.mechanism) * ndtri(rate)))
        return 1 - fraction if fraction >= _LEAST_FRACTION else None
    simulated = max(1, min(_DRAWN * canaries, _VALUES // plan.rounds))
    low, high = _LEAST_FRACTION, 1.0
    if chance_of_one(plan, low / move, simulated) < rate:
        return None
    while high - low > 0.002:
        middle = (low + high) / 2
        seen = chance_of_one(plan, middle / move, simulated) >= rate
        low, high = (middle, high) if seen else (low, middle)
    return 1 - low


def chance_of_one(plan: Plan, fraction: float, canaries: int) -> float:
    """Return a lower bound on the probability that one guess is right, in simulation.

    What was released tells how likely the better guess is right: with probability 1/(1 + e^{−|L|}),
    L the log-likelihood ratio. The bound is the mean of that over the simulated canaries, less
    three standard errors.

    Args:
        plan: The plan.
        fraction: Standard deviation of the noise, as a fraction of the planned one.
        canaries: Number of canaries to simulate.
    """
    random = np.random.default_rng(0)  # no coin of the audit: what it is for is public
    at_once = max(1, _AT_ONCE // plan.rounds)
    blocks = [min(at_once, canaries - start) for start in range(0, canaries, at_once)]
    right = np.concatenate([_chances(plan, fraction, count, random) for count in blocks])
    return float(right.mean() - 3 * right.std() / math.sqrt(canaries))


def _chances(plan: Plan, fraction: float, canaries: int, random: np.random.Generator) -> Array:
    """Return how likely the guess about each simulated canary is right, ``[canaries]``."""
    observed, noise, _, known = simulate(plan, canaries, random)
    own = fraction * noise_of(plan)  # the attack learns it from the probes
    ratio = log_likelihood_ratio(observed + fraction * noise, plan, known, own)
    return np.asarray(expit(np.abs(ratio)), dtype=np.float64)


def simulate(
    plan: Plan, canaries: int, random: np.random.Generator
) -> tuple[Array, Array, Bits, NDArray[np.int64] | None]:
    """Return canaries' moves without noise and their noise, ``[canaries, rounds]``, and who is in.

    Last come the rounds of the canaries, from 0, where the attack knows them; else None.

    Args:
        plan: The plan.
        canaries: Number of canaries; where batches are disjoint, a multiple of the rounds.
        random: Source of the rounds, the coins and the noise.
    """

    def stream(*_: object, count: int) -> NDArray[np.uint64]:
        return random.integers(0, 2**64, count, dtype=np.uint64)

    allocation = plan.mechanism.spec.draw(canaries, plan.rounds, plan.participations, stream)
    joins = np.zeros((canaries, plan.rounds))
    for t in range(plan.rounds):
        joins[allocation.round(t + 1), t] = 1.0
    included = random.random(canaries) < 0.5
    absent = -1.0 if plan.adjacency == "replace-one" else 0.0
    noise = noise_of(plan) * random.standard_normal(joins.shape)
    known = joins.argmax(1) if plan.mechanism.spec.disjoint else None
    moves = joins * np.where(included, 1.0, absent)[:, None]
    if plan.bands > 1:  # the releases' noise is noise C⁻ᵀ
        matrix = noise_matrix(plan.rounds, plan.bands)
        moves, noise = matched(moves, plan), noise @ matrix
    return moves, noise, included, known
