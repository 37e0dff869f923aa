"""Joint cost of several runs on the same users: one ε from the composed privacy losses.

A later run may depend on all that the earlier ones released (adaptive composition). Each run is
dominated by a pair of distributions whatever came before it, so all together are dominated by the
product of the pairs (Zhu, Dong & Wang, arXiv 2106.08567, Theorem 10). Their privacy losses are
added, separately for a removed and for an added user. This is tighter than adding the ε and δ of
the runs.

Runs whose users are disjoint compose in parallel: a user is in one of them, and the others see
only that run's release. The total is then the largest of their costs, at the same δ.

The product is that of plans which were settled beforehand. A budget for plans that are chosen in
view of earlier results is kept by a privacy filter, :mod:`dprlhf.privacy.filter`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Mechanism, PrivacyCost, covering_noise, epsilon
from dprlhf.privacy.curves import SIDES, Curves
from dprlhf.privacy.gaussian import gaussian_epsilon, noise_too_small
from dprlhf.privacy.losses import POINTS, Composed, Losses, loss_distribution, widening
from dprlhf.privacy.partitions.base import Pair, round_noise
from dprlhf.privacy.random_allocation import Side
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
