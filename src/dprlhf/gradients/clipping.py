"""The clipped sum over users: the only place where a :class:`BoundedSum` is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf.boundary import BoundedSum, Private, open_private
from dprlhf.errors import DprlhfError
from dprlhf.gradients.ghost_norm import rounding
from dprlhf.gradients.micro_batches import (
    add_gradient,
    engine_of,
    language_model_rows,
    micro_batches,
    run_pass,
    user_gradients,
)
from dprlhf.hardware import from_device
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.protocol import ExplicitPolicy, Rows
from dprlhf.rollout import Tick

if TYPE_CHECKING:
    from dprlhf.gradients.subspace import Subspace

MOST_USERS = 2**16
"""The largest number of users in a round where the caller states no bound of its own."""

_PROCESSES = 2**12  # more than a sum over processes will ever have
_MARGIN = 2.0**-31  # float64 products, roots and factors of one user err by far less


def rounding_margin(users: int) -> float:
    """Return the part of the clip norm that is kept for the rounding of float64 sums over users.

    With N users, each of norm at most R, any order of summation errs by at most γ_n N R in L2 norm,
    n = N + processes. Two neighbouring sums differ by at most R + 2 γ_n N R, which is at most S for
    R = S (1 − margin): ``docs/proofs/floating_point_sums.md``.
    """
    margin = 2 * (users + 1) * rounding(users + 1 + _PROCESSES, torch.float64) + _MARGIN
    if margin > 0.5:
        raise DprlhfError(
            f"{users} users in a round are more than a float64 sum can bound: choose more rounds or"
            " fewer users"
        )
    return margin


@dataclass(frozen=True, repr=False)
class Weighted:
    """Rows, the weight of each row's ∇ log π, and extra coordinates for each user.

    A user's contribution is (Σ_rows Σ_tokens weight · ∇ log π_θ(token|before), extra_u).
    """

    responses: Rows  # The rows: sampled responses, or the actions of an :class:`ExplicitPolicy`
    # [rows, response], or [rows] for whole responses. A NaN makes its user's gradient zero.
    weights: NDArray[np.float64]
    extra: NDArray[np.float64]  # [users, e]
    extra_norm: float  # The L2 bound on a user's row of extra; below the clip norm


@dataclass(frozen=True)
class ClippedSum:
    """A clipped sum over users, and the users' gradient norms before clipping."""

    bounded: BoundedSum  # The sum and the L2 bound on each user's contribution to it
    norms: Private[NDArray[np.float64]]
    subspace: Subspace | None = None


def clip_users(
    contributions: torch.Tensor, clip_norm: float, *, most_users: int = MOST_USERS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows scaled to L2 norm at most ``clip_norm``, non-finite ones zero, and old norms."""
    wide = contributions.double()
    # One row at a time: how a norm over all rows rounds may depend on their number.
    length = torch.linalg.vector_norm
    norms = torch.stack([length(row) for row in wide]) if len(wide) else wide.new_zeros(0)
    bounds = norms * (1 + rounding(wide.shape[1] + 8, torch.float64))
    factors = clip_factors(bounds, clip_norm, most_users=most_users)
    # where, not a product: 0 · NaN is NaN and would poison the sum.
    return torch.where(factors[:, None] > 0, wide * factors[:, None], 0.0), norms


def clip_factors(
    norms: torch.Tensor, clip_norm: float, *, most_users: int = MOST_USERS
) -> torch.Tensor:
    """Return min(1, S/norm) for each user, 0 where the norm is not finite; S less a margin."""
    tiny = torch.finfo(norms.dtype).tiny
    factors = (clip_norm * (1 - rounding_margin(most_users)) / norms.clamp(min=tiny)).clamp(max=1)
    return torch.where(norms.isfinite(), factors, 0.0)


def clipped_sum(
    policy: CausalLMPolicy | ExplicitPolicy,
    weighted: Private[Weighted],
    *,
    clip_norm: float,
    batch_size: int,
    reduce: Callable[[torch.Tensor], torch.Tensor],  # sums over processes; a user is on one only
    most_users: int = MOST_USERS,  # public; decides the margin for rounding
    subspace: Subspace | None = None,
    tick: Tick | None = None,
) -> ClippedSum:
    """Return Σ_u clip(g_u, S) over all users of the round.

    The gradient is clipped to √(S² − e²) and the extra coordinates to e, so the joint vector has
    norm at most S, and a large gradient does not shrink the extra coordinates.

    With an infinite clip norm (a non-private baseline) autograd computes the ordinary gradient of
    the same micro-batches; a user with a weight that is not finite is left out here, too.
    """
    opened = open_private(weighted)
    responses, weights = opened.responses, opened.weights
    if subspace is not None or isinstance(policy, ExplicitPolicy):
        gradients = user_gradients(
            policy, responses, weights, batch_size=batch_size, rows=None, tick=tick
        )
        return clipped_vectors(
            Private((users, whole[:, 0]) for users, _, whole, _ in gradients),
            policy.dimension,
            extra=Private(opened.extra),
            extra_norm=opened.extra_norm,
            clip_norm=clip_norm,
            reduce=reduce,
            most_users=most_users,
            subspace=subspace,
        )
    responses = language_model_rows(responses)
    private = math.isfinite(clip_norm)
    if not private:
        finite = np.isfinite(weights).all(axis=tuple(range(1, weights.ndim)))
        left_out = np.isin(responses.user, responses.user[~finite])
        weights = np.where(left_out.reshape(-1, *[1] * (weights.ndim - 1)), 0.0, weights)
    gradient_norm = vector_norm(clip_norm, opened.extra_norm)
    # MPS has no float64.
    device = "cpu" if policy.device.type == "mps" else policy.device
    both = torch.zeros(policy.dimension + opened.extra.shape[1], dtype=torch.float64, device=device)
    total = both[: policy.dimension]
    norms = np.zeros(responses.users)
    _check_number(responses.users, most_users)
    engine = engine_of(policy)
    for batch in micro_batches(responses, batch_size, alone=engine.alone):
        if private:
            for number, part in enumerate(batch.passes()):
                run_pass(engine, policy, responses, weights, part, more=number > 0)
            norm, bound = engine.norms()
            factors = clip_factors(bound, gradient_norm, most_users=most_users)
            engine.add_weighted_sum(factors, total)
            real = batch.users >= 0
            norms[batch.users[real]] = norm.numpy()[real]
        else:
            for part in batch.passes():
                add_gradient(policy, responses, weights, part, total)
        if tick is not None:
            tick(int((batch.rows >= 0).sum()))
    extra, _ = clip_users(torch.from_numpy(opened.extra), opened.extra_norm, most_users=most_users)
    both[policy.dimension :] = extra.sum(0)
    present = (responses.grid >= 0).any((1, 2)) & private
    return ClippedSum(BoundedSum(reduce(from_device(both)), clip_norm), Private(norms[present]))


def clipped_vectors(
    # Users, [n], −1 for a filler, and their vectors, [n, dimension].
    vectors: Private[Iterable[tuple[NDArray[np.int64], torch.Tensor]]],
    dimension: int,
    *,
    extra: Private[NDArray[np.float64]],  # [users, e]
    extra_norm: float,
    clip_norm: float,
    reduce: Callable[[torch.Tensor], torch.Tensor],
    most_users: int = MOST_USERS,
    subspace: Subspace | None = None,
) -> ClippedSum:
    """Return Σ_u clip(v_u, S) of vectors that are not gradients of one loss."""
    coordinates = open_private(extra)
    _check_number(len(coordinates), most_users)
    vector_bound = vector_norm(clip_norm, extra_norm)
    length = dimension if subspace is None else subspace.rank
    total = torch.zeros(length, dtype=torch.float64)
    norms, seen = np.zeros(len(coordinates)), np.zeros(len(coordinates), dtype=int)
    for places, of_places in open_private(vectors):
        real = np.flatnonzero(places >= 0)
        users, of_users = places[real], of_places[torch.from_numpy(real)]
        np.add.at(seen, users, 1)
        if seen.max(initial=0) > 1:
            raise ValueError("a user came twice: its contribution would be clipped twice")
        summands = of_users if subspace is None else subspace.coordinates(of_users)
        clipped, norm = clip_users(summands.cpu(), vector_bound, most_users=most_users)
        total += clipped.sum(0)
        norms[users] = norm.numpy()
    of_extra, _ = clip_users(torch.from_numpy(coordinates), extra_norm, most_users=most_users)
    both = torch.cat([total, of_extra.sum(0)])
    of_some = Private(norms[seen > 0])
    return ClippedSum(BoundedSum(reduce(both), clip_norm), of_some, subspace)


def _check_number(users: int, most_users: int) -> None:
    if users > most_users + 1:  # one more: a neighbour of the largest round
        raise ValueError(f"more users in a round than the {most_users} that the caller promised")


def vector_norm(clip_norm: float, extra_norm: float) -> float:
    """Return √(S² − e²), the L2 bound on a user's vector beside its extra coordinates."""
    return math.sqrt(clip_norm**2 - extra_norm**2)
