"""Users' gradients a micro-batch at a time, in shapes that no other user's rows can change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf.gradients.layers import UnknownLayerError
from dprlhf.gradients.per_user import PerUserGradients, gradient_of
from dprlhf.hardware import to_device
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.protocol import ExplicitPolicy, Rows
from dprlhf.rollout import Responses, Tick


def language_model_rows(rows: Rows) -> Responses:
    """Return the rows of a language model's policy, which are responses."""
    if not isinstance(rows, Responses):
        raise TypeError(f"a language model's rows are Responses, not {type(rows).__name__}")
    return rows


def user_gradients(
    policy: CausalLMPolicy | ExplicitPolicy,
    responses: Rows,
    weights: NDArray[np.float64],  # [rows, response]
    *,
    batch_size: int,
    rows: int | None,
    tick: Tick | None = None,
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], torch.Tensor, bool]]:
    """Yield each micro-batch's users and the gradients of parts of their rows, not clipped."""
    if isinstance(policy, ExplicitPolicy):
        for users, scores in policy.user_scores(responses, weights):
            each = rows or scores.shape[1]
            sums = scores.view(len(users), -1, each, policy.dimension).sum(2)
            order = np.argsort(responses.user, kind="stable")
            start = np.searchsorted(responses.user[order], users)
            yield users, order[start[:, None] + each * np.arange(sums.shape[1])], sums, True
        return
    responses = language_model_rows(responses)
    engine = engine_of(policy, whole=True)
    if engine.alone and rows is not None:
        batch_size = rows  # a pass has one part
    for batch in micro_batches(responses, batch_size, rows or 1, alone=engine.alone):
        passes = list(batch.passes())
        for number, part in enumerate(passes, 1):
            parts = len(batch.users) if rows is None else len(part.rows) // rows
            more = rows is None and number > 1
            run_pass(engine, policy, responses, weights, part, parts=parts, more=more)
            if tick is not None:
                tick(int((part.rows >= 0).sum()))
            if rows is None and number < len(passes):
                continue
            gradients = engine.gradients().view(len(batch.users), -1, policy.dimension)
            first = part.rows.reshape(*gradients.shape[:2], -1)[..., 0]
            yield batch.users, first, gradients, number == len(passes)


@dataclass(frozen=True)
class MicroBatch:
    """Users that are differentiated together, each at its place; fillers have weight 0.

    Shape and places follow from public numbers and the allocation (:mod:`dprlhf.rollout`). A user
    with more rows than a batch is alone, and its places are cut into passes of one shape.
    """

    users: NDArray[np.int64]  # The number of the user at each place, −1 for a filler, [users]
    rows: NDArray[np.int64]  # [rows]
    height: int  # The number of rows in a pass
    of_passes: int = 1  # The number of passes that the users' rows take

    def passes(self) -> Iterator[MicroBatch]:
        """Yield the passes with a row, each a micro-batch of the same users."""
        for rows in self.rows.reshape(-1, self.height):
            if (rows >= 0).any():
                yield MicroBatch(self.users, rows, self.height, self.of_passes)


def micro_batches(
    responses: Responses, batch_size: int, unit: int = 1, *, alone: bool = False
) -> Iterator[MicroBatch]:
    """Cut places into micro-batches of at most ``batch_size`` rows; yield those that have a row."""
    each = max(math.prod(responses.grid.shape[1:]), 1)
    grid = responses.grid.reshape(-1, each)
    size = 1 if alone else max(1, batch_size // each)
    height = size * each
    if each > batch_size:
        height = rows_of_a_pass(batch_size, responses.num_generations, unit)
    of_passes = -(-size * each // height)
    for start in range(0, responses.users, size):
        places = grid[start : start + size]
        if not (places >= 0).any():
            continue
        users = np.full(size, -1)
        users[: len(places)] = np.where((places >= 0).any(1), np.arange(len(places)) + start, -1)
        rows = np.full(of_passes * height, -1)
        rows[: places.size] = places.ravel()
        yield MicroBatch(users, rows, height, of_passes)


def rows_of_a_pass(batch_size: int, num_generations: int, unit: int = 1) -> int:
    """Return how many rows of a user with more than ``batch_size`` are differentiated at once."""
    # All responses to some prompts, or an equal part of those to one: parts of two share no prompt.
    together = math.lcm(num_generations, unit)
    if batch_size >= together:
        return batch_size // together * together
    parts = [n for n in range(unit, together + 1, unit) if together % n == 0]
    return max((n for n in parts if n <= batch_size), default=unit)


def engine_of(policy: CausalLMPolicy, *, whole: bool = False) -> PerUserGradients:
    """Return the engine for a policy: it takes several users in a pass, if it knows every layer."""
    if policy.one_user_a_pass is None:
        try:
            return PerUserGradients(policy.model, policy.parameters, whole=whole)
        except UnknownLayerError as unknown:
            policy.one_user_a_pass = str(unknown)
    return PerUserGradients(policy.model, policy.parameters, whole=whole, alone=True)


def run_pass(
    engine: PerUserGradients,
    policy: CausalLMPolicy,
    responses: Responses,
    weights: NDArray[np.float64],  # Weight of each row's ∇ log π, [rows], or of each token's
    batch: MicroBatch,
    parts: int | None = None,
    *,
    more: bool = False,
) -> None:
    """Differentiate one pass, so that ``engine`` has its users' gradients."""
    users = parts or len(batch.users)
    shared_rows = responses.shared_rows(policy, batch.height // users)
    engine.run(
        lambda: loss_of(policy, responses, weights, batch, shared_rows),
        users=users,
        rows=batch.height // shared_rows,
        passes=batch.of_passes,
        more=more,
    )


def add_gradient(
    policy: CausalLMPolicy,
    responses: Responses,
    weights: NDArray[np.float64],
    batch: MicroBatch,
    total: torch.Tensor,
) -> None:
    """Add the ordinary gradient of a pass to ``total``, ``[dimension]``."""
    loss = loss_of(policy, responses, weights, batch, responses.shared_rows(policy, batch.height))
    end = 0
    for gradient in gradient_of(loss, policy.parameters).values():
        start, end = end, end + gradient.numel()
        total[start:end] += gradient.flatten()


def loss_of(
    policy: CausalLMPolicy,
    responses: Responses,
    weights: NDArray[np.float64],
    batch: MicroBatch,
    shared_rows: int,
) -> torch.Tensor:
    """Return Σ weight · log π over the policy's own tokens of a pass, a scalar."""
    rows = batch.rows
    tokens, mask = (to_device(t, policy.device) for t in responses.micro_batch(rows))
    kept = responses.replay(rows, shared_rows)
    logprobs = policy.response_logprobs(tokens, mask, responses.max_new_tokens, shared_rows, kept)
    # where, not a product: a log-probability on padding may be −∞, and 0 · ∞ is NaN.
    own = to_device(responses.policy_micro_batch(rows), policy.device)
    real = torch.where(own.bool(), logprobs, 0.0)
    of_rows = weights[rows].reshape(len(rows), -1)
    weight = torch.from_numpy(np.where(rows[:, None] < 0, 0.0, of_rows)).to(real)
    return (real * weight).sum()
