"""Whether the gradients of several users in one pass are those of autograd, on made-up rows.

A model may use a layer otherwise than its class describes: call it on time first, register its bias
twice, write to its output. A run compares at its start, at parameters away from zero, and
differentiates one user a pass where they disagree.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dprlhf.errors import DprlhfError, one_line
from dprlhf.gradients.micro_batches import MicroBatch, engine_of, loss_of, micro_batches, run_pass
from dprlhf.gradients.per_user import exact_products
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rollout import Responses


def choose_engine(
    policy: CausalLMPolicy, responses: Responses, weights: NDArray[np.float64], batch_size: int
) -> None:
    """Set ``policy.one_user_a_pass`` where the engine for several users cannot be taken."""
    engine = engine_of(policy)
    batch = next(micro_batches(responses, batch_size, alone=engine.alone))
    part = next(batch.passes())
    users = part.users[part.users >= 0].tolist()  # those of made-up rows come first
    each = [_autograd(policy, responses, weights, part, user) for user in users]
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
    if name := _disagreement(policy, total, expected):
        policy.one_user_a_pass = f"autograd disagrees with the rule for '{name}'"
    own = torch.stack([gradient.norm().cpu() for gradient in each])
    if not torch.allclose(norms[: len(each)], own, rtol=_tolerances(policy)[0], atol=0.0):
        policy.one_user_a_pass = policy.one_user_a_pass or "autograd disagrees with a user's norm"


def _autograd(
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


def _disagreement(
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
