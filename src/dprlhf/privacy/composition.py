"""Joint cost of several runs on the same users: one ε from the composed privacy losses.

A later run may depend on all that the earlier ones released (adaptive composition). Each run is
dominated by a pair of distributions whatever came before it, so all together are dominated by the
product of the pairs (Zhu, Dong & Wang, arXiv 2106.08567, Theorem 10). Their privacy losses are
added, separately for a removed and for an added user. This is tighter than adding the ε and δ of
the runs.

Runs whose users are disjoint compose in parallel: a user is in one of them, and the others see
only that run's release. The total is then the largest of their costs, at the same δ.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import networkx
import numpy as np

from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Epsilon, Mechanism, epsilon, single_noise
from dprlhf.privacy.curves import (
    SIDES,
    Curves,
    composed,
    loss_distribution,
    replace_one_epsilon,
)
from dprlhf.privacy.gaussian import gaussian_epsilon, noise_too_small
from dprlhf.privacy.partitions.base import Pair, round_noise
from dprlhf.privacy.random_allocation import Side

_POINTS = 500
"""Number of grid points between zero and the largest privacy loss of one run."""
_CUT = 1e-5
"""Share of δ, over all runs, spent on losses beyond the grid; they count as infinite."""

_CLIQUES = 1000
"""Sets of runs that may share users which are looked at one by one."""

JOINT = "joint privacy loss distribution of the runs, on a grid that rounds up"


def total_epsilon(
    mechanisms: Sequence[Mechanism],
    delta: float,
    shared: Sequence[Sequence[bool]] | None = None,
    times: Sequence[int] | None = None,
) -> Epsilon:
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
    costs = [_sequential(together, delta) for together in sets.values()]
    worst = max(costs, key=lambda cost: cost.epsilon)
    if shared is None or all(map(all, shared)):
        return worst
    return Epsilon(
        worst.epsilon,
        worst.epsilon_lower,
        delta,
        f"parallel composition over disjoint users; the most expensive of them: {worst.accountant}",
        tuple(dict.fromkeys(a for cost in costs for a in cost.assumptions)),
    )


def adaptive_epsilon(mechanisms: Sequence[Mechanism], delta: float) -> float:
    """Return an upper bound on the joint ε that holds even if each plan depends on earlier results.

    :func:`total_epsilon` is for plans that do not: it takes the pairs of the runs that were made as
    given. Here each run counts as the one Gaussian release that covers it, and Gaussian releases
    may be chosen one after the other in view of what came out (Smith & Thakurta, arXiv 2210.17520).
    This leaves out what the secrecy of the rounds adds.

    Args:
        mechanisms: One mechanism per run.
        delta: Total δ.

    Raises:
        DprlhfError: some runs protect against replacement, and others do not.
    """
    replaced = [m.adjacency == "replace-one" for m in mechanisms]
    if any(replaced) and not all(replaced):
        raise DprlhfError(
            "the runs protect against different neighbours, so there is no one statement for them"
            " together: give all the same privacy.adjacency"
        )
    return gaussian_epsilon(_together(mechanisms), delta)


def _groups(runs: int, shared: Sequence[Sequence[bool]] | None) -> list[list[int]]:
    """Return sets of runs such that the runs of any one user all stand in one of them.

    Any two of a user's runs share that user, so they form a clique of the relation, inside a
    maximal clique. There can be exponentially many of those: beyond ``_CLIQUES`` the connected
    components stand for them, which cost at least as much.
    """
    graph = networkx.Graph()
    graph.add_nodes_from(range(runs))
    graph.add_edges_from(
        (i, j)
        for i, j in itertools.combinations(range(runs), 2)
        if shared is None or shared[i][j] or shared[j][i]
    )
    cliques = list(itertools.islice(networkx.find_cliques(graph), _CLIQUES + 1))
    if len(cliques) > _CLIQUES:
        cliques = list(networkx.connected_components(graph))
    return [sorted(group) for group in cliques]


def _sequential(mechanisms: Sequence[Mechanism], delta: float) -> Epsilon:
    """Return the cost of runs that may all contain the same user."""
    alone = [epsilon(mechanism, delta) for mechanism in dict.fromkeys(mechanisms)]
    if len(mechanisms) == 1:
        return alone[0]
    replace = mechanisms[0].adjacency == "replace-one"
    # One Gaussian covers each run, were membership known; Gaussians compose in closed form.
    upper = gaussian_epsilon(_together(mechanisms), delta)
    disjoint = all(m.spec.disjoint for m in mechanisms)
    little = any(noise_too_small(round_noise(m), delta) for m in mechanisms)
    if not disjoint and not little and upper > 0:
        joint = _joint(mechanisms, {m: m.spec.pair for m in mechanisms}, delta)
        pairs = {m: m.spec.replaced for m in mechanisms if m.spec.replaced is not None}
        if not replace:
            upper = min(upper, _epsilon_of(joint, delta))
        else:
            curves = Curves(
                lambda e, side, rough: float(joint[side].get_delta_for_epsilon(e)),
                lambda d, side: float(joint[side].get_epsilon_for_delta(d)),
            )
            upper = min(upper, replace_one_epsilon(curves, delta))
            if all(m in pairs for m in mechanisms):
                upper = min(upper, _epsilon_of(_joint(mechanisms, pairs, delta), delta))
    return Epsilon(
        upper,
        min(upper, max(cost.epsilon_lower for cost in alone)),
        delta,
        JOINT if not disjoint else "analytic Gaussian mechanism, composed over the runs",
        tuple(dict.fromkeys(a for cost in alone for a in cost.assumptions)),
    )


def _together(mechanisms: Sequence[Mechanism]) -> float:
    """Return the noise multiplier of the Gaussian release that costs as much as all these runs.

    Each run is bounded by one Gaussian release; z⁻² of the composition is the sum of theirs.
    """
    noises = [single_noise(m) for m in mechanisms]
    least = min(noises)  # divided out: the square of a tiny noise is no floating-point number
    if math.isinf(least):
        return math.inf
    return least / math.sqrt(sum((least / z) ** 2 for z in noises))


def _epsilon_of(joint: dict[Side, Any], delta: float) -> float:
    """Return the larger ε of the two sides."""
    return max(float(losses.get_epsilon_for_delta(delta)) for losses in joint.values())


def _joint(
    mechanisms: Sequence[Mechanism], pairs: Mapping[Mechanism, Pair], delta: float
) -> dict[Side, Any]:
    """Return the pessimistic loss distribution of all runs, by side.

    Args:
        mechanisms: The runs.
        pairs: What dominates one factor of each.
        delta: The total δ, of which a small part is spent on losses beyond the grid.
    """
    tail = delta * _CUT / len(mechanisms)
    counts = Counter(mechanisms)  # equal runs have one curve
    reach = {(m, side): pairs[m].reach(m, tail, side) for m in counts for side in SIDES}
    step = max(*reach.values(), 1e-6) / _POINTS
    joint: dict[Side, Any] = {}
    for mechanism, times in counts.items():
        spec = mechanism.spec
        curve = {
            side: pairs[mechanism].curve(
                mechanism,
                step * np.arange(math.ceil(reach[mechanism, side] / step) + 2),
                side,
            )
            for side in SIDES
        }
        for side, other in (SIDES, SIDES[::-1]):
            one = loss_distribution(step, curve[side], curve[other])
            factors = times if spec.factors is None else times * spec.factors(mechanism)
            one = composed(one, factors)
            joint[side] = joint[side].compose(one) if side in joint else one
    return joint
