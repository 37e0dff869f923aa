"""What several runs over the same users cost together: one ε from the joint loss distribution.

A later run may depend on all that the earlier ones released (adaptive composition). Each run is
dominated by a pair of distributions whatever came before it, so all together are dominated by the
product of the pairs (Zhu, Dong & Wang, arXiv 2106.08567, Theorem 10). Their privacy losses add up,
one side (a user is taken out, or put in) at a time: ε and δ of the runs are never added where the
losses are known.

Runs whose users are disjoint compose in parallel: a user is in one of them, and the others see that
run's release only. The total is then the largest of their costs, at the same δ.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from dprlhf.errors import DprlhfError
from dprlhf.privacy import random_allocation
from dprlhf.privacy.accounting import (
    Curves,
    Epsilon,
    Mechanism,
    epsilon,
    loss_distribution,
    noise_too_small,
    poisson_distribution,
    replace_one_epsilon,
    single_noise,
)
from dprlhf.privacy.gaussian import gaussian_delta, gaussian_epsilon
from dprlhf.privacy.random_allocation import Side

_POINTS = 500
"""Of the grid of privacy losses, up to the largest loss that matters."""
_CUT = 1e-5
"""Losses beyond the grid count as infinite; they have this share of δ in all runs together."""

JOINT = "joint privacy loss distribution of the runs, on a grid that rounds up"


def total_epsilon(
    mechanisms: Sequence[Mechanism],
    delta: float,
    shared: Sequence[Sequence[bool]] | None = None,
    times: Sequence[int] | None = None,
) -> Epsilon:
    """Return what some runs cost together at ``delta``, as an upper bound.

    Args:
        mechanisms: of the runs, all under one adjacency.
        delta: of the total; each run's own δ plays no part.
        shared: whether runs i and j may have a user in common, ``[runs][runs]``; None: all may.
        times: how often each was run on the same users, ``[runs]``; None: once.

    Raises:
        DprlhfError: no run, or the runs differ in their adjacency.
    """
    if not mechanisms:
        raise DprlhfError("there is no run to state a total of")
    adjacencies = sorted({m.adjacency for m in mechanisms})
    if len(adjacencies) > 1:
        raise DprlhfError(
            f"the runs protect against different neighbours ({' and '.join(adjacencies)}), so there"
            " is no one statement for them together: give all the same privacy.adjacency"
        )
    runs = range(len(mechanisms))
    groups = [tuple(runs)]
    if shared is not None and not all(map(all, shared)):
        groups = [
            group
            for size in runs
            for group in itertools.combinations(runs, size + 1)
            if all(shared[i][j] for i, j in itertools.combinations(group, 2))
        ]
    # A group inside another costs no more than that one.
    largest = [g for g in groups if not any(set(g) < set(other) for other in groups)]
    costs = [
        _sequential([mechanisms[i] for i in group for _ in range(times[i] if times else 1)], delta)
        for group in largest
    ]
    worst = max(costs, key=lambda cost: cost.epsilon)
    if len(costs) == 1:
        return worst
    return Epsilon(
        worst.epsilon,
        worst.epsilon_lower,
        delta,
        f"parallel composition over disjoint users; the most expensive of them: {worst.accountant}",
        tuple(dict.fromkeys(a for cost in costs for a in cost.assumptions)),
    )


def _sequential(mechanisms: Sequence[Mechanism], delta: float) -> Epsilon:
    """Return the cost of runs that may all have the same user."""
    alone = [epsilon(mechanism, delta) for mechanism in dict.fromkeys(mechanisms)]
    if len(mechanisms) == 1:
        return alone[0]
    replace = mechanisms[0].adjacency == "replace-one"
    # One Gaussian covers each run, were membership known; Gaussians compose in closed form.
    upper = gaussian_epsilon(_together(mechanisms), delta)
    cut = [m.partition in ("fixed", "stream") for m in mechanisms]
    little = any(noise_too_small(_round_noise(m), delta) for m in mechanisms)
    if not all(cut) and not little and upper > 0:
        joint = _joint(mechanisms, delta)
        if replace:
            curves = Curves(
                lambda e, side, rough: float(joint[side].get_delta_for_epsilon(e)),
                lambda d, side: float(joint[side].get_epsilon_for_delta(d)),
            )
            upper = min(upper, replace_one_epsilon(curves, delta))
        else:
            upper = min(upper, max(float(j.get_epsilon_for_delta(delta)) for j in joint.values()))
    return Epsilon(
        upper,
        min(upper, max(cost.epsilon_lower for cost in alone)),
        delta,
        JOINT if not all(cut) else "analytic Gaussian mechanism, composed over the runs",
        tuple(dict.fromkeys(a for cost in alone for a in cost.assumptions)),
    )


def _together(mechanisms: Sequence[Mechanism]) -> float:
    """Return the noise of the one Gaussian that costs what these runs' single Gaussians do."""
    precision = sum(single_noise(m) ** -2 for m in mechanisms)
    return precision**-0.5 if precision > 0 else math.inf


def _joint(mechanisms: Sequence[Mechanism], delta: float) -> dict[Side, Any]:
    """Return pessimistic loss distributions of all runs, with a user taken out and put in."""
    tail = delta * _CUT / len(mechanisms)
    sides: tuple[Side, Side] = ("remove", "add")
    reach = {side: max(_reach(m, tail, side) for m in mechanisms) for side in sides}
    step = max(max(reach.values()), 1e-6) / _POINTS
    composed: dict[Side, Any] = {}
    for mechanism, times in Counter(mechanisms).items():
        curve = {
            side: _curve(
                mechanism,
                step * np.arange(math.ceil(_reach(mechanism, tail, side) / step) + 2),
                side,
            )
            for side in sides
        }
        for side, other in (sides, sides[::-1]):
            one = loss_distribution(step, curve[side], curve[other])
            if mechanism.partition == "random-allocation":
                one = one.self_compose(mechanism.participations)
            one = one.self_compose(times)
            composed[side] = composed[side].compose(one) if side in composed else one
    return composed


def _round_noise(mechanism: Mechanism) -> float:
    return mechanism.noise_multiplier / math.sqrt(mechanism.releases_per_round)


def _slots(mechanism: Mechanism) -> int:
    return mechanism.rounds // mechanism.participations


def _reach(mechanism: Mechanism, tail: float, side: Side) -> float:
    """Return an ε at which one allocation's, or else the whole run's, δ is at most ``tail``."""
    if mechanism.partition == "random-allocation":
        return random_allocation.epsilon(_round_noise(mechanism), _slots(mechanism), tail, side)
    single = gaussian_epsilon(_zero_out_noise(mechanism), tail)
    if mechanism.partition == "poisson":
        return min(single, float(poisson_distribution(mechanism).get_epsilon_for_delta(tail)))
    return single


def _curve(mechanism: Mechanism, epsilons: Any, side: Side) -> Any:
    """Return upper bounds on δ at some ε where one user is taken out or put in, ``[points]``."""
    if mechanism.partition == "random-allocation":
        z, slots = _round_noise(mechanism), _slots(mechanism)
        medium = random_allocation.MEDIUM
        return np.array([random_allocation.delta(z, slots, e, side, medium) for e in epsilons])
    single = np.array([gaussian_delta(_zero_out_noise(mechanism), e) for e in epsilons])
    if mechanism.partition == "poisson":  # the larger of both sides
        sampled = poisson_distribution(mechanism).get_delta_for_epsilon(list(epsilons))
        return np.minimum(single, sampled)
    return single


def _zero_out_noise(mechanism: Mechanism) -> float:
    """Return the noise of one Gaussian that covers one half of a replacement."""
    return single_noise(mechanism) * (2 if mechanism.adjacency == "replace-one" else 1)
