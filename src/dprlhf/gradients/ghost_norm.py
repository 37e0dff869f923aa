"""A layer's per-user gradient as a sum of outer products: its norm and weighted sum, without it.

The weight of a linear layer with input x and output gradient g has the gradient G_u = Σ_t l_t r_tᵀ
over the tokens t of user u, with l = g and r = x. An embedding is a linear layer whose inputs are
one-hot rows. Clipping needs two sums over such factors, and never all G_u at once:

- ‖G_u‖² = Σ_{s,t} ⟨l_s, l_t⟩ ⟨r_s, r_t⟩, from two T × T Gram matrices (the ghost norm of
  Goodfellow, arXiv 1510.01799, and Li et al., arXiv 2110.05679);
- Σ_u c_u G_u, with as many multiplications as an ordinary backward pass (book-keeping, Bu et al.,
  arXiv 2210.00038). Not one product over the tokens of all users, as there: one user's presence
  would change how the others' terms round, by more than any bound on that user. Each user has a
  product of its own, block by block, and blocks are added up in float64.

A parameter that is used several times (a module called twice, an embedding tied to the output
layer) has the tokens of all uses side by side: its norm has the cross terms, its sum adds up.

The bound on rounding is proven in ``docs/proofs/floating_point_sums.md``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F

Item = TypeVar("Item")
Result = TypeVar("Result")

# The sides of a block of one user's product: it and its float64 sum stay near a core. On an
# accelerator: the most elements of the blocks of all users together.
_ROWS, _COLUMNS = 256, 768
_BLOCK_ON_ACCELERATOR = 2**26
# The most elements of the users' Gram matrices to hold at once.
_GRAM = 2**22
# Gram matrices in float32 are summed up in float64 after so many terms.
_CHUNK = 64
# On an accelerator so many chunks' Gram matrices are made at once that those of a full group of
# users have at most this many elements: to start hundreds of small products takes longer.
_GRAMS_ON_ACCELERATOR = 2**26
# Larger factors could underflow when they are scaled to the clip norm: their user counts as not
# finite. Ordinary factors are below 10⁶.
_LARGEST = 2.0**40
_SMALLEST_SQUARE = 2.0**-100  # of an element, in upper bounds: it covers underflow


class OuterProducts(NamedTuple):
    """The factors of one use of a weight ``[n, m]``."""

    left: torch.Tensor  # [users, tokens, n]
    right: torch.Tensor  # The factors r, [users, tokens, m]


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in float32 or wider; integers as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x


def rounding(operations: int, dtype: torch.dtype) -> float:
    """Return γ_n = n u/(1 − n u), Higham's bound on the relative error of n roundings."""
    # A sum of n products errs by at most γ_n Σ |a_i b_i| in any order, fused or not (section 3.1).
    product = operations * torch.finfo(dtype).eps / 2
    return product / (1 - product) if product < 1 else math.inf


def per_user(use: OuterProducts, n: int) -> torch.Tensor:
    """Return G_u of each user, ``[users, n, m]``."""
    left, right = at_least_float32(use.left), at_least_float32(use.right)
    if left.is_floating_point():
        return left.mT @ right
    users = len(left)
    own_rows = n * torch.arange(users, device=left.device)[:, None]
    out = right.new_zeros(users * n, right.shape[2])
    rows = _summed_by_token(left, right)
    out.index_add_(0, (left + own_rows).flatten(), rows.flatten(0, 1))
    return out.view(users, n, -1)


def square_norm(uses: Sequence[OuterProducts]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ‖Σ_uses G_u‖², and an upper bound on it with rounding, each ``[users]``, float64.

    The second is (‖G_u‖ + error)², for the rounding of the Gram matrices and of the user's part of
    :func:`add_weighted`. Both grow with A = Σ_t ‖l_t‖ ‖r_t‖, not with ‖G_u‖: a user whose terms
    cancel could shrink its norm to nothing and still move the sum by a rounding error above any
    clip norm. Infinite for factors too large to be scaled without underflow; NaN where they are not
    finite.
    """
    wide = [OuterProducts(at_least_float32(left), at_least_float32(right)) for left, right in uses]
    users, tokens = len(wide[0].right), sum(use.right.shape[1] for use in wide)
    group = max(1, _GRAM // tokens**2)
    groups = [
        _square_norm([OuterProducts(*(f[i : i + group] for f in use)) for use in wide])
        for i in range(0, users, group)
    ]
    square, bound = (torch.cat(parts) for parts in zip(*groups, strict=True))
    return square, bound


def _square_norm(uses: Sequence[OuterProducts]) -> tuple[torch.Tensor, torch.Tensor]:
    square: torch.Tensor | float = 0.0
    lengths: list[tuple[torch.Tensor, torch.Tensor]] = []
    dtype = uses[0].right.dtype
    widest = max(factor.shape[2] for use in uses for factor in use if factor.dim() == 3)
    of_inner = rounding(_CHUNK, dtype) + rounding(widest // _CHUNK + 4, torch.float64)
    for i, use in enumerate(uses):
        for other in uses[:i]:
            cross = _inner(use.left, other.left) * _inner(use.right, other.right)
            square = square + 2 * cross.sum((1, 2))
        grams = _inner(use.left, use.left), _inner(use.right, use.right)
        square = square + (grams[0] * grams[1]).sum((1, 2))
        left, right = (
            _upper_lengths(gram, factor, of_inner) for gram, factor in zip(grams, use, strict=True)
        )
        lengths.append((left, right))
    assert isinstance(square, torch.Tensor)
    left, right = (torch.cat(of_uses, dim=1) for of_uses in zip(*lengths, strict=True))
    a, tokens = (left * right).sum(1), left.shape[1]
    of_square = 2 * of_inner + of_inner**2 + 2 * rounding(tokens**2 + 4, torch.float64)
    square = square.clamp(min=0)
    upper = (square + of_square * a.square()).sqrt() + rounding(tokens + 2, dtype) * a
    too_large = (left.sum(1) > _LARGEST) | (right.sum(1) > _LARGEST)
    return square, torch.where(too_large, math.inf, upper.square())


def _upper_lengths(gram: torch.Tensor, factor: torch.Tensor, error: float) -> torch.Tensor:
    """Return upper bounds on the factors' lengths, ``[users, tokens]``, from their Gram matrix."""
    squares = gram.diagonal(dim1=1, dim2=2)
    if not factor.is_floating_point():
        return squares  # one-hot rows have length 1
    return ((squares + factor.shape[2] * _SMALLEST_SQUARE) / (1 - error)).sqrt()


def _inner(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ⟨a_s, b_t⟩, ``[users, tokens of a, tokens of b]``, float64."""
    if a.is_floating_point() and b.is_floating_point():
        total = a.new_zeros(len(a), a.shape[1], b.shape[1], dtype=torch.float64)
        step = _chunks_at_once(a.device.type, a.shape[1] * b.shape[1]) * _CHUNK
        for start in range(0, a.shape[2], step):
            part = slice(start, start + step)
            total += _chunk_by_chunk(a[:, :, part], b[:, :, part])
        return total
    if a.is_floating_point():
        return a.gather(2, b[:, None, :].expand(-1, a.shape[1], -1)).double()
    if b.is_floating_point():
        return _inner(b, a).mT
    return (a[:, :, None] == b[:, None, :]).double()


def _chunks_at_once(device_type: str, pairs: int) -> int:
    """Return how many chunks make one product; it depends on a user's own ``pairs`` only."""
    # Else the order of chunks, and so a user's norm, would depend on who else is there.
    return 1 if device_type == "cpu" else max(1, _GRAMS_ON_ACCELERATOR // max(_GRAM, pairs))


def _chunk_by_chunk(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return Σ_chunks ⟨a_s, b_t⟩, each chunk in the factors' own type, the sum in float64."""
    if a.shape[2] <= _CHUNK:
        return a @ b.mT
    padded = (F.pad(x, (0, -x.shape[2] % _CHUNK)) for x in (a, b))
    a, b = (x.reshape(*x.shape[:2], -1, _CHUNK).transpose(1, 2) for x in padded)
    return (a @ b.mT).sum(1, dtype=torch.float64)


def add_weighted(uses: Sequence[OuterProducts], factors: torch.Tensor, total: torch.Tensor) -> None:
    """Add Σ_u c_u G_u to ``total``; a user whose c_u is zero may hold anything."""
    # A user's uses are one block first: huge ones that cancel would round the total.
    scaled = [_scaled(use, factors) for use in uses]
    dense = [use for use in scaled if use.left.is_floating_point()]
    one_hot = [use for use in scaled if not use.left.is_floating_point()]
    tokens = torch.cat([use.left for use in one_hot], dim=1) if one_hot else None
    of_tokens = torch.cat([use.right for use in one_hot], dim=1) if one_hot else None
    if tokens is not None and of_tokens is not None:
        of_tokens = _summed_by_token(tokens, of_tokens)
        if not dense:
            total.index_add_(0, tokens.flatten(), of_tokens.flatten(0, 1).to(total))
            return
    if total.device.type != "cpu":
        rows = max(1, _BLOCK_ON_ACCELERATOR // (len(factors) * total.shape[1]))
        for start in range(0, len(total), rows):
            block = slice(start, start + rows), slice(None)
            own = _block_of_users(dense, tokens, of_tokens, slice(None), block)
            total[block] += own.sum(0, dtype=total.dtype)
        return

    def add(block: tuple[slice, slice]) -> None:
        part = torch.zeros_like(total[block])
        for user in range(len(factors)):
            own = _block_of_users(dense, tokens, of_tokens, slice(user, user + 1), block)
            part += own[0]  # float32 to float64, which is exact
        total[block] += part

    corners = itertools.product(range(0, len(total), _ROWS), range(0, total.shape[1], _COLUMNS))
    side_by_side(add, [(slice(i, i + _ROWS), slice(j, j + _COLUMNS)) for i, j in corners])


def _block_of_users(
    dense: Sequence[OuterProducts],
    tokens: torch.Tensor | None,
    of_tokens: torch.Tensor | None,
    users: slice,
    block: tuple[slice, slice],
) -> torch.Tensor:
    """Return a block of each user's Σ_uses l_t r_tᵀ, ``[users, rows, columns]``."""
    rows, columns = block
    own = dense[0].left[users, :, rows].mT @ dense[0].right[users, :, columns]
    for left, right in dense[1:]:
        own.baddbmm_(left[users, :, rows].mT, right[users, :, columns])
    if tokens is not None and of_tokens is not None:
        inside = (tokens[users] >= rows.start) & (tokens[users] < rows.stop)
        user, place = inside.nonzero(as_tuple=True)
        if len(user):
            row = tokens[users][user, place] - rows.start
            values = of_tokens[users][user, place][:, columns]
            own.index_put_((user, row), values, accumulate=True)
    return own


def _scaled(use: OuterProducts, factors: torch.Tensor) -> OuterProducts:
    """Return factors of c_u G_u in float32 or wider, zero where c_u is zero."""
    left, right = at_least_float32(use.left), at_least_float32(use.right)
    c = factors.to(right)[:, None, None]
    # where, not a product: 0 · NaN is NaN and would poison the sum. Asking an accelerator whether
    # there is one would wait for it.
    if c.device.type != "cpu" or not bool(c.all()):
        right = torch.where(c > 0, right, 0.0)
        left = torch.where(c > 0, left, 0.0) if left.is_floating_point() else left
    if left.is_floating_point() and left.shape[2] < right.shape[2]:
        return OuterProducts(left * c, right)
    return OuterProducts(left, right * c)


def _summed_by_token(tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return a user's rows with those of equal tokens summed at the first of them, 0 elsewhere."""
    # So a user adds to each row of an embedding once: the sum over users is the only sum.
    equal = tokens[:, :, None] == tokens[:, None, :]
    first = ~equal.tril(-1).any(2)
    return torch.where(first[:, :, None], equal.to(rows) @ rows, 0.0)


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the results of ``work``, in the items' order, on as many threads as torch has."""
    # Products of a few dozen tokens are too small to be shared among torch's threads.
    threads = min(torch.get_num_threads(), len(items))
    if threads <= 1:
        return [work(item) for item in items]
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=_alone) as pool:
            return list(pool.map(work, items))
    finally:  # torch keeps the number for each thread, and once more for threads to come
        torch.set_num_threads(before)


def _alone() -> None:
    torch.get_num_threads()  # a thread's own number is set at its first use, to that of the process
    torch.set_num_threads(1)
