"""DP-PPO: local training with a projection (Rio et al. 2025, arXiv 2501.19080, Algorithms 2, 3).

Every user trains a copy of the policy for E epochs on its own responses. After each local step the
copy is put back to within S of where it started: θ ← θ₀ + Clip(θ − θ₀, S). The user contributes the
move g_u = θ − θ₀. There is one release a round, and the released mean moves the policy: exactly so
with ``optimizer: {name: sgd, learning_rate: 1}``. However many steps a user takes, what leaves it
has norm S at most, so local epochs cost no privacy.

The copies of many users are trained together (:func:`local_copies`).

Departures from the paper:

- Algorithm 3 prints θ ← θ − η∇L for the surrogate L that is to be maximised. Here a step ascends.
- Advantages come from the user's own responses, and every token of a response carries its
  response's. The paper's critic (appendix C.2.1) is fitted on users without noise and outlives the
  round: it would carry one round's users into the next round's release.
- A local step is on all tokens of the user (one minibatch), whose mean is multiplied by the user's
  tokens a response. So one step is :data:`LOCAL_LEARNING_RATE` times DP-PG's gradient.
- A row from μ ≠ π_t has the token ratio π_θ/μ = (π_t/μ)(π_θ/π_t). The first factor stays fixed and
  is truncated at ``LARGEST_RATIO``. ``clip_range`` applies to the second (as arXiv
  2110.00641 does), or it would exclude tokens because of the policy that sampled them.
- A copy is trained by plain SGD, not by appendix C.2.3's Adam.
- In a subspace there is no radius: only the part of a move that lies in it is clipped.
- No entropy bonus. The noise and what it costs are those of the run's plan, not of appendix B.1.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dprlhf import recipe
from dprlhf.errors import DprlhfError
from dprlhf.gradients.micro_batches import MicroBatch, micro_batches
from dprlhf.hardware import repeatable, to_device
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rollout import Responses
from dprlhf.rollout.logprobs import Array
from dprlhf.updates.pg import LARGEST_RATIO, round_advantage_weights, sampler_ratios
from dprlhf.updates.round import PrivateRound


@contextlib.contextmanager
def local_copies(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], moves: torch.Tensor, rows: int
) -> Iterator[None]:
    """Use the parameters θ + moves[u] for the rows of user u in every batch of the context.

    Every trainable layer multiplies a user's rows by that user's weight, in one batched product; a
    batch has the same number of rows for each user. Frozen layers see an ordinary batch, and
    autograd returns each copy's gradient. A batched product does not mix its members: a copy that
    overflows affects no other user's.
    """
    sizes = [p.numel() for p in parameters.values()]
    pieces = zip(parameters.items(), torch.split(moves, sizes, dim=1), strict=True)
    with contextlib.ExitStack() as stack:
        for (name, parameter), piece in pieces:
            weights = parameter + piece.view(-1, *parameter.shape)
            layer = linear_layer(model, name)
            # Not a hook: it would run after the layer's own product, whose result is not needed.
            stack.callback(setattr, layer, "forward", layer.forward)
            layer.forward = _of_copies(name, layer, weights, rows)  # type: ignore[method-assign]
        yield


def linear_layer(model: nn.Module, name: str) -> nn.Linear:
    """Return the linear layer that a parameter is the weight of."""
    path, _, local = name.rpartition(".")
    layer = model.get_submodule(path)
    if not isinstance(layer, nn.Linear) or local != "weight":
        raise DprlhfError(
            f"'{name}' ({type(layer).__name__}) cannot be trained by update.name: ppo, which copies"
            " the weights of LoRA for each user; use policy.adapter.type: lora or ffa-lora, or"
            " update.name: pg"
        )
    return layer


def _of_copies(name: str, layer: nn.Linear, weights: torch.Tensor, rows: int) -> Any:
    users, plain = len(weights), layer.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if len(x) != rows:
            if x.shape[:-1].numel() == 1:
                return plain(x)
            raise DprlhfError(
                f"'{name}' does not get a batch's rows first, so users cannot be told apart; leave"
                " it frozen"
            )
        product = (x.reshape(users, -1, x.shape[-1]) @ weights.mT).view(*x.shape[:-1], -1)
        return product if layer.bias is None else product + layer.bias

    return forward


LOCAL_LEARNING_RATE = 0.1
"""Step size of SGD on a user's copy: most copies reach a clip norm that suits their gradients."""


def ppo(round_: PrivateRound, spec: recipe.PPO) -> None:
    """Release the mean of the users' clipped moves θ − θ₀, and take a step along it."""
    weights = round_.responses.map(
        token_weights,
        round_advantage_weights(round_, spec.baseline, sampler_ratios(round_, spec.batch_size)),
        round_.log_ratio(spec.batch_size),
    )
    moves = round_.responses.map(partial(_moves, round_, spec), round_.valid, weights)
    round_.step(round_.release(round_.clipped_vectors(moves)))


def _moves(
    round_: PrivateRound,
    spec: recipe.PPO,
    responses: Responses,
    valid: NDArray[np.bool_],
    weights: Array,
) -> Iterator[tuple[NDArray[np.int64], torch.Tensor]]:
    """Yield each micro-batch's users, −1 for a filler, and their moves, ``[n, dimension]``."""
    if not responses.users:
        return
    bound = round_.vector_clip_norm if spec.subspace is None else math.inf
    for batch in micro_batches(
        responses, spec.batch_size, alone=round_.policy.mixes_rows is not None
    ):
        moves = train_copies(round_.policy, responses, weights, batch, spec, bound)
        of_users = torch.from_numpy(valid[batch.users]).to(moves.device)
        yield batch.users, torch.where(of_users[:, None], moves, 0.0)
        if round_.tick is not None:
            round_.tick(int((batch.rows >= 0).sum()))


def token_weights(responses: Responses, advantages: Array, log_ratio: Array) -> Array:
    """Return Â min(π_t/μ, 2) over the user's number of responses, ``[rows, response]``."""
    ratio = np.exp(np.minimum(log_ratio, np.log(LARGEST_RATIO)))
    ratio = np.where(responses.from_base[:, None], ratio, 1.0)
    return (advantages if advantages.ndim == 2 else advantages[:, None]) * ratio


def train_copies(
    policy: CausalLMPolicy,
    responses: Responses,
    weights: Array,  # Weight of each response token in the surrogate, [all rows, response]
    batch: MicroBatch,
    spec: recipe.PPO,
    bound: float,
) -> torch.Tensor:
    """Train a copy for each user of a micro-batch, fillers included."""
    parameter = next(iter(policy.parameters.values()))
    users = len(batch.users)
    tokens, mask = responses.micro_batch(batch.rows)
    real = responses.policy_micro_batch(batch.rows).bool()
    of_rows = np.where(batch.rows[:, None] < 0, 0.0, weights[batch.rows])
    weight = torch.from_numpy(of_rows).to(parameter)
    # What fills up the last pass of a user with many rows has no weight.
    of_token = torch.where(real.view(users, -1).to(policy.device), weight.view(users, -1), 0.0)
    passes = _Passes(policy, tokens, mask, responses, batch)
    moves: torch.Tensor = parameter.new_zeros(users, policy.dimension)
    for _ in range(spec.epochs):
        moves = project(moves, bound)
        gradient = passes.gradient(moves, of_token, spec.clip_range)
        moves = moves + LOCAL_LEARNING_RATE * gradient
    return moves


class _Passes:
    """The surrogate's gradient for the users of a micro-batch, added up over its passes."""

    def __init__(
        self,
        policy: CausalLMPolicy,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        responses: Responses,
        batch: MicroBatch,
    ) -> None:
        self._policy, self._tokens, self._mask = policy, tokens, mask
        self._length = responses.max_new_tokens
        self._shared_rows = responses.shared_rows(policy, batch.height)
        self._height, self._users = batch.height, len(batch.users)
        self._old: list[torch.Tensor] = []  # of θ₀: the first gradient is taken without a move

    def gradient(
        self, moves: torch.Tensor, weight: torch.Tensor, clip_range: float | None
    ) -> torch.Tensor:
        """Return the gradient at θ₀ + moves, ``[users, dimension]``; the first call is at θ₀."""
        policy, model = self._policy, self._policy.model
        total = torch.zeros_like(moves)
        first = not self._old
        for number, start in enumerate(range(0, len(self._tokens), self._height)):
            rows = slice(start, start + self._height)
            tokens = to_device(self._tokens[rows], policy.device)
            mask = to_device(self._mask[rows], policy.device)
            at = moves.detach().requires_grad_()
            # The backward pass, too: checkpointed layers are computed again in it.
            copies = local_copies(model, policy.parameters, at, self._height // self._shared_rows)
            with copies, repeatable():
                logprobs = policy.response_logprobs(tokens, mask, self._length, self._shared_rows)
                logprobs = logprobs.view(self._users, -1)
                if first:
                    self._old.append(logprobs.detach())
                places = slice(start // self._users * self._length, None)
                of_pass = weight[:, places][:, : logprobs.shape[1]]
                objective = surrogate(logprobs - self._old[number], of_pass, clip_range)
                total += torch.autograd.grad(objective, at)[0]
        return total


def surrogate(
    log_ratio: torch.Tensor, weight: torch.Tensor, clip_range: float | None
) -> torch.Tensor:
    """Return Σ min(r w, clip(r, 1 − c, 1 + c) w), or Σ r w without a clip range."""
    ratio = torch.where(weight != 0, log_ratio, 0.0).exp()
    if clip_range is None:
        return (ratio * weight).sum()
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.minimum(ratio * weight, clipped * weight).sum()


def project(moves: torch.Tensor, bound: float) -> torch.Tensor:
    """Scale each row to L2 norm at most ``bound``, up to rounding."""
    norms = moves.norm(dim=1, keepdim=True)
    scale = (bound / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1)
    projected: torch.Tensor = moves * scale
    return projected
