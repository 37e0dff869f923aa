"""The clipped sum over users: the only place where a :class:`BoundedSum` is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf.boundary import BoundedSum, Private, open_private
from dprlhf.gradients.per_user import PerUserGradients
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rollout import Responses, Tick

# Keeps the clipped norm below S after rounding: float64 products and sums of up to 10⁹ terms err
# by far less than this.
_MARGIN = 1e-9


@dataclass(frozen=True, repr=False)
class Weighted:
    """Responses with the weight of each ∇ log π, and extra coordinates of each user.

    A user's contribution is (Σ_rows Σ_tokens weight · ∇ log π_θ(token|before), extra_u).

    Attributes:
        responses: the rows.
        weights: of each response token, ``[rows, response]``, or one for all of a row's,
            ``[rows]``; float64. A NaN makes its user's gradient zero.
        extra: ``[users, e]``, float64, appended to the gradient (``e`` may be 0).
        extra_norm: the L2 bound on ``extra``; below the clip norm.
    """

    responses: Responses
    weights: NDArray[np.float64]
    extra: NDArray[np.float64]
    extra_norm: float


@dataclass(frozen=True)
class ClippedSum:
    """A bounded sum, and the norms before clipping for secret telemetry, ``[users]``."""

    bounded: BoundedSum
    norms: Private[NDArray[np.float64]]


def clip_users(contributions: torch.Tensor, clip_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale each row to L2 norm at most ``clip_norm``; a row whose norm is not finite becomes zero.

    Args:
        contributions: ``[users, dimension]``.
        clip_norm: S.

    Returns:
        The clipped rows in float64, and their norms before clipping, ``[users]``.
    """
    wide = contributions.double()
    norms = wide.norm(dim=1)
    finite = norms.isfinite()
    scale = (clip_norm * (1 - _MARGIN) / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(
        max=1
    )
    # where, not a product: 0 · NaN is NaN and would poison the sum.
    return torch.where(finite[:, None], wide * scale[:, None], 0.0), norms


def clipped_sum(
    policy: CausalLMPolicy,
    weighted: Private[Weighted],
    *,
    clip_norm: float,
    batch_size: int,
    reduce: Callable[[torch.Tensor], torch.Tensor],
    tick: Tick | None = None,
) -> ClippedSum:
    """Return Σ_u clip(g_u, S) over all users of the round.

    Gradient and extra coordinates are clipped apart, to √(S² − e²) and e, so the joint vector
    keeps within S and the extra coordinates are not shrunk with a large gradient.

    Args:
        policy: π_θ; its gradients are taken at the current parameters.
        weighted: this process's users.
        clip_norm: S.
        batch_size: rows differentiated at once; a user is never split, so a user with more rows
            makes a larger micro-batch. Shapes are fixed (see :mod:`dprlhf.rollout`), so what a
            user contributes does not depend on the others, not even by rounding.
        reduce: sums a tensor over all processes. Each user must be on one process only.
    """
    opened = open_private(weighted)
    responses = opened.responses
    gradient_norm = clip_norm
    if opened.extra_norm and math.isfinite(clip_norm):
        gradient_norm = math.sqrt(clip_norm**2 - opened.extra_norm**2)
    total = torch.zeros(policy.dimension + opened.extra.shape[1], dtype=torch.float64)
    norms = np.zeros(responses.users)
    with PerUserGradients(policy.model, policy.parameters) as engine:
        for users, rows, width in _micro_batches(responses, batch_size):
            shape = (width, max(batch_size, len(rows)))
            gradients = _gradients(policy, engine, responses, opened.weights, users, rows, shape)
            clipped, norm = clip_users(gradients, gradient_norm)
            extra, _ = clip_users(torch.from_numpy(opened.extra[users]), opened.extra_norm)
            total += torch.cat([clipped, extra], dim=1).sum(0)
            norms[users] = norm.numpy()
            if tick is not None:
                tick(len(rows))
    return ClippedSum(BoundedSum(reduce(total), clip_norm), Private(norms))


def _gradients(
    policy: CausalLMPolicy,
    engine: PerUserGradients,
    responses: Responses,
    weights: NDArray[np.float64],
    users: NDArray[np.int64],
    rows: NDArray[np.int64],
    shape: tuple[int, int],
) -> torch.Tensor:
    device = policy.device
    width, size = shape
    tokens, mask = (t.to(device) for t in responses.micro_batch(rows, width, size))
    filler = len(users)  # fillers make a user of their own, dropped below
    local = torch.full((size,), filler)
    local[: len(rows)] = torch.from_numpy(np.searchsorted(users, responses.user[rows]))
    engine.start(local.to(device), len(users) + 1)
    logprobs = policy.response_logprobs(tokens, mask, responses.length)
    # where, not a product: what stands on padding is no response, whatever its log-probability.
    real = torch.where(mask[:, -responses.length :].bool(), logprobs, 0.0)
    weight = torch.zeros_like(real)
    weight[: len(rows)] = torch.from_numpy(weights[rows].reshape(len(rows), -1)).to(real)
    torch.autograd.backward((real * weight).sum(), inputs=list(policy.parameters.values()))
    for parameter in policy.parameters.values():
        parameter.grad = None
    return engine.collect()[:filler].cpu()


def _micro_batches(
    responses: Responses, batch_size: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], int]]:
    """Yield (users, rows, width): whole users only, all of one padded width."""
    counts = np.bincount(responses.user, minlength=responses.users)
    widths = np.zeros(responses.users, dtype=np.int64)
    np.maximum.at(widths, responses.user, responses.widths)
    by_user = np.argsort(responses.user, kind="stable")
    starts = np.cumsum([0, *counts])
    for width in np.unique(widths):
        batch: list[int] = []
        size = 0
        for user in np.flatnonzero(widths == width):
            if batch and size + counts[user] > batch_size:
                yield _batch(batch, by_user, starts, int(width))
                batch, size = [], 0
            batch.append(int(user))
            size += counts[user]
        yield _batch(batch, by_user, starts, int(width))


def _batch(
    batch: list[int], by_user: NDArray[np.int64], starts: NDArray[np.int64], width: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    users = np.array(batch)
    return users, np.concatenate([by_user[starts[u] : starts[u + 1]] for u in users]), width
