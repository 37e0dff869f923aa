"""Each partition is the one that was accounted for: laws, counts, secrecy, memory."""

import hashlib
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from dprlhf.boundary import Private, open_private
from dprlhf.privacy.partition import Allocation, allocate
from dprlhf.privacy.plan import Plan, make_plan

LEVEL = 1e-4
"""Keys are fixed, so a test that passes once passes always."""


def plan(users: int, rounds: int, partition: Any = "random-allocation", times: int = 1) -> Plan:
    return make_plan(
        users=users, rounds=rounds, delta=1e-5, epsilon=math.inf, partition=partition,
        participations=times,
    )  # fmt: skip


def key(number: int) -> bytes:
    return hashlib.sha256(f"key {number}".encode()).digest()


def draw(p: Plan, number: int = 0) -> Allocation:
    return open_private(allocate(p, key(number)))


def rounds_of(p: Plan, number: int) -> NDArray[np.int64]:
    """Return the only round of each user, 0 for a user that is left out, ``[users]``."""
    allocation = draw(p, number)
    rounds = np.zeros(p.users, dtype=np.int64)
    for t in range(1, p.rounds + 1):
        rounds[allocation.round(t)] = t
    return rounds


def many(p: Plan, keys: int) -> NDArray[np.int64]:
    """Return :func:`rounds_of` for many keys, ``[keys, users]``."""
    return np.stack([rounds_of(p, n) for n in range(keys)])


def uniform(counts: NDArray[Any]) -> bool:
    return bool(stats.chisquare(counts.ravel()).pvalue > LEVEL)


@pytest.mark.parametrize("times", [1, 4])
def test_marginals_are_uniform(times: int) -> None:
    p = plan(60_000, 20, times=times)
    allocation = draw(p)
    sizes = np.diff(allocation.starts)
    for block in sizes.reshape(times, -1):
        assert uniform(block)
    # A user's own round is uniform over keys, for the first and for the last user.
    of_keys = many(plan(7, 5), 4000)
    for user in (0, 3, 6):
        assert uniform(np.bincount(of_keys[:, user], minlength=6)[1:])


def dispersion_is_multinomial(p: Plan, keys: int = 400) -> bool:
    """Test that batch sizes vary as independent draws do: neither less nor more."""
    sizes = np.stack([np.diff(draw(p, n).starts) for n in range(keys)])
    expected = p.users / p.rounds
    statistic = ((sizes - expected) ** 2 / expected).sum()
    freedom = keys * (p.rounds - 1)
    tail = stats.chi2.cdf(statistic, freedom)
    return bool(LEVEL / 2 < tail < 1 - LEVEL / 2)


def test_batch_sizes_vary_and_a_shuffled_equal_cut_does_not_pass() -> None:
    assert dispersion_is_multinomial(plan(200, 4))
    assert not dispersion_is_multinomial(plan(200, 4, "fixed"))


def pairs_are_independent(rounds: NDArray[np.int64], first: int, second: int) -> bool:
    table = stats.contingency.crosstab(rounds[:, first], rounds[:, second]).count
    return uniform(table)


def test_two_users_draw_independently() -> None:
    rounds = many(plan(4, 4), 4000)
    for first in range(4):
        for second in range(first):
            assert pairs_are_independent(rounds, first, second)
    # A cut of a permutation: two users of four share one of two rounds 1/3 of the time, not 1/2.
    assert not pairs_are_independent(many(plan(4, 2, "fixed"), 4000), 0, 1)


def test_a_users_rounds_in_different_blocks_are_independent() -> None:
    p = plan(20_000, 8, times=2)
    allocation = draw(p)
    drawn = np.zeros((2, p.users), dtype=np.int64)
    for t in range(1, 9):
        drawn[(t - 1) // 4, allocation.round(t)] = (t - 1) % 4
    assert uniform(stats.contingency.crosstab(*drawn).count)


def other_users_keep_their_law(without: Plan, more: Plan, keys: int = 3000) -> bool:
    """Test that the joint law of the first three users is the same with one user more."""
    tables = []
    for number, p in enumerate((without, more)):
        rounds = np.stack([rounds_of(p, 10_000 * number + n)[:3] for n in range(keys)])
        codes = rounds @ np.array([1, 5, 25])
        tables.append(np.bincount(codes, minlength=125))
    both = np.stack(tables)
    return bool(stats.chi2_contingency(both[:, both.sum(0) > 0]).pvalue > LEVEL)


def test_adding_a_user_leaves_the_joint_law_of_the_others() -> None:
    assert other_users_keep_their_law(plan(3, 3), plan(4, 3))
    # With fixed batches, the fifth user can push one of the others out.
    assert not other_users_keep_their_law(plan(4, 2, "fixed"), plan(5, 2, "fixed"))


def test_the_mean_batch_is_the_divisor() -> None:
    for p in (plan(150, 10), plan(150, 10, times=5), plan(150, 10, "poisson", times=3)):
        mean = np.mean([np.diff(draw(p, n).starts) for n in range(300)])
        # At most the standard deviation of independent memberships.
        assert abs(mean - p.expected_batch_size) < 4 * math.sqrt(p.expected_batch_size / (300 * 10))


def test_stream_is_in_order_of_arrival_whatever_the_key() -> None:
    for number in (0, 1):
        allocation = draw(plan(11, 3, "stream"), number)
        assert [allocation.round(t).tolist() for t in (1, 2, 3)] == [
            [0, 1, 2],
            [3, 4, 5],
            [6, 7, 8],
        ]


def test_fixed_is_a_uniform_permutation() -> None:
    rounds = many(plan(5, 2, "fixed"), 4000)  # 2 + 2 users, one left out: 30 outcomes
    codes, counts = np.unique(rounds @ 3 ** np.arange(5), return_counts=True)
    assert len(codes) == 30
    assert uniform(counts)


def membership(p: Plan, number: int = 0) -> NDArray[np.bool_]:
    allocation = draw(p, number)
    member = np.zeros((p.rounds, p.users), dtype=bool)
    for t in range(1, p.rounds + 1):
        member[t - 1, allocation.round(t)] = True
    return member


def rounds_are_independent(p: Plan) -> bool:
    member = membership(p)
    table = stats.contingency.crosstab(member[0], member[1]).count
    return bool(stats.chi2_contingency(table).pvalue > LEVEL)


@pytest.mark.parametrize("times", [1, 3])
def test_poisson_joins_each_round_with_probability_k_over_t(times: int) -> None:
    p = plan(50_000, 10, "poisson", times)
    for t, size in enumerate(np.diff(draw(p).starts)):
        assert stats.binomtest(int(size), p.users, times / 10).pvalue > LEVEL, t
    times_taken = np.bincount(membership(p).sum(0), minlength=11)
    expected = stats.binom.pmf(np.arange(11), 10, times / 10) * p.users
    kept = expected > 5
    observed = [*times_taken[kept], times_taken[~kept].sum()]
    assert stats.chisquare(observed, [*expected[kept], expected[~kept].sum()]).pvalue > LEVEL


def test_poisson_rounds_are_independent_and_those_of_random_allocation_are_not() -> None:
    assert rounds_are_independent(plan(20_000, 4, "poisson"))
    assert not rounds_are_independent(plan(20_000, 4))


PARTITIONS = ["random-allocation", "fixed", "stream", "poisson"]


@st.composite
def plans(draw_: st.DrawFn) -> Plan:
    partition = draw_(st.sampled_from(PARTITIONS))
    rounds = draw_(st.integers(1, 24))
    users = draw_(st.integers(rounds, 200))
    times = 1
    if partition == "poisson":
        times = draw_(st.integers(1, rounds))
    elif partition == "random-allocation":
        times = draw_(st.sampled_from([k for k in range(1, rounds + 1) if rounds % k == 0]))
    return plan(users, rounds, partition, times)


@settings(max_examples=150, deadline=None)
@given(plans(), st.integers(0, 1000))
def test_nobody_is_drawn_more_often_than_was_accounted_for(p: Plan, number: int) -> None:
    allocation = draw(p, number)
    batches = [allocation.round(t) for t in range(1, p.rounds + 1)]
    assert len(allocation.starts) == p.rounds + 1
    assert sum(map(len, batches)) == len(allocation.order)
    for batch in batches:
        assert len(np.unique(batch)) == len(batch)  # once a round
        assert not len(batch) or 0 <= batch.min() <= batch.max() < p.users
    taken = np.bincount(np.concatenate(batches), minlength=p.users)
    match p.partition:
        case "random-allocation":
            assert (taken == p.participations).all()
            block = p.rounds // p.participations
            for b in range(p.participations):
                of_block = np.concatenate(batches[b * block : (b + 1) * block])
                assert np.array_equal(np.sort(of_block), np.arange(p.users))
        case "poisson":
            assert (taken <= p.rounds).all()
        case _:
            assert (taken <= 1).all()
            sizes = {len(batch) for batch in batches}
            assert sizes == {p.users // p.rounds} == {int(p.expected_batch_size)}


@pytest.mark.parametrize("partition", PARTITIONS)
def test_one_key_gives_one_partition_and_it_stays_private(partition: str) -> None:
    p = plan(300, 6, partition)
    first, again, other = draw(p, 1), draw(p, 1), draw(p, 2)
    np.testing.assert_array_equal(first.order, again.order)
    np.testing.assert_array_equal(first.starts, again.starts)
    assert isinstance(allocate(p, key(1)), Private)
    if partition != "stream":
        assert not np.array_equal(membership(p, 1), membership(p, 2))
        assert not np.array_equal(first.order, other.order)


def test_partitions_of_two_keys_have_nothing_in_common() -> None:
    p = plan(50_000, 4)
    table = stats.contingency.crosstab(rounds_of(p, 1), rounds_of(p, 2)).count
    assert uniform(table)


def test_the_partition_shares_no_stream_with_noise_or_rollout() -> None:
    from dprlhf.privacy.randomness import uint64_stream

    p = plan(2000, 4)
    expected = uint64_stream(key(0), "allocation", count=2000) % np.uint64(4) + np.uint64(1)
    np.testing.assert_array_equal(rounds_of(p, 0), expected)
