"""Products in threads of their own: the same numbers, and torch's own threads left as they were."""

from collections.abc import Iterator

import pytest
import torch

from dprlhf.gradients.ghost_norm import OuterProducts, add_weighted
from dprlhf.gradients.threads import side_by_side


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
