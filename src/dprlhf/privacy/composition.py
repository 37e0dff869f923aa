"""Joint cost of several runs on the same users: one ε from the composed privacy losses.

A later run may depend on all that the earlier ones released (adaptive composition). Each run is
dominated by a pair of distributions whatever came before it, so all together are dominated by the
product of the pairs (Zhu, Dong & Wang, arXiv 2106.08567, Theorem 10). Their privacy losses are
added, separately for a removed and for an added user. This is tighter than adding the ε and δ of
the runs.

Runs whose users are disjoint compose in parallel: a user is in one of them, and the others see
only that run's release. The total is then the largest of their costs, at the same δ.

The product is that of plans which were settled beforehand. A budget for plans that are chosen in
view of earlier results is kept by a privacy filter (:func:`filter_share`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Mechanism, PrivacyCost, covering_noise, epsilon, single_noise
from dprlhf.privacy.gaussian import gaussian_epsilon, gaussian_noise_multiplier, noise_too_small
from dprlhf.privacy.losses import POINTS, Composed, Losses, loss_distribution, widening
from dprlhf.privacy.partitions.base import Pair, round_noise
from dprlhf.privacy.random_allocation import SIDES, Curves, Side
from dprlhf.privacy.replaced_allocation import replace_one_epsilon

CUT = 1e-5
"""Share of δ spent on losses beyond the grid, which count as infinite: over all runs of a total,
for each run in a filter."""


_CLIQUES = 1000
"""Sets of runs that may share users which are looked at one by one."""

JOINT = "joint privacy loss distribution of the runs, on a grid that rounds up"


def total_epsilon(
    mechanisms: Sequence[Mechanism],
    delta: float,
    shared: Sequence[Sequence[bool]] | None = None,
    times: Sequence[int] | None = None,
) -> PrivacyCost:
    """Return an upper bound on the joint ε of several runs at ``delta``.

    Args:
        mechanisms: One mechanism per run, all under the same adjacency; add-remove beside zero-out
            is read as zero-out, at the same cost.
        delta: Total δ; each run's own δ is not used.
        shared: Whether runs i and j may have a user in common, ``[runs][runs]``; None: all may.
        times: Number of times each was run on the same users, ``[runs]``; None: once each.

    Raises:
        DprlhfError: no run, or the runs differ in their adjacency.
    """
    sets = sets_of_runs(mechanisms, shared, times)
    costs = [_sequential(together, delta) for together in sets]
    worst = max(costs, key=lambda cost: cost.epsilon)
    if shared is None or all(map(all, shared)):
        return worst
    return PrivacyCost(
        worst.epsilon,
        worst.epsilon_lower,
        delta,
        f"parallel composition over disjoint users; the most expensive of them: {worst.accountant}",
        tuple(dict.fromkeys(a for cost in costs for a in cost.assumptions)),
    )


def sets_of_runs(
    mechanisms: Sequence[Mechanism],
    shared: Sequence[Sequence[bool]] | None,
    times: Sequence[int] | None,
) -> list[list[Mechanism]]:
    """Return sets of runs such that the runs of any one user all stand in one of them.

    The arguments and what is raised are those of :func:`total_epsilon`.
    """
    if not mechanisms:
        raise DprlhfError("there is no run to state a total of")
    if {m.adjacency for m in mechanisms} == {"add-remove", "zero-out"}:
        # What dominates a run under add-remove dominates it under zero-out too.
        mechanisms = [Mechanism(**{**vars(m), "adjacency": "zero-out"}) for m in mechanisms]
    adjacencies = sorted({m.adjacency for m in mechanisms})
    if len(adjacencies) > 1:
        raise DprlhfError(
            f"the runs protect against different neighbours ({' and '.join(adjacencies)}), so there"
            " is no one statement for them together: give all the same privacy.adjacency"
        )
    repeated = [[m] * (times[i] if times else 1) for i, m in enumerate(mechanisms)]
    # Sets of equal mechanisms cost the same.
    sets = {
        frozenset(Counter(together).items()): together
        for group in _groups(len(mechanisms), shared)
        for together in [[m for i in group for m in repeated[i]]]
    }
    return list(sets.values())


def factors_of(mechanism: Mechanism) -> int:
    """Return the number of independent, equal factors of a run's dominating pair."""
    spec = mechanism.spec
    return 1 if spec.factors is None else spec.factors(mechanism)


def _groups(runs: int, shared: Sequence[Sequence[bool]] | None) -> list[list[int]]:
    """Return sets of runs such that the runs of any one user all stand in one of them.

    Any two of a user's runs share that user, so they form a clique of the relation, inside a
    maximal clique. There can be exponentially many of those: beyond ``_CLIQUES`` one set of all
    runs stands for them, which costs at least as much.
    """
    if shared is None:
        return [list(range(runs))]
    near = [
        {j for j in range(runs) if i != j and (shared[i][j] or shared[j][i])} for i in range(runs)
    ]
    cliques = _cliques(near, set(), set(range(runs)), set())
    groups = list(itertools.islice(cliques, _CLIQUES + 1))
    if len(groups) > _CLIQUES:
        groups = [set(range(runs))]
    return [sorted(group) for group in groups]


def _cliques(
    near: Sequence[set[int]], clique: set[int], more: set[int], done: set[int]
) -> Iterator[set[int]]:
    """Yield the maximal cliques by Bron and Kerbosch's algorithm with a pivot."""
    if not more and not done:
        yield clique
        return
    pivot = max(more | done, key=lambda node: len(near[node] & more))
    for node in more - near[pivot]:
        yield from _cliques(near, clique | {node}, more & near[node], done & near[node])
        more, done = more - {node}, done | {node}


def _sequential(mechanisms: Sequence[Mechanism], delta: float) -> PrivacyCost:
    """Return the cost of runs that may all contain the same user."""
    alone = [epsilon(mechanism, delta) for mechanism in dict.fromkeys(mechanisms)]
    if len(mechanisms) == 1:
        return alone[0]
    replace = mechanisms[0].adjacency == "replace-one"
    # One Gaussian covers each run, were membership known; Gaussians compose in closed form.
    noise = covering_noise(mechanisms)
    upper = gaussian_epsilon(noise, delta)
    disjoint = all(m.spec.disjoint for m in mechanisms)
    little = any(noise_too_small(round_noise(m), delta) for m in mechanisms)
    if not disjoint and not little and upper > 0:
        joint = joint_losses(mechanisms, {m: m.spec.pair for m in mechanisms}, delta)
        pairs = {m: m.spec.replaced for m in mechanisms if m.spec.replaced is not None}
        if not replace:
            upper = _epsilon_of(joint, delta, upper)
        else:
            removed = 2 * noise  # of a removal, or an addition, alone
            curves = Curves(
                lambda e, side, rough: joint[side].delta(e),
                lambda d, side: joint[side].epsilon(d, gaussian_epsilon(removed, d)),
            )
            upper = min(upper, replace_one_epsilon(curves, delta))
            if all(m in pairs for m in mechanisms):
                upper = _epsilon_of(joint_losses(mechanisms, pairs, delta), delta, upper)
    return PrivacyCost(
        upper,
        min(upper, max(cost.epsilon_lower for cost in alone)),
        delta,
        JOINT if not disjoint else "analytic Gaussian mechanism, composed over the runs",
        tuple(dict.fromkeys(a for cost in alone for a in cost.assumptions)),
    )


def _epsilon_of(joint: dict[Side, Composed], delta: float, high: float) -> float:
    """Return the larger ε of the two sides, at most ``high``, which is known to hold."""
    return max(losses.epsilon(delta, high) for losses in joint.values())


def joint_losses(
    mechanisms: Sequence[Mechanism], pairs: Mapping[Mechanism, Pair], delta: float
) -> dict[Side, Composed]:
    """Return the pessimistic loss distribution of all runs, by side."""
    tail = delta * CUT / sum(map(factors_of, mechanisms))
    counts = Counter(mechanisms)  # equal runs have one curve
    reach = {(m, side): pairs[m].reach(m, tail, side) for m in counts for side in SIDES}
    wide = max(*(end for (m, _), end in reach.items() if m.spec.step is None), 1e-6, 1e-6) / POINTS
    steps = {m: wide if m.spec.step is None else m.spec.step(m) for m in counts}
    step = min(steps.values())
    parts: dict[Side, list[tuple[Losses, int]]] = {side: [] for side in SIDES}
    for mechanism, times in counts.items():
        ends = {side: reach[mechanism, side] for side in SIDES}
        stride = max(1, math.floor(steps[mechanism] / step))
        for side, one in losses_of(mechanism, pairs[mechanism], step, ends, stride).items():
            parts[side].append((one, times * factors_of(mechanism)))
    return {side: Composed(tuple(parts[side])) for side in SIDES}


def losses_of(
    mechanism: Mechanism, pair: Pair, step: float, reach: Mapping[Side, float], stride: int = 1
) -> dict[Side, Losses]:
    """Return the pessimistic loss distribution of one factor of a run, by side."""
    last = {side: math.ceil(reach[side] / step) for side in SIDES}
    places = {side: widening(last[side], stride) for side in SIDES}
    curve = {side: pair.curve(mechanism, step * places[side], side) for side in SIDES}
    return {
        side: loss_distribution(step, curve[side], curve[other], max(places.values(), key=len))
        for side, other in (SIDES, SIDES[::-1])
    }


_ORDERS = (1.2, 1.5, 2.0)
"""Orders of a budget's Rényi filters, less 1, in units of ln(1/δ)/ε. One Gaussian has its best
order at 2, and many amplified runs too; a single one, whose divergence rises steeply, below it."""
_GAUSSIAN_PART = 0.5
"""Share of a budget's δ for the filter of Gaussian releases; the orders divide the rest equally."""
_CUT_PART = 0.01
"""Share of a budget's δ that is set aside for losses beyond the grids, of a thousand runs."""
_LARGEST_EPSILON = 1e6
"""Above it the orders are next to 1, and a budget has the filter of Gaussian releases alone."""
_MOMENT_ERROR = 1e-9
"""Allowance for rounding in the logarithm of a moment: masses are differences of a curve's values,
with errors of 1e-16 of them over the square of the grid's step."""


def filter_share(times: Mapping[Mechanism, int], epsilon: float, delta: float) -> float:
    """Return how much of the budget (ε, δ) some runs take up, where plans may follow from results.

    This is a privacy filter: while the share of all runs is at most 1, all of them together are (ε,
    δ)-private, however each plan was chosen in view of earlier results
    (docs/proofs/composition.md). ε and δ must be fixed before the first run. A share below 1 states
    no smaller ε.
    """
    # The smallest share of several filters, among which δ is divided beforehand: z⁻² of the
    # Gaussian releases that cover the runs (Smith & Thakurta, arXiv 2210.17520), and Rényi
    # divergences, each at one order (Feldman & Zrnic, arXiv 2008.11193).
    if not times:
        return 0.0
    if len({mechanism.adjacency == "replace-one" for mechanism in times}) > 1:
        raise DprlhfError(
            "the runs protect against different neighbours, so there is no one statement for them"
            " together: give all the same privacy.adjacency"
        )
    noise = covering_noise([m for m, n in times.items() for _ in range(n)])
    ratio = gaussian_noise_multiplier(epsilon, _GAUSSIAN_PART * delta) / noise
    shares = [ratio * ratio]
    tails = {m: _tailed(m, CUT * delta) for m in times}
    cut = max(sum(n * tails[m][side][1] for m, n in times.items()) for side in SIDES)
    if cut <= _CUT_PART * delta and epsilon <= _LARGEST_EPSILON:
        part = (1 - _GAUSSIAN_PART - _CUT_PART) / len(_ORDERS) * delta
        for scale in _ORDERS:
            order = 1 - scale * math.log(part) / epsilon
            # E L^a = e^((a-1) D_a) and (L - e^eps)_+ <= L^a e^(-eps (a-1)) (1 - 1/a)^(a-1) / a.
            most = epsilon - math.log1p(-1 / order) + math.log(part * order) / (order - 1)
            spent = [sum(n * _renyi(m, order, tails[m][side][0]) for m, n in times.items())
                     for side in SIDES]  # fmt: skip
            shares.append(max(spent) / most)
    return min(shares)


@functools.lru_cache(256)
def _tailed(mechanism: Mechanism, tail: float) -> dict[Side, tuple[Losses | None, float]]:
    """Return one factor's losses by side, if known, and the δ of a run's infinite losses."""
    spec, factors = mechanism.spec, factors_of(mechanism)
    pair = spec.replaced if mechanism.adjacency == "replace-one" else spec.pair
    if spec.disjoint or pair is None or noise_too_small(round_noise(mechanism), tail / factors):
        return dict.fromkeys(SIDES, (None, 0.0))
    reach = {side: pair.reach(mechanism, tail / factors, side) for side in SIDES}
    own = None if spec.step is None else spec.step(mechanism)
    losses = losses_of(mechanism, pair, own or max(*reach.values(), 1e-6) / POINTS, reach)
    return {side: (one, factors * one.infinite) for side, one in losses.items()}


def _renyi(mechanism: Mechanism, order: float, losses: Losses | None) -> float:
    """Return an upper bound on the Rényi divergence of a run's finite losses at an order > 1."""
    # losses: those of one factor on one side; None takes the Gaussian that covers the run.
    noise = single_noise(mechanism)
    single = order / 2 / noise / noise
    if losses is None:
        return single
    log_moment = losses.log_moment(order - 1) + _MOMENT_ERROR
    return min(single, factors_of(mechanism) * max(log_moment, 0.0) / (order - 1))
