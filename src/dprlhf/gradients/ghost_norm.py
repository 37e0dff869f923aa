"""A layer's per-user gradient as a sum of outer products: its norm and weighted sum, without it.

The weight of a linear layer with input x and output gradient g has the gradient G_u = Σ_t l_t r_tᵀ
over the tokens t of user u, with l = g and r = x. An embedding is a linear layer whose inputs are
one-hot rows. Clipping needs two sums over such factors, and never G_u itself:

- ‖G_u‖² = Σ_{s,t} ⟨l_s, l_t⟩ ⟨r_s, r_t⟩, from two T × T Gram matrices (the ghost norm of
  Goodfellow, arXiv 1510.01799, and Li et al., arXiv 2110.05679);
- Σ_u c_u G_u, one matrix product over all tokens of all users: the size of what an ordinary
  backward pass does (book-keeping, Bu et al., arXiv 2210.00038).

A parameter that is used several times (a module called twice, an embedding tied to the output
layer) has the tokens of all uses side by side: its norm has the cross terms, its sum adds up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

# The most elements of a product to hold at once: a whole product and its float64 copy would take
# more memory than the parameters.
_BLOCK = 2**20


class OuterProducts(NamedTuple):
    """The factors of one use of a weight ``[n, m]``.

    Attributes:
        left: The factors l, ``[users, tokens, n]``; or the indices of one-hot rows,
            ``[users, tokens]``, for an embedding.
        right: The factors r, ``[users, tokens, m]``.
    """

    left: torch.Tensor
    right: torch.Tensor


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in float32 or wider; integers as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x


def per_user(use: OuterProducts, n: int) -> torch.Tensor:
    """Return G_u of each user, ``[users, n, m]``."""
    left, right = at_least_float32(use.left), at_least_float32(use.right)
    if left.is_floating_point():
        return left.mT @ right
    users = len(left)
    own_rows = n * torch.arange(users, device=left.device)[:, None]
    out = right.new_zeros(users * n, right.shape[2])
    out.index_add_(0, (left + own_rows).flatten(), right.flatten(0, 1))
    return out.view(users, n, -1)


def square_norm(uses: Sequence[OuterProducts]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ‖Σ_uses G_u‖², and an upper bound on it with rounding, each ``[users]``, float64.

    G_u exists only inside matrix products. Their rounding grows with the terms a_t = ‖l_t‖ ‖r_t‖,
    not with ‖G_u‖: a user whose terms cancel could shrink its norm to nothing and still move the
    sum by a rounding error above any clip norm. With ε the machine epsilon, the Gram matrices err
    by about ε Σ a_t² and the sum by about ε Σ a_t (1.9 and 1.4 times that at most, over the
    adversarial users tried); the bound allows 8 and 4 times.
    """
    wide_uses = [
        OuterProducts(at_least_float32(left), at_least_float32(right)) for left, right in uses
    ]
    square: torch.Tensor | float = 0.0
    terms = []
    for i, (left, right) in enumerate(wide_uses):
        gram = _inner(left, left) * _inner(right, right)
        terms.append(gram.diagonal(dim1=1, dim2=2).double().sqrt())
        square = square + gram.sum((1, 2), dtype=torch.float64)
        for earlier_left, earlier_right in wide_uses[:i]:
            cross = _inner(left, earlier_left) * _inner(right, earlier_right)
            square = square + 2 * cross.sum((1, 2), dtype=torch.float64)
    assert isinstance(square, torch.Tensor)
    square = square.clamp(min=0)
    a = torch.cat(terms, dim=1)
    epsilon = torch.finfo(wide_uses[0].right.dtype).eps
    of_sum = square.sqrt() + 4 * epsilon * a.sum(1)
    return square, of_sum.square() + 8 * epsilon * a.square().sum(1)


def _inner(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ⟨a_s, b_t⟩, ``[users, tokens of a, tokens of b]``."""
    if a.is_floating_point() and b.is_floating_point():
        return a @ b.mT
    if a.is_floating_point():
        return a.gather(2, b[:, None, :].expand(-1, a.shape[1], -1))
    if b.is_floating_point():
        return _inner(b, a).mT
    return a[:, :, None] == b[:, None, :]


def add_weighted(use: OuterProducts, factors: torch.Tensor, total: torch.Tensor) -> None:
    """Add Σ_u c_u G_u to ``total``, ``[n, m]``; a user whose c_u is zero may hold anything."""
    left, right = at_least_float32(use.left), at_least_float32(use.right)
    c = factors.to(right)[:, None, None]
    if not bool(c.all()):  # where, not a product: 0 · NaN is NaN and would poison the sum
        right = torch.where(c > 0, right, 0.0)
        left = torch.where(c > 0, left, 0.0) if left.is_floating_point() else left
    if not left.is_floating_point():
        total.index_add_(0, left.flatten(), (right * c).flatten(0, 1).to(total))
        return
    if left.shape[2] < right.shape[2]:
        left = left * c
    else:
        right = right * c
    left, right = left.flatten(0, 1), right.flatten(0, 1)
    rows = max(1, _BLOCK // right.shape[1])
    for start in range(0, left.shape[1], rows):
        total[start : start + rows] += left[:, start : start + rows].T @ right
