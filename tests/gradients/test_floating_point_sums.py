"""One user moves the sum by at most S, rounding included: against exact arithmetic."""

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dprlhf.boundary import Private
from dprlhf.errors import DprlhfError
from dprlhf.gradients import ghost_norm
from dprlhf.gradients.clipping import clip_factors, clip_users, clipped_vectors, rounding_margin
from dprlhf.gradients.ghost_norm import (
    OuterProducts,
    _chunk_by_chunk,
    add_weighted,
    rounding,
    side_by_side,
    square_norm,
)

S = 0.7
N, M = 5, 6  # a weight's shape
PATTERNS = (
    "plain", "cancelling", "nearly cancelling", "one token", "signs", "wide range", "tiny", "huge",
)  # fmt: skip


def exact_norm_square(x: torch.Tensor) -> Fraction:
    return sum((Fraction(float(v)) ** 2 for v in x.flatten().double().tolist()), Fraction(0))


def moved(one: torch.Tensor, other: torch.Tensor) -> Fraction:
    """The squared distance of two float64 sums, exactly."""
    pairs = zip(one.flatten().tolist(), other.flatten().tolist(), strict=True)
    return sum(((Fraction(a) - Fraction(b)) ** 2 for a, b in pairs), Fraction(0))


def factors_of(pattern, tokens, generator):
    """The factors of one adversarial user, ``[tokens, N]`` and ``[tokens, M]``."""
    left = torch.randn(tokens, N, generator=generator)
    right = torch.randn(tokens, M, generator=generator)
    half = tokens // 2
    if pattern in ("cancelling", "nearly cancelling"):
        left[half : 2 * half], right[half : 2 * half] = -1e6 * left[:half], right[:half]
        left[:half] *= 1e6
        if pattern == "nearly cancelling":
            right[half:] *= 1 + 1e-6 * torch.randn(right[half:].shape, generator=generator)
    elif pattern == "one token":
        left, right = left[:1].repeat(tokens, 1), right[:1].repeat(tokens, 1)
    elif pattern == "signs":
        left, right = left.sign(), right.sign() * (1 + 2**-23)
    elif pattern == "wide range":
        left = left * 10.0 ** torch.empty(tokens, 1).uniform_(-12, 9, generator=generator)
        right = right * 10.0 ** torch.empty(tokens, 1).uniform_(-12, 2, generator=generator)
    elif pattern == "tiny":
        left, right = 1e10 * left, 1e-30 * right
    elif pattern == "huge":
        left, right = 1e18 * left, 1e-24 * right
    return left, right


def uses_of(patterns, tokens, seed, *, tied, bf16):
    """Users side by side; a tied weight has a use by index, which may cancel the dense one."""
    generator = torch.Generator().manual_seed(seed)
    pairs = [factors_of(pattern, tokens, generator) for pattern in patterns]
    left, right = (torch.stack(factors) for factors in zip(*pairs, strict=True))
    if bf16:
        left, right = left.bfloat16(), right.bfloat16()
    uses = [OuterProducts(left, right)]
    if tied:
        index = torch.randint(N, (len(patterns), tokens), generator=generator)
        at_tokens = -left.float().gather(2, index[:, :, None]) * right.float()
        uses.append(OuterProducts(index, at_tokens))
    return uses


def summed(uses: list[OuterProducts], factors: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(N, M, dtype=torch.float64)
    add_weighted(uses, factors, total)
    return total


def only(factors: torch.Tensor, user: int) -> torch.Tensor:
    return torch.where(torch.arange(len(factors)) == user, factors, 0.0)


def without(factors: torch.Tensor, user: int) -> torch.Tensor:
    return torch.where(torch.arange(len(factors)) == user, 0.0, factors)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    patterns=st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=4),
    tokens=st.sampled_from([1, 2, 7, 96]),
    seed=st.integers(0, 2**20),
    tied=st.booleans(),
    bf16=st.booleans(),
)
def test_no_user_moves_the_sum_by_more_than_the_clip_norm(patterns, tokens, seed, tied, bf16):
    uses = uses_of(patterns, tokens, seed, tied=tied, bf16=bf16)
    factors = clip_factors(square_norm(uses)[1].sqrt(), S)
    whole = summed(uses, factors)
    for user in range(len(patterns)):
        assert exact_norm_square(summed(uses, only(factors, user))) <= Fraction(S) ** 2
        assert moved(whole, summed(uses, without(factors, user))) <= Fraction(S) ** 2


@pytest.mark.parametrize("tied", [False, True])
def test_a_user_is_the_same_to_the_bit_beside_any_other(tied: bool) -> None:
    """The sum is that of each user's own block, whatever the others hold, and so is the bound."""
    patterns = ["plain", "nearly cancelling", "wide range", "one token"]
    uses = uses_of(patterns, 96, 3, tied=tied, bf16=False)
    bound = square_norm(uses)[1]
    factors = clip_factors(bound.sqrt(), S)
    alone = [summed(uses, only(factors, user)) for user in range(4)]
    expected = torch.zeros(N, M, dtype=torch.float64)
    for own in alone:
        assert torch.equal(own, own.float().double())  # a float32 block
        expected += own
    assert torch.equal(summed(uses, factors), expected)
    others = uses_of(["signs", *patterns[1:]], 96, 4, tied=tied, bf16=False)
    for use, other in zip(uses, others, strict=True):
        use.left[0], use.right[0] = other.left[0], other.right[0]
    assert torch.equal(square_norm(uses)[1][1:], bound[1:])
    for user in (1, 2, 3):
        assert torch.equal(summed(uses, only(factors, user)), alone[user])


def test_every_rounding_may_go_the_same_way() -> None:
    """Terms that all round up: the sum of 512 errs by 384 roundings or more, not by one."""
    left, right = torch.ones(1, 512, N), torch.full((1, 512, M), 1.01 * 2.0**-24)
    right[:, 0] = 1
    use = OuterProducts(left, right)
    square, bound = square_norm([use])
    just = float(bound.sqrt()) / (1 - rounding_margin(100))  # the user is not scaled at all
    factors = clip_factors(bound.sqrt(), just * (1 + 1e-12), most_users=100)
    assert float(factors[0]) == 1
    computed = exact_norm_square(summed([use], factors))
    assert computed <= Fraction(float(bound)) <= Fraction(just) ** 2
    # Negative control: what it rounds to is longer than what it is, by many roundings.
    assert computed > Fraction(float(square)) * (1 + 100 * Fraction(2) ** -24) ** 2


def test_a_user_whose_factors_underflow_is_not_taken_for_small() -> None:
    """Squares below the smallest float32 vanish in a Gram matrix; the user must not."""
    left, right = torch.full((1, 64, 128), 1e9), torch.full((1, 64, 128), 1e-23)
    bound = square_norm([OuterProducts(left, right)])[1]
    exact = float((left.double().mT @ right.double()).norm())
    assert float(bound.sqrt()) >= exact


def test_factors_that_cannot_be_scaled_leave_their_user_out() -> None:
    left, right = torch.ones(2, 3, N), torch.ones(2, 3, M)
    left[0], right[0] = 1e19, 1e-19
    bound = square_norm([OuterProducts(left, right)])[1].sqrt()
    factors = clip_factors(bound, S)
    assert factors[0] == 0
    assert factors[1] > 0


@pytest.mark.slow
def test_the_margin_covers_the_rounding_of_a_sum_over_users() -> None:
    """8,000 users at the clip norm, whose sum rounds up each time, against a sum that does not."""
    users, clip_norm = 8000, 1.0
    unit = 2.0**-40  # of the largest partial sums
    largest = clip_norm * (1 - rounding_margin(users))
    value = (int(largest / unit) - 1) * unit + 0.501 * unit  # rounds up to the next unit
    vectors = torch.full((users, 1), value, dtype=torch.float64)
    assert float(clip_users(vectors[:1], clip_norm, most_users=users)[0]) == value

    def total(size: int, count: int) -> torch.Tensor:
        def batches() -> Iterator[tuple[NDArray[np.int64], torch.Tensor]]:
            for start in range(0, count, size):
                end = min(count, start + size)
                yield np.arange(start, end), vectors[start:end]

        return clipped_vectors(
            Private(batches()), 1, extra=Private(np.zeros((users, 0))), extra_norm=0.0,
            clip_norm=clip_norm, reduce=lambda x: x, most_users=users,
        ).bounded.total  # fmt: skip

    # The same users but one, in other micro-batches.
    difference = moved(total(1, users), total(users, users - 1))
    assert difference <= Fraction(clip_norm) ** 2
    # Negative control: it is longer than the one user's vector, by more than a single rounding.
    assert difference > Fraction(value + 1e-9) ** 2


def test_the_margin_grows_with_the_users_and_has_an_end() -> None:
    assert rounding_margin(100) < 1e-9
    assert rounding_margin(10**5) == pytest.approx(2 * 10**5 * 1.041e5 * 2**-53, rel=1e-3)
    assert rounding_margin(10**6) < 3e-4
    with pytest.raises(DprlhfError, match="users in a round"):
        rounding_margin(10**8)


def test_more_users_than_promised_are_refused() -> None:
    with pytest.raises(ValueError, match="promised"):
        clipped_vectors(
            Private([]), 1, extra=Private(np.zeros((12, 0))), extra_norm=0.0, clip_norm=1.0,
            reduce=lambda x: x, most_users=10,
        )  # fmt: skip


def test_rounding_is_the_bound_of_higham() -> None:
    assert rounding(0, torch.float32) == 0
    assert rounding(64, torch.float32) == pytest.approx(64 * 2**-24, rel=1e-5)
    assert rounding(2**24, torch.float32) == float("inf")


@pytest.mark.parametrize("width", [3, 64, 65, 200, 640])
def test_chunks_together_are_summed_as_chunks_apart(width: int) -> None:
    """On an accelerator many chunks are one product; each still is a float32 sum of 64 terms."""
    draw = torch.Generator().manual_seed(width)
    a, b = (torch.randn(3, rows, width, generator=draw) for rows in (5, 7))
    found = _chunk_by_chunk(a, b).double()
    allowed = rounding(64, torch.float32) * (a.double().abs() @ b.double().abs().mT)
    assert bool(((found - a.double() @ b.double().mT).abs() <= allowed).all())


def test_chunks_are_added_up_in_float64() -> None:
    ones = torch.ones(1, 1, 640)
    first = torch.zeros(1, 1, 640)
    first[..., ::64], first[..., 0] = 1.0, 2.0**24  # 2²⁴ + 1 is no float32
    assert float(_chunk_by_chunk(first, ones)) == 2.0**24 + 9


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_how_chunks_are_grouped_does_not_depend_on_the_number_of_users(device, monkeypatch):
    """A micro-batch's last group of users is smaller; "meta" stands for any accelerator."""
    widths: list[int] = []

    def noted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        widths.append(a.shape[2])
        return a @ b.mT

    monkeypatch.setattr(ghost_norm, "_chunk_by_chunk", noted)
    found = []
    for users in (1, 3, 64):
        widths.clear()
        factors = torch.empty(users, 32, 5000, device=device)
        ghost_norm._inner(factors, factors)
        found.append(list(widths))
    assert found[0] == found[1] == found[2]
    assert found[0][0] == (64 if device == "cpu" else 1024)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_found_in_the_items_order_and_with_one_thread_each(threads: int) -> None:
    def work(item: int) -> tuple[int, int]:
        torch.ones(2**16).exp().sum()
        return item, torch.get_num_threads()

    assert side_by_side(work, range(7)) == [(i, 1) for i in range(7)]
    assert torch.get_num_threads() == threads


def test_an_error_comes_through_and_leaves_the_number_of_threads(threads: int) -> None:
    def work(item: int) -> float:
        return 1 / item

    with pytest.raises(ZeroDivisionError):
        side_by_side(work, [1, 0, 2])
    assert torch.get_num_threads() == threads
    assert side_by_side(work, []) == []


@pytest.mark.parametrize("tied", [False, True])
def test_a_weighted_sum_is_the_same_to_the_bit_and_close_to_float64(threads, tied):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    n, m, users = 700, 1600, 3  # several blocks each way, the last ones narrower
    uses = [OuterProducts(normal(users, 5, n), normal(users, 5, m))]
    if tied:
        tokens = torch.randint(0, n, (users, 6), generator=generator)
        uses.append(OuterProducts(tokens, normal(users, 6, m)))
    factors = torch.tensor([0.5, 0.0, 1.0], dtype=torch.float64)
    total = torch.ones(n, m, dtype=torch.float64)
    add_weighted(uses, factors, total)

    expected = torch.ones(n, m, dtype=torch.float64)
    for left, right in uses:
        rows = left.double()
        if not left.is_floating_point():
            rows = torch.nn.functional.one_hot(left, n).double()
        expected += torch.einsum("u,utn,utm->nm", factors, rows, right.double())
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-5)

    torch.set_num_threads(1)
    alone = torch.ones(n, m, dtype=torch.float64)
    add_weighted(uses, factors, alone)
    assert torch.equal(total, alone)
