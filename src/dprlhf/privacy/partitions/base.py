"""What the code knows about one partition: a way to spread the users over the rounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from dprlhf.privacy.curves import Composed
from dprlhf.privacy.gaussian import gaussian_deltas, gaussian_epsilon
from dprlhf.privacy.random_allocation import Side
from dprlhf.privacy.relations import Adjacency

Array = NDArray[np.float64]

ONE_RELEASE = (
    "privacy.bands: the gate correlates one release a round; use an update with one release a"
    " round, or bands 1"
)

Stream = Callable[..., NDArray[np.uint64]]
"""``stream(*context, count=n)`` returns n uniform 64-bit integers, of one secret stream for each
context."""


class Terms(Protocol):
    """What a partition reads of a :class:`~dprlhf.privacy.accounting.Mechanism`."""

    def __hash__(self) -> int:
        """Return a hash: what terms cost is kept."""

    @property
    def partition(self) -> str:
        """Name of the partition."""

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation z of a release's noise, in units of the clip norm."""

    @property
    def rounds(self) -> int:
        """Number of rounds T."""

    @property
    def adjacency(self) -> Adjacency:
        """The neighbouring relation."""

    @property
    def participations(self) -> int:
        """Number k of rounds that a user takes part in."""

    @property
    def releases_per_round(self) -> int:
        """Number J of noised sums over the users of one round."""

    @property
    def bands(self) -> int:
        """Number b of rounds whose noise is correlated; 1 for independent noise."""

    @property
    def rate(self) -> float | None:
        """Probability q of joining a round, where it is below k/T."""


@dataclass(frozen=True)
class Allocation:
    """Users in the order of their rounds: memory linear in users × participations.

    Attributes:
        order: user indices sorted by round, ``[users × participations]``.
        starts: where round t begins in ``order``, ``[rounds + 1]`` (round t is entry t − 1).
    """

    order: NDArray[np.int64]
    starts: NDArray[np.int64]

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

    curve: Callable[[Terms, Any, Side], Array]
    reach: Callable[[Terms, float, Side], float]


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
        correlated: The same draw with the accountant for noise that is correlated between rounds;
            None where there is none. Disjoint batches need no other accountant.
    """

    accountant: str
    assumption: str
    check: Callable[[Terms], None]
    draw: Callable[[int, int, int, Stream], Allocation]
    epsilon: Callable[[Terms, float, float], tuple[float, float]]
    delta: Callable[[Terms, float, float, bool], float]
    pair: Pair
    log_likelihood: Callable[[Array, int], Array]
    replaced: Pair | None = None
    factors: Callable[[Terms], int] | None = None
    step: Callable[[Terms], float] | None = None
    losses: Callable[[Terms], dict[Side, Composed]] | None = None
    disjoint: bool = False
    in_order: bool = False
    independent_rounds: bool = False
    noise: Callable[[Terms, float, float, float], float] | None = None
    least_delta: float = 0.0
    correlated: PartitionSpec | None = None

    def rounds_at_most(self, terms: Terms) -> int:
        """Return in how many rounds one user can be."""
        return terms.rounds if self.independent_rounds else terms.participations


def round_noise(terms: Terms) -> float:
    """Return z/√J: all releases of one round are one Gaussian release with this multiplier."""
    return terms.noise_multiplier / math.sqrt(terms.releases_per_round)


def half_noise(terms: Terms, taken: int) -> float:
    """Return the multiplier of one Gaussian that covers a removal, or an addition, of a user.

    Args:
        terms: Under replace-one a replacement is one of each.
        taken: Number of rounds that the user is in.
    """
    return terms.noise_multiplier / math.sqrt(terms.releases_per_round * taken)


def one_round_each(of_round: Array, participations: int) -> Array:
    """Return log-likelihood ratios where a user is in one uniform round of each of k blocks.

    Args:
        of_round: The log-likelihood ratio if the round were the user's, ``[users, rounds]``.
        participations: Number k of blocks, which are T/k rounds long.

    Returns:
        ``[users]``.
    """
    blocks = of_round.reshape(len(of_round), participations, -1)
    means: Array = (logsumexp(blocks, axis=2) - math.log(blocks.shape[2])).sum(1)
    return means


def single_curve(noise: float, epsilons: Any) -> Array:
    """Return the exact δ of one Gaussian release at each ε, ``[points]``."""
    return gaussian_deltas(noise, np.asarray(epsilons, dtype=np.float64))


def gaussian_pair(sensitivity: float) -> Pair:
    """Return the pair of a run in which a user is in one round, and everybody may know which.

    Args:
        sensitivity: How far the user moves the round's sum, in units of S.
    """

    def noise(terms: Terms) -> float:
        return round_noise(terms) / sensitivity

    return Pair(
        lambda terms, epsilons, side: single_curve(noise(terms), epsilons),
        lambda terms, tail, side: gaussian_epsilon(noise(terms), tail),
    )
