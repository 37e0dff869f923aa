"""What a partition must do: :func:`check_partition`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.special import logsumexp

from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Mechanism, epsilon
from dprlhf.privacy.partitions import Partition, all_partitions, partition_named
from dprlhf.privacy.partitions.base import Allocation, PartitionSpec
from dprlhf.privacy.plan import make_plan
from dprlhf.privacy.randomness import uint64_stream
from dprlhf.privacy.relations import Adjacency

_DRAWS, _SAMPLES = 2000, 50_000
_SLACK = 1.15  # what a law estimated from 2,000 draws may add to δ


@dataclass(frozen=True)
class PartitionReport:
    """What :func:`check_partition` measured.

    Attributes:
        stated: The ε that the accountant states, by adjacency.
        delta: The δ that it is stated at.
        attained: The δ that a likelihood-ratio test attains at that ε, by adjacency: a lower bound
            from simulated runs, with its standard error.
    """

    stated: dict[str, float]
    delta: float
    attained: dict[str, tuple[float, float]]


def check_partition(
    name: Partition, *, rounds: int = 6, participations: int = 1, noise_multiplier: float = 1.0
) -> PartitionReport:
    """Check that a partition's draw and its accountant agree.

    The checks, each on draws under many keys:

    - **draw**: rounds hold users that exist, each at most once; the key decides the draw alone;
    - **batch size**: the mean batch is the public constant that released sums are divided by;
    - **independence**: where the accountant carries add-remove, one user more leaves the law of
      the other users' rounds as it is;
    - **likelihood**: the partition's ``log_likelihood`` is the one of its draws;
    - **epsilon**: at the stated ε, the likelihood-ratio test between runs with and without a user
      (or with its opposite, for replace-one) attains no more than δ. The test is computed from the
      draws themselves, by no accountant: a lower bound on what the run costs.

    Args:
        name: The partition, as a recipe names it.
        rounds: Number of rounds T, a small one: every pattern of rounds must be seen often.
        participations: Number of rounds k that a user takes part in.
        noise_multiplier: Noise multiplier z of the simulated runs.

    Raises:
        AssertionError: A check fails; the message names it.
        DprlhfError: There is no such partition.
    """
    if name not in (known := get_args(Partition)):
        raise DprlhfError(
            f"check_partition: there is no partition {name!r}: name one of {', '.join(known)}"
        )
    spec, fails = partition_named(name), f"partition {name!r} fails the check"
    draws = _Draws(spec, rounds, participations)
    _check_draw(draws, fails)
    carried = _carried(name, rounds, participations, noise_multiplier)
    if "add-remove" in carried:
        _check_independence(draws, fails)
    patterns = draws.patterns(2 * rounds)
    delta = 0.02
    stated: dict[str, float] = {}
    attained: dict[str, tuple[float, float]] = {}
    for adjacency, mechanism in carried.items():
        stated[adjacency] = epsilon(mechanism, delta).epsilon
        attained[adjacency] = _attained_delta(
            patterns, noise_multiplier, stated[adjacency], adjacency == "replace-one"
        )
        mean, error = attained[adjacency]
        assert mean - 4 * error <= _SLACK * delta, (
            f"{fails} 'epsilon' with adjacency {adjacency}: a likelihood-ratio test on its draws"
            f" attains δ = {mean:.4f} ± {error:.4f} at the stated ε = {stated[adjacency]:.4f},"
            f" which was stated for δ = {delta}: the accountant states too little"
        )
    assert stated, f"{fails} 'epsilon': it carries no adjacency"
    _check_likelihood(spec, patterns, participations, noise_multiplier, fails)
    return PartitionReport(stated, delta, attained)


def _carried(
    name: Partition, rounds: int, participations: int, noise_multiplier: float
) -> dict[Adjacency, Mechanism]:
    """Return the mechanism under each neighbouring relation that the partition carries."""
    carried: dict[Adjacency, Mechanism] = {}
    for adjacency in get_args(Adjacency):
        with contextlib.suppress(DprlhfError):
            carried[adjacency] = Mechanism(
                noise_multiplier, rounds, name, adjacency, participations
            )
    return carried


@dataclass(frozen=True)
class _Draws:
    """Draws of one partition under made-up keys."""

    spec: PartitionSpec
    rounds: int
    participations: int

    def draw(self, users: int, key: int) -> Allocation:
        secret = hashlib.sha256(f"made-up key {key}".encode()).digest()
        stream = functools.partial(uint64_stream, secret, "allocation")
        return self.spec.draw(users, self.rounds, self.participations, stream)

    def members(self, users: int, key: int) -> NDArray[np.bool_]:
        """Return who is in which round, ``[users, rounds]``."""
        allocation, members = self.draw(users, key), np.zeros((users, self.rounds), dtype=bool)
        for t in range(1, self.rounds + 1):
            members[allocation.round(t), t - 1] = True
        return members

    def patterns(self, users: int) -> NDArray[np.float64]:
        """Return the rounds of the first user under many keys, ``[draws, rounds]``."""
        return np.stack([self.members(users, key)[0] for key in range(_DRAWS)]).astype(np.float64)


def _check_draw(draws: _Draws, fails: str) -> None:
    users, spec = 20 * draws.rounds, draws.spec
    sizes = []
    for key in range(200):
        drawn = draws.draw(users, key)
        for t in range(1, draws.rounds + 1):
            batch = drawn.round(t)
            sizes.append(len(batch))
            inside = not len(batch) or (batch.min() >= 0 and batch.max() < users)
            assert inside, f"{fails} 'draw': round {t} holds a user that does not exist"
            assert len(np.unique(batch)) == len(batch), f"{fails} 'draw': round {t} repeats a user"
    first, again, other = (draws.members(users, key) for key in (0, 0, 1))
    assert (first == again).all(), f"{fails} 'draw': the same key draws differently"
    assert spec.in_order or (first != other).any(), (
        f"{fails} 'draw': another key draws the same. Take all randomness from the stream"
    )
    plan = make_plan(
        users=users,
        rounds=draws.rounds,
        delta=1e-5,
        epsilon=math.inf,
        partition=next(name for name, known in all_partitions().items() if known is spec),
        participations=draws.participations,
    )
    mean, expected = float(np.mean(sizes)), plan.expected_batch_size
    assert abs(mean - expected) <= 5 * math.sqrt(expected / len(sizes)), (
        f"{fails} 'batch size': batches have {mean:.3f} users on average, and released sums are"
        f" divided by {expected:.3f}"
    )


def _check_independence(draws: _Draws, fails: str) -> None:
    """Check that two users' rounds are independent, and one user more leaves their joint law."""
    pairs = {
        users: [draws.members(users, key)[:2] for key in range(_DRAWS)]
        for users in (draws.rounds, draws.rounds + 1)
    }
    for which in ("first", "last"):
        tables = []
        for users, drawn in pairs.items():
            table = np.zeros((draws.rounds + 1, draws.rounds + 1))
            np.add.at(table, tuple(np.stack([_one_round(m, which) for m in drawn]).T), 1)
            tables.append(table)
            dependent = _p_value(table)
            assert dependent > 1e-5, (
                f"{fails} 'independence': of {users} users, one's {which} round depends on"
                f" another's (p = {dependent:.1e})"
            )
        changed = _p_value(np.stack([table.ravel() for table in tables]))
        assert changed > 1e-5, (
            f"{fails} 'independence': one user more changes the law of the first two users'"
            f" {which} rounds (p = {changed:.1e})"
        )


def _one_round(members: NDArray[np.bool_], which: str) -> NDArray[np.int64]:
    """Return the first or the last round of each user from 1, or 0 for none, ``[users]``."""
    rounds = members * np.arange(1, members.shape[1] + 1)
    if which == "last":
        last: NDArray[np.int64] = rounds.max(1)
        return last
    first: NDArray[np.int64] = np.where(members.any(1), members.argmax(1) + 1, 0)
    return first


def _p_value(table: NDArray[np.float64]) -> float:
    """Return the p-value of the hypothesis that rows and columns are independent."""
    seen = table[table.sum(1) > 0][:, table.sum(0) > 0]
    return 1.0 if 1 in seen.shape else float(stats.chi2_contingency(seen).pvalue)


def _log_ratio(
    observed: NDArray[np.float64], patterns: NDArray[np.float64], noise: float
) -> NDArray[np.float64]:
    """Return log P(observed | the user took part) − log P(observed | noise alone), ``[runs]``."""
    different, counts = np.unique(patterns, axis=0, return_counts=True)
    exponent = (observed @ different.T - (different**2).sum(1) / 2) / noise**2
    ratio: NDArray[np.float64] = logsumexp(exponent, axis=1, b=counts / counts.sum())
    return ratio


def _attained_delta(
    patterns: NDArray[np.float64], noise: float, bound: float, replaced: bool
) -> tuple[float, float]:
    """Return the δ that the optimal test attains at ε, with its standard error, by simulation."""
    random = np.random.default_rng(0)
    took_part = patterns[random.integers(len(patterns), size=_SAMPLES)]
    noises = noise * random.standard_normal(took_part.shape)
    deltas = []
    # δ(ε) = E_P[(1 − e^ε Q/P)+], for both orders of the two neighbours P and Q.
    for observed, sign in ((took_part + noises, 1.0), (noises - took_part * replaced, -1.0)):
        ratio = _log_ratio(observed, patterns, noise)
        if replaced:
            ratio = ratio - _log_ratio(-observed, patterns, noise)
        exceeds = np.maximum(0.0, -np.expm1(bound - sign * ratio))
        deltas.append((float(exceeds.mean()), float(exceeds.std() / math.sqrt(_SAMPLES))))
    return max(deltas)


def _check_likelihood(
    spec: PartitionSpec,
    patterns: NDArray[np.float64],
    participations: int,
    noise: float,
    fails: str,
) -> None:
    if spec.in_order:
        return  # an auditor takes a user's place in the order as known
    random = np.random.default_rng(1)
    chosen = patterns[random.integers(len(patterns), size=500)]
    observed = chosen + noise * random.standard_normal(chosen.shape)
    said = spec.log_likelihood((observed - 0.5) / noise**2, participations)
    apart = float(np.abs(said - _log_ratio(observed, patterns, noise)).max())
    assert apart <= 0.3, (
        f"{fails} 'likelihood': log_likelihood is off by {apart:.3g} from that of the draws, so an"
        " audit would test another mechanism than the one that runs"
    )
