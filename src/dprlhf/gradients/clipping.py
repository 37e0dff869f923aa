"""The clipped sum over users: the only place where a :class:`BoundedSum` is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf.boundary import BoundedSum, Private, open_private
from dprlhf.errors import DprlhfError
from dprlhf.gradients.ghost_norm import rounding
from dprlhf.gradients.per_user import PerUserGradients
from dprlhf.gradients.subspace import Subspace
from dprlhf.hardware import to_device
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.protocol import ExplicitPolicy, Rows
from dprlhf.rollout import Responses, Tick

MOST_USERS = 2**16
"""The largest number of users in a round where the caller states no bound of its own."""

_PROCESSES = 2**12  # more than a sum over processes will ever have
_MARGIN = 2.0**-31  # float64 products, roots and factors of one user err by far less


def rounding_margin(users: int) -> float:
    """Return the part of the clip norm that is kept for the rounding of float64 sums over users.

    With N users, each of norm at most R, any order of summation errs by at most γ_n N R in L2 norm,
    n = N + processes. Two neighbouring sums differ by at most R + 2 γ_n N R, which is at most S for
    R = S (1 − margin): ``docs/proofs/floating_point_sums.md``.

    Args:
        users: A public upper bound on the number of users in a round.

    Raises:
        DprlhfError: There are so many that half the clip norm would not be enough.
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

    Attributes:
        responses: The rows: sampled responses, or the actions of an :class:`ExplicitPolicy`.
        weights: Weight of ∇ log π for each response token, ``[rows, response]``, or for a whole
            response, ``[rows]``; float64. A NaN makes its user's gradient zero.
        extra: Coordinates appended to each user's gradient, ``[users, e]``, float64; e may be 0.
        extra_norm: The L2 bound on a user's row of ``extra``; below the clip norm.
        signed: Whether the last extra coordinate changes its sign for a user whose gradient is
            within its bound, so that a release tells how many are.
    """

    responses: Rows
    weights: NDArray[np.float64]
    extra: NDArray[np.float64]
    extra_norm: float
    signed: bool = False


@dataclass(frozen=True)
class ClippedSum:
    """A clipped sum over users, and the users' gradient norms before clipping.

    Attributes:
        bounded: The sum and the L2 bound on each user's contribution to it.
        norms: The norms, ``[users]``, for secret telemetry; empty where the clip norm is infinite.
        subspace: The subspace whose coordinates the sum has; None for those of the vectors.
    """

    bounded: BoundedSum
    norms: Private[NDArray[np.float64]]
    subspace: Subspace | None = None


def clip_users(
    contributions: torch.Tensor, clip_norm: float, *, most_users: int = MOST_USERS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale each row to L2 norm at most ``clip_norm``; a row whose norm is not finite becomes zero.

    Args:
        contributions: One vector for each user, ``[users, dimension]``.
        clip_norm: S, the L2 bound.
        most_users: A public upper bound on the number of users in the round.

    Returns:
        The clipped rows in float64, and their norms before clipping, ``[users]``.
    """
    wide = contributions.double()
    # One row at a time: how a norm over all rows rounds may depend on their number.
    norms = torch.stack([row.norm() for row in wide]) if len(wide) else wide.new_zeros(0)
    bounds = norms * (1 + rounding(wide.shape[1] + 8, torch.float64))
    factors = clip_factors(bounds, clip_norm, most_users=most_users)
    # where, not a product: 0 · NaN is NaN and would poison the sum.
    return torch.where(factors[:, None] > 0, wide * factors[:, None], 0.0), norms


def clip_factors(
    norms: torch.Tensor, clip_norm: float, *, most_users: int = MOST_USERS
) -> torch.Tensor:
    """Return min(1, S/norm) for each user, 0 where the norm is not finite, ``[users]``.

    S is made smaller by :func:`rounding_margin` first.
    """
    tiny = torch.finfo(norms.dtype).tiny
    factors = (clip_norm * (1 - rounding_margin(most_users)) / norms.clamp(min=tiny)).clamp(max=1)
    return torch.where(norms.isfinite(), factors, 0.0)


def clipped_sum(
    policy: CausalLMPolicy | ExplicitPolicy,
    weighted: Private[Weighted],
    *,
    clip_norm: float,
    batch_size: int,
    reduce: Callable[[torch.Tensor], torch.Tensor],
    most_users: int = MOST_USERS,
    tick: Tick | None = None,
) -> ClippedSum:
    """Return Σ_u clip(g_u, S) over all users of the round.

    The gradient is clipped to √(S² − e²) and the extra coordinates to e, so the joint vector has
    norm at most S, and a large gradient does not shrink the extra coordinates.

    With an infinite clip norm (a non-private baseline) autograd computes the ordinary gradient of
    the same micro-batches; a user with a weight that is not finite is left out here, too.

    Args:
        policy: The policy π_θ, differentiated at its current parameters.
        weighted: The rows of this process's users, and their weights.
        clip_norm: S, the L2 bound on a user's contribution.
        batch_size: Number of rows differentiated at once. A user with more rows takes several
            passes, whose gradients add up before its norm is taken.
        reduce: Sums a tensor over all processes. Each user must be on one process only.
        most_users: A public upper bound on the number of users in the round; it decides the margin
            for rounding.
        tick: Called with the number of rows done since the last call.
    """
    opened = open_private(weighted)
    responses, weights = opened.responses, opened.weights
    if isinstance(policy, ExplicitPolicy):
        given = policy.user_scores(responses, weights)
        return clipped_vectors(
            Private((users, scores.sum(1)) for users, scores in given),
            policy.dimension,
            extra=Private(opened.extra),
            extra_norm=opened.extra_norm,
            clip_norm=clip_norm,
            reduce=reduce,
            most_users=most_users,
            signed=opened.signed,
        )
    responses = language_model_rows(responses)
    private = math.isfinite(clip_norm)
    if not private:
        finite = np.isfinite(weights.reshape(len(weights), -1)).all(1)
        left_out = np.isin(responses.user, responses.user[~finite])
        weights = np.where(left_out.reshape(-1, *[1] * (weights.ndim - 1)), 0.0, weights)
    gradient_norm = vector_norm(clip_norm, opened.extra_norm)
    # MPS has no float64.
    device = "cpu" if policy.device.type == "mps" else policy.device
    both = torch.zeros(policy.dimension + opened.extra.shape[1], dtype=torch.float64, device=device)
    total = both[: policy.dimension]
    norms = np.zeros(responses.users if private else 0)
    _check_number(responses.users, most_users)
    engine = PerUserGradients(policy.model, policy.parameters)
    for batch in micro_batches(responses, batch_size):
        if private:
            for number, part in enumerate(batch.parts()):
                _run(engine, policy, responses, weights, part, more=number > 0)
            norm, bound = engine.norms()
            factors = clip_factors(bound, gradient_norm, most_users=most_users)
            engine.add_weighted_sum(factors, total)
            norms[batch.users] = norm[: len(batch.users)].numpy()
        else:
            for part in batch.parts():
                _add_gradient(policy, responses, weights, part, total)
        if tick is not None:
            tick(len(batch.rows))
    coordinates = with_sign(opened.extra, norms, gradient_norm) if opened.signed else opened.extra
    extra, _ = clip_users(torch.from_numpy(coordinates), opened.extra_norm, most_users=most_users)
    both[policy.dimension :] = extra.sum(0)
    return ClippedSum(BoundedSum(reduce(both.cpu()), clip_norm), Private(norms))


def clipped_vectors(
    vectors: Private[Iterable[tuple[NDArray[np.int64], torch.Tensor]]],
    dimension: int,
    *,
    extra: Private[NDArray[np.float64]],
    extra_norm: float,
    clip_norm: float,
    reduce: Callable[[torch.Tensor], torch.Tensor],
    most_users: int = MOST_USERS,
    signed: bool = False,
    subspace: Subspace | None = None,
) -> ClippedSum:
    """Return Σ_u clip(v_u, S) of vectors that are not gradients of one loss.

    Args:
        vectors: Batches of users, ``[n]``, and their vectors, ``[n, dimension]``. A user without a
            vector contributes its extra coordinates only.
        dimension: Length of a vector.
        extra: Further coordinates of each user, ``[users, e]``, appended to its vector.
        extra_norm: The L2 bound on the extra coordinates of a user.
        clip_norm: S; vector and extra coordinates are clipped apart, as in :func:`clipped_sum`.
        reduce: Sums a tensor over all processes.
        most_users: A public upper bound on the number of users in the round.
        signed: As in :class:`Weighted`.
        subspace: A subspace, in whose coordinates vectors are clipped and summed; None for their
            own.

    Raises:
        ValueError: A user came twice.
    """
    coordinates = open_private(extra)
    _check_number(len(coordinates), most_users)
    vector_bound = vector_norm(clip_norm, extra_norm)
    length = dimension if subspace is None else subspace.rank
    total = torch.zeros(length, dtype=torch.float64)
    norms, seen = np.zeros(len(coordinates)), np.zeros(len(coordinates), dtype=int)
    for users, of_users in open_private(vectors):
        np.add.at(seen, users, 1)
        if seen.max(initial=0) > 1:
            raise ValueError("a user came twice: its contribution would be clipped twice")
        summands = of_users if subspace is None else subspace.coordinates(of_users)
        clipped, norm = clip_users(summands.cpu(), vector_bound, most_users=most_users)
        total += clipped.sum(0)
        norms[users] = norm.numpy()
    if signed:
        coordinates = with_sign(coordinates, norms, vector_bound)
    of_extra, _ = clip_users(torch.from_numpy(coordinates), extra_norm, most_users=most_users)
    both = torch.cat([total, of_extra.sum(0)])
    return ClippedSum(BoundedSum(reduce(both), clip_norm), Private(norms), subspace)


def with_sign(
    extra: NDArray[np.float64], norms: NDArray[np.float64], bound: float
) -> NDArray[np.float64]:
    """Return ``extra``, ``[users, e]``, its last column negated where the norm is in the bound.

    A sign changes no norm, so the bound on the extra coordinates stays.
    """
    signed = extra.copy()
    signed[:, -1] *= np.where(norms <= bound, -1.0, 1.0)  # a norm that is no number is outside
    return signed


def _check_number(users: int, most_users: int) -> None:
    if users > most_users + 1:  # one more: a neighbour of the largest round
        raise ValueError(f"more users in a round than the {most_users} that the caller promised")


def vector_norm(clip_norm: float, extra_norm: float) -> float:
    """Return √(S² − e²), the L2 bound on a user's vector beside its extra coordinates."""
    return math.sqrt(clip_norm**2 - extra_norm**2)


def language_model_rows(rows: Rows) -> Responses:
    """Return the rows of a language model's policy, which are responses.

    Raises:
        TypeError: They are the actions of an :class:`ExplicitPolicy`.
    """
    if not isinstance(rows, Responses):
        raise TypeError(f"a language model's rows are Responses, not {type(rows).__name__}")
    return rows


def user_gradients(
    policy: CausalLMPolicy | ExplicitPolicy,
    responses: Rows,
    weights: NDArray[np.float64],
    *,
    batch_size: int,
    rows: int | None,
) -> Iterator[tuple[NDArray[np.int64], torch.Tensor, bool]]:
    """Yield each micro-batch's users and the gradients of parts of their rows, not clipped.

    Args:
        policy: The policy π_θ, differentiated at its current parameters.
        responses: The rows.
        weights: Weight of each response token's ∇ log π, ``[rows, response]``, or of each row's,
            ``[rows]``.
        batch_size: Number of rows differentiated at once.
        rows: Number of rows in a part; a user's rows are cut in their order. None makes one part
            of all rows of a user.

    Yields:
        The users, ``[users]``, Σ weight · ∇ log π of parts of their rows,
        ``[users, parts, dimension]``, float32 or wider, on the policy's device, in the order of
        ``policy.parameters``, and whether these are the users' last parts. A user with more than
        ``batch_size`` rows comes alone, in several turns if its rows are cut into parts.
    """
    if isinstance(policy, ExplicitPolicy):
        for users, scores in policy.user_scores(responses, weights):
            each = rows or scores.shape[1]
            yield users, scores.view(len(users), -1, each, policy.dimension).sum(2), True
        return
    responses = language_model_rows(responses)
    engine = PerUserGradients(policy.model, policy.parameters, whole=True)
    for batch in micro_batches(responses, batch_size, rows or 1):
        if rows is None:
            for number, part in enumerate(batch.parts()):
                _run(engine, policy, responses, weights, part, more=number > 0)
            yield batch.users, engine.gradients()[: len(batch.users), None], True
            continue
        for number, part in enumerate(batch.parts(), 1):
            _run(engine, policy, responses, weights, part, parts=part.height // rows)
            gradients = engine.gradients().view(batch.size, -1, policy.dimension)
            of_users = gradients[: len(batch.users), : len(part.rows) // rows // len(batch.users)]
            yield batch.users, of_users, number == batch.passes


@dataclass(frozen=True)
class MicroBatch:
    """Users that are differentiated together: equal numbers of rows, equal padded width.

    Fillers (rows of weight 0) complete it to a shape that depends on the width and the number of
    rows alone, so that no user's contribution depends on the others, not even by rounding (see
    :mod:`dprlhf.rollout`). A user with more rows than a batch is alone, and its rows are cut into
    passes of one shape: how many rows a user has decides how long it takes, and not whether it
    fits into memory.

    Attributes:
        users: Indices of the users, ``[users]``.
        rows: Indices of their rows, ``[rows]``; the rows of a user are adjacent.
        width: Number of tokens that prompts are padded to.
        size: The number of users, fillers included.
        height: The number of rows in a pass, fillers included.
        passes: The number of passes; 1 where there are several users.
        of_passes: The number of passes of the micro-batch that this is a pass of.
    """

    users: NDArray[np.int64]
    rows: NDArray[np.int64]
    width: int
    size: int
    height: int
    passes: int = 1
    of_passes: int = 1

    def parts(self) -> Iterator[MicroBatch]:
        """Yield the passes, each a micro-batch of the same users with some of their rows."""
        if self.passes == 1:
            yield self
            return
        for start in range(0, len(self.rows), self.height):
            rows = self.rows[start : start + self.height]
            yield MicroBatch(
                self.users, rows, self.width, self.size, self.height, of_passes=self.passes
            )


def micro_batches(responses: Responses, batch_size: int, unit: int = 1) -> Iterator[MicroBatch]:
    """Cut the users into micro-batches of at most ``batch_size`` rows.

    Args:
        responses: The rows of all users of the round.
        batch_size: Largest number of rows in a pass.
        unit: Number of adjacent rows that stay in one pass; 1 or a divisor of the responses to a
            prompt.
    """
    counts = np.bincount(responses.user, minlength=responses.users)
    widths = np.zeros(responses.users, dtype=np.int64)
    np.maximum.at(widths, responses.user, responses.widths)
    by_user = np.split(np.argsort(responses.user, kind="stable"), np.cumsum(counts)[:-1])
    most = rows_of_a_pass(batch_size, responses.num_generations, unit)
    for width, count in sorted(set(zip(widths.tolist(), counts.tolist(), strict=True))):
        alike = np.flatnonzero((widths == width) & (counts == count))
        if count > batch_size:
            for user in alike:
                passes = -(-count // most)
                yield MicroBatch(np.array([user]), by_user[user], width, 1, most, passes)
            continue
        size = max(1, batch_size // max(count, 1))
        for start in range(0, len(alike), size):
            users = alike[start : start + size]
            rows = np.concatenate([by_user[u] for u in users])
            yield MicroBatch(users, rows, width, size, size * count)


def rows_of_a_pass(batch_size: int, num_generations: int, unit: int = 1) -> int:
    """Return how many rows of a user with more than ``batch_size`` are differentiated at once.

    All responses to some prompts, or an equal part of those to one: a pass never has a part of two
    prompts' responses, which could not share a prompt.

    Args:
        batch_size: Largest number of rows.
        num_generations: Number of adjacent rows that answer one prompt.
        unit: Number of adjacent rows that stay together; 1 or a divisor of ``num_generations``.
    """
    together = math.lcm(num_generations, unit)
    if batch_size >= together:
        return batch_size // together * together
    parts = [n for n in range(unit, together + 1, unit) if together % n == 0]
    return max((n for n in parts if n <= batch_size), default=unit)


def _run(
    engine: PerUserGradients,
    policy: CausalLMPolicy,
    responses: Responses,
    weights: NDArray[np.float64],
    batch: MicroBatch,
    parts: int | None = None,
    *,
    more: bool = False,
) -> None:
    users = parts or batch.size
    num_generations = math.gcd(responses.num_generations, batch.height // users)
    shared_rows = policy.shared_rows(num_generations, batch.width, responses.max_new_tokens)
    engine.run(
        lambda: _loss(policy, responses, weights, batch, shared_rows),
        users=users,
        rows=batch.height // shared_rows,
        passes=batch.of_passes,
        more=more,
    )


def _add_gradient(
    policy: CausalLMPolicy,
    responses: Responses,
    weights: NDArray[np.float64],
    batch: MicroBatch,
    total: torch.Tensor,
) -> None:
    """Add the ordinary gradient of a pass to ``total``, ``[dimension]``."""
    num_generations = math.gcd(responses.num_generations, batch.height)
    shared_rows = policy.shared_rows(num_generations, batch.width, responses.max_new_tokens)
    loss = _loss(policy, responses, weights, batch, shared_rows)
    end = 0
    for gradient in torch.autograd.grad(loss, list(policy.parameters.values())):
        start, end = end, end + gradient.numel()
        total[start:end] += gradient.flatten()


def recorded_by_user(
    policy: CausalLMPolicy,
    responses: Responses,
    weights: NDArray[np.float64],
    *,
    batch_size: int,
) -> Iterator[tuple[NDArray[np.int64], list[torch.Tensor]]]:
    """Yield each micro-batch's users and what :func:`clipped_sum` computes their clipped sum from.

    It differentiates, takes norms and sums as :func:`clipped_sum` does, and drops the sum: for
    PUBLIC or made-up rows, to try shapes. Of a user in several passes it makes the first two, and
    all only where each further one needs more memory.

    Args:
        policy: The policy π_θ.
        responses: Public rows.
        weights: Weight of each row's ∇ log π, ``[rows]``.
        batch_size: Largest number of rows in a pass.
    """
    engine = PerUserGradients(policy.model, policy.parameters)
    device = "cpu" if policy.device.type == "mps" else policy.device
    for batch in micro_batches(responses, batch_size):
        for number, part in enumerate(batch.parts()):
            if number < 2 or engine.grows:
                _run(engine, policy, responses, weights, part, more=number > 0)
        yield batch.users, engine.recorded()
        norms, _ = engine.norms()
        total = torch.zeros(policy.dimension, dtype=torch.float64, device=device)
        engine.add_weighted_sum(clip_factors(norms, 1.0), total)


def _loss(
    policy: CausalLMPolicy,
    responses: Responses,
    weights: NDArray[np.float64],
    batch: MicroBatch,
    shared_rows: int,
) -> torch.Tensor:
    """Return Σ weight · log π over the policy's own tokens of a micro-batch, a scalar."""
    tokens, mask = responses.micro_batch(batch.rows, batch.width, batch.height)
    tokens, mask = to_device(tokens, policy.device), to_device(mask, policy.device)
    kept = responses.replay(batch.rows, batch.width, batch.height, shared_rows)
    logprobs = policy.response_logprobs(tokens, mask, responses.max_new_tokens, shared_rows, kept)
    # where, not a product: a log-probability on padding may be −∞, and 0 · ∞ is NaN.
    own = to_device(responses.policy_micro_batch(batch.rows, batch.height), policy.device)
    real = torch.where(own.bool(), logprobs, 0.0)
    weight = torch.zeros_like(real)
    of_rows = torch.from_numpy(weights[batch.rows].reshape(len(batch.rows), -1))
    weight[: len(of_rows)] = of_rows.to(real)
    return (real * weight).sum()
