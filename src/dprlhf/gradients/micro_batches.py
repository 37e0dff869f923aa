"""Users' gradients a micro-batch at a time, in shapes that no other user's rows can change.

A run compares them with autograd's at its start (:func:`choose_engine`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dprlhf.errors import DprlhfError, one_line
from dprlhf.gradients.per_user import (
    PerUserGradients,
    UnknownLayerError,
    exact_products,
    gradient_of,
)
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


def choose_engine(
    policy: CausalLMPolicy, responses: Responses, weights: NDArray[np.float64], batch_size: int
) -> None:
    """Set ``policy.one_user_a_pass`` where the engine for several users cannot be taken.

    A model may use a layer otherwise than its class describes: call it on time first, register its
    bias twice, write to its output. So the gradients of several users in one pass are compared with
    those of autograd, on made-up rows and at parameters away from zero.
    """
    engine = engine_of(policy)
    batch = next(micro_batches(responses, batch_size, alone=engine.alone))
    part = next(batch.passes())
    users = part.users[part.users >= 0].tolist()  # those of made-up rows come first
    each = [autograd_of_user(policy, responses, weights, part, user) for user in users]
    if engine.alone:
        return
    factors = torch.zeros(len(part.users), dtype=torch.float64)
    factors[: len(each)] = torch.linspace(1.0, 0.5, len(each))
    total = torch.zeros_like(each[0])
    try:
        run_pass(engine, policy, responses, weights, part)
        norms, _ = engine.norms()
        engine.add_weighted_sum(factors, total)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # such as a layer that gets time first, or that vmap cannot run
        policy.one_user_a_pass = one_line(error)
        return
    expected = sum((c * g for c, g in zip(factors, each, strict=False)), torch.zeros_like(total))
    if name := disagreement(policy, total, expected):
        policy.one_user_a_pass = f"autograd disagrees with the rule for '{name}'"
    own = torch.stack([gradient.norm().cpu() for gradient in each])
    if not torch.allclose(norms[: len(each)], own, rtol=_tolerances(policy)[0], atol=0.0):
        policy.one_user_a_pass = policy.one_user_a_pass or "autograd disagrees with a user's norm"


def autograd_of_user(
    policy: CausalLMPolicy,
    responses: Responses,
    weights: NDArray[np.float64],
    batch: MicroBatch,
    user: int,
) -> torch.Tensor:
    """Return one user's gradient by autograd, of a pass in which the others have weight 0."""
    device = "cpu" if policy.device.type == "mps" else policy.device
    own = np.where(responses.user == user, weights, 0.0)
    with torch.enable_grad(), exact_products(policy.device):
        shared_rows = responses.shared_rows(policy, batch.height // len(batch.users))  # as in a run
        loss = loss_of(policy, responses, own, batch, shared_rows)
        parameters = list(policy.parameters.values())
        gradients: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
            loss, parameters, allow_unused=True
        )
    for name, gradient in zip(policy.parameters, gradients, strict=True):
        if gradient is None and "experts" not in name:  # no token may have gone to an expert
            raise DprlhfError(
                f"'{name}' received no gradient: it has no part in the loss; leave it frozen"
            )
    pairs = zip(parameters, gradients, strict=True)
    flat = [(torch.zeros_like(p) if g is None else g).flatten() for p, g in pairs]
    return torch.cat([g.to(device, torch.float64) for g in flat])


@torch.no_grad()
def check_padding(policy: CausalLMPolicy, responses: Responses) -> None:
    """Refuse a trained part through which padding reaches the tokens behind it."""
    # Such as a bias before a layer that keeps a state: the model masks the inputs of padding alone,
    # so sampled text would have other log-probabilities than the gradients'.
    moved = _moved_by_padding(policy, responses)
    with policy.base():
        of_base = _moved_by_padding(policy, responses)
    if moved > 10 * of_base + _tolerances(policy)[1]:
        raise DprlhfError(
            "policy.adapter: what it trains lets padding change the tokens behind it (a bias before"
            " a layer with a state, perhaps): leave biases out, or choose other modules"
        )


def _moved_by_padding(policy: CausalLMPolicy, responses: Responses) -> float:
    """Return by how much padding in front changes the log-probabilities of the last row."""
    length, differences = responses.max_new_tokens, []
    tokens, mask = responses.tokens[-1:], responses.mask[-1:]
    first = int(mask[0].argmax())
    for columns in (0, 3):
        padded = F.pad(tokens[:, first:], (columns, 0), value=policy.tokenizer.pad_token_id)
        seen = F.pad(mask[:, first:], (columns, 0))
        logprobs = policy.response_logprobs(
            padded.to(policy.device), seen.to(policy.device), length
        )
        differences.append(torch.where(mask[:, -length:].bool(), logprobs.cpu(), 0.0))
    return float((differences[0] - differences[1]).abs().max())


def _tolerances(policy: CausalLMPolicy) -> tuple[float, float]:
    """Return the relative errors that rounding explains, of a parameter's part and of the whole."""
    parameters = policy.model.parameters()
    half = any(p.is_floating_point() and p.itemsize <= 2 for p in parameters)
    return (0.1, 2e-2) if half else (1e-2, 1e-4)


def disagreement(
    policy: CausalLMPolicy, actual: torch.Tensor, expected: torch.Tensor
) -> str | None:
    """Return the parameter whose part of the gradient is another; None where all agree."""
    own, of_all = _tolerances(policy)
    end = 0
    for name, parameter in policy.parameters.items():
        start, end = end, end + parameter.numel()
        error = (actual[start:end] - expected[start:end]).norm()
        allowed = own * expected[start:end].norm() + of_all * expected.norm()
        if not bool(error <= allowed):  # also what is no number disagrees
            return str(name)
    return None
