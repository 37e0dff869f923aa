"""Random allocation with correlated noise between rounds: the same draw, another accountant.

The bounds are those of :mod:`dprlhf.privacy.correlated_allocation`.
"""

from __future__ import annotations

from dprlhf.errors import DprlhfError
from dprlhf.privacy import correlated_allocation as correlated
from dprlhf.privacy.partitions.base import (
    ONE_RELEASE,
    Mechanism,
    PartitionSpec,
    gaussian_pair,
    one_round_each,
)
from dprlhf.privacy.partitions.random_allocation import ASSUMPTION, check, draw


def _check(terms: Mechanism) -> None:
    check(terms)
    if terms.participations > 1:
        raise DprlhfError(
            "privacy.bands: correlated noise on random allocation is accounted for one"
            f" participation, not {terms.participations}; use participations 1, or bands 1"
        )
    if terms.releases_per_round > 1:
        raise DprlhfError(ONE_RELEASE)
    if terms.adjacency == "replace-one":
        raise DprlhfError(
            "privacy.bands: correlated noise on random allocation is accounted for zero-out, not"
            " for replace-one; use adjacency zero-out, partition fixed, or bands 1"
        )
    if terms.rounds > correlated.LARGEST_ROUNDS:
        raise DprlhfError(
            "privacy.bands: correlated noise on random allocation is accounted for up to"
            f" {correlated.LARGEST_ROUNDS} rounds, not {terms.rounds}; use fewer rounds, partition"
            " fixed, or bands 1"
        )


def _epsilon(terms: Mechanism, delta: float, single: float) -> tuple[float, float]:
    return correlated.epsilon(terms.noise_multiplier, terms.rounds, terms.bands, delta)


def _delta(terms: Mechanism, epsilon: float, single: float, rough: bool) -> float:
    return correlated.delta(terms.noise_multiplier, terms.rounds, terms.bands, epsilon, rough)


def _noise(terms: Mechanism, epsilon: float, delta: float, high: float) -> float:
    return correlated.noise(terms.rounds, terms.bands, epsilon, delta, high)


CORRELATED = PartitionSpec(
    accountant="correlated noise on random allocation (dominating pair of arXiv 2410.06266), Monte "
    "Carlo with an empirical Bernstein bound; 2^-50 of delta pays for its probability of error",
    assumption=ASSUMPTION,
    check=_check,
    draw=draw,
    epsilon=_epsilon,
    delta=_delta,
    pair=gaussian_pair(1.0),  # it bounds both sides (proof note, step 5)
    noise=_noise,
    least_delta=2.0**-40,
    log_likelihood=one_round_each,
)
"""Each user draws its round, and the noise of later rounds takes back some of that of earlier."""
