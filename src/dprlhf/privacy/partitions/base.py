"""What a run releases, and what is known about a partition of its users over the rounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from dprlhf.errors import DprlhfError
from dprlhf.privacy.gaussian import gaussian_deltas, gaussian_epsilon
from dprlhf.privacy.partitions import Partition, correlated_partition, partition_named
from dprlhf.privacy.random_allocation import Side
from dprlhf.privacy.relations import DEFAULT_ADJACENCY, Adjacency, check_adjacency

if TYPE_CHECKING:
    from dprlhf.privacy.losses import Composed

Array = NDArray[np.float64]

ONE_RELEASE = (
    "privacy.bands: the gate correlates one release a round; use an update with one release a"
    " round, or bands 1"
)

Stream = Callable[..., NDArray[np.uint64]]
"""``stream(*context, count=n)`` returns n uniform 64-bit integers, of one secret stream for each
context."""


_MOST = 10**9
"""Largest number of rounds and the like: beyond it, formulas lose their precision."""


@dataclass(frozen=True)
class Mechanism:
    """What a whole run releases.

    Attributes:
        noise_multiplier: z, the noise standard deviation of the released sum divided by the clip
            norm S, under every adjacency (replace-one doubles the sensitivity, not z). Zero is a
            run without privacy, for which no function here returns a cost.
        rounds: T.
        partition: how users are spread over the rounds.
        adjacency: what a neighbouring dataset is.
        participations: k, the rounds of T that a user takes part in (poisson: on average).
        releases_per_round: J noisy sums per round over the same users, each with z.
        bands: b, the rounds whose noise is correlated (:mod:`dprlhf.privacy.correlated_noise`); 1
            draws each round's noise by itself.
        rate: q, with poisson the probability of joining a round where it is below k/T; None: k/T.

    Raises:
        DprlhfError: a value is out of range, or the partition does not carry the adjacency.
    """

    noise_multiplier: float
    rounds: int
    partition: Partition = "random-allocation"
    adjacency: Adjacency = DEFAULT_ADJACENCY
    participations: int = 1
    releases_per_round: int = 1
    bands: int = 1
    rate: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be accounted for."""
        if not self.noise_multiplier >= 0:
            raise without_noise(self.noise_multiplier)
        for name in ("rounds", "participations", "releases_per_round", "bands"):
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= 1):
                raise DprlhfError(f"{name} must be a whole number of at least 1, not {value}")
            if value > _MOST:
                raise DprlhfError(f"{name} must be at most {_MOST:,}")
        if self.partition not in get_args(Partition):
            names = ", ".join(get_args(Partition))
            raise DprlhfError(f"partition {self.partition!r} is unknown: use one of {names}")
        check_adjacency(self.adjacency)
        if self.participations > self.rounds:
            raise DprlhfError(
                f"participations {self.participations} exceeds rounds {self.rounds}: "
                "a user takes part in a round at most once"
            )
        if self.rate is not None and (
            self.partition != "poisson" or not 0 < self.rate * self.rounds <= self.participations
        ):
            raise DprlhfError(
                f"rate {self.rate} must be above 0 and at most participations / rounds, and is for"
                " partition poisson"
            )
        self.spec.check(self)

    @property
    def spec(self) -> PartitionSpec:
        """The draw and the accountant of the mechanism's partition."""
        spec: PartitionSpec = partition_named(self.partition)
        if self.bands == 1 or spec.disjoint:
            return spec
        correlated: PartitionSpec | None = correlated_partition(self.partition)
        if correlated is None:
            raise DprlhfError(
                f"privacy.bands: partition {self.partition} does not carry correlated noise; use"
                " random-allocation, fixed or stream, or bands 1"
            )
        return correlated

    def with_noise(self, noise_multiplier: float) -> Mechanism:
        """Return the same mechanism with another noise multiplier."""
        return Mechanism(**{**vars(self), "noise_multiplier": noise_multiplier})


def without_noise(noise_multiplier: float) -> DprlhfError:
    """Return the refusal of a mechanism without noise, which has no ε."""
    return DprlhfError(
        f"noise_multiplier must be above 0, not {noise_multiplier}: "
        "without noise there is no epsilon"
    )


@dataclass(frozen=True)
class Allocation:
    """Users in the order of their rounds: memory linear in users × participations."""

    order: NDArray[np.int64]  # user indices sorted by round, [users × participations]
    starts: NDArray[np.int64]  # [rounds + 1]

    def round(self, round_: int) -> NDArray[np.int64]:
        """Return the users of round t = 1..T."""
        return self.order[self.starts[round_ - 1] : self.starts[round_]]


@dataclass(frozen=True)
class Pair:
    """A pair of distributions that dominates one factor of a run, by its privacy curves.

    Attributes:
        curve: ``curve(terms, epsilons, side)`` returns upper bounds on one side's δ, ``[points]``.
        reach: ``reach(terms, tail, side)`` returns an ε at which that δ is at most ``tail``.
    """

    curve: Callable[[Mechanism, Any, Side], Array]
    reach: Callable[[Mechanism, float, Side], float]


@dataclass(frozen=True)
class PartitionSpec:
    """One partition: its draw, its accountant, how it composes, and what an auditor sees of it.

    The accountant knows one bound for every partition: the single Gaussian that covers the run if
    everybody knew who is in which round (:func:`dprlhf.privacy.accounting.single_noise`). The
    functions here state what the secrecy of the rounds adds; the smaller bound counts.

    Attributes:
        accountant: Name of the method, for reports.
        assumption: What must hold of the draw for the stated ε.
        check: Raises DprlhfError for terms that the partition does not carry.
        draw: ``draw(users, rounds, participations, stream)`` returns who is in which round; its
            only randomness is the stream, which the run's secret key seeds.
        epsilon: ``epsilon(terms, delta, single)`` returns an upper and a lower bound on ε;
            ``single`` is the ε of the single Gaussian.
        delta: ``delta(terms, epsilon, single, rough)`` returns an upper bound on δ; ``single`` is
            the δ of the single Gaussian, and a ``rough`` bound may be looser but is faster.
        pair: What dominates one factor of a run with a user against one without; it composes.
        replaced: The same where a user is replaced by another; None where that is not carried.
        log_likelihood: ``log_likelihood(of_round, participations)`` returns
            log P(observed | took part) − log P(observed | noise alone), ``[users]``, from the same
            of each round if it were the user's, ``[users, rounds]``.
        factors: Returns how many independent copies of a pair the run consists of; None where the
            pair is the whole run's.
        step: Returns the step that the smallest losses of one pair need, on a grid that widens;
            None where an even grid of a fixed share of their reach is fine enough.
        losses: Returns the pessimistic privacy losses of a run of several factors, by side; None
            where the pair is the whole run's.
        disjoint: True where every user is in at most one batch, of a fixed size, and ε holds
            against those who know which.
        in_order: True where users come in the order of arrival, so that anybody knows their round.
        independent_rounds: True where a user may join every round, each independently.
        noise: ``noise(terms, epsilon, delta, high)`` proposes a noise multiplier below ``high``
            for an ε, which is then put through ``epsilon``; None to find it by way of ``delta``.
        least_delta: The least δ that a run may have; below it the bounds are those of one Gaussian.
    """

    accountant: str
    assumption: str
    check: Callable[[Mechanism], None]
    draw: Callable[[int, int, int, Stream], Allocation]
    epsilon: Callable[[Mechanism, float, float], tuple[float, float]]
    delta: Callable[[Mechanism, float, float, bool], float]
    pair: Pair
    log_likelihood: Callable[[Array, int], Array]
    replaced: Pair | None = None
    factors: Callable[[Mechanism], int] | None = None
    step: Callable[[Mechanism], float] | None = None
    losses: Callable[[Mechanism], dict[Side, Composed]] | None = None
    disjoint: bool = False
    in_order: bool = False
    independent_rounds: bool = False
    noise: Callable[[Mechanism, float, float, float], float] | None = None
    least_delta: float = 0.0


def round_noise(terms: Mechanism) -> float:
    """Return z/√J: all releases of one round are one Gaussian release with this multiplier."""
    return terms.noise_multiplier / math.sqrt(terms.releases_per_round)


def one_round_each(of_round: Array, participations: int) -> Array:
    """Return log-likelihood ratios where a user is in one uniform round of each of k blocks."""
    blocks = of_round.reshape(len(of_round), participations, -1)
    means: Array = (logsumexp(blocks, axis=2) - math.log(blocks.shape[2])).sum(1)
    return means


def gaussian_pair(sensitivity: float) -> Pair:
    """Return the pair of a run in which a user is in one round, and everybody may know which."""

    def noise(terms: Mechanism) -> float:
        return round_noise(terms) / sensitivity

    return Pair(
        lambda terms, epsilons, side: gaussian_deltas(
            noise(terms), np.asarray(epsilons, dtype=np.float64)
        ),
        lambda terms, tail, side: gaussian_epsilon(noise(terms), tail),
    )
