"""The signal in users' clipped contributions, measured on public prompts at the start of training.

The prompts are sampled from, scored and differentiated as users' prompts will be. With c_u the
contribution of prompt u in units of the clip norm S, the products of different prompts'
contributions average to the square of their mean's norm, without bias: s² = E⟨c_u, c_w⟩, u ≠ w.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from dprlhf.data.users import Prompts
from dprlhf.gradients.subspace import fit_subspace
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.optimizers import make_optimizer
from dprlhf.recipe import Recipe
from dprlhf.rewards import Scorer, Scores
from dprlhf.rewards.scoring import score_responses
from dprlhf.rollout import Responses, sample_public
from dprlhf.training.choices import Signal
from dprlhf.updates.public_gradients import likelihood_gradients, public_gradients


@dataclass(frozen=True)
class Probe:
    """What public prompts show at the start of training."""

    signals: dict[int, Signal]  # The signal for each number of responses to a prompt
    reward: float
    prompts: int


def measure_signal(
    policy: CausalLMPolicy,
    scorer: Scorer,
    prompts: Prompts,  # PUBLIC prompts
    recipe: Recipe,  # The settled settings, with a finite clip norm
    responses: list[int],
) -> Probe:
    """Measure the signal for several numbers of responses to a prompt; the policy does not move.

    All are measured on the same draws, of which a smaller number takes the first of each prompt.
    With ``update.subspace``, half of the prompts give the directions and the others the signal.
    """
    rollout = recipe.rollout.model_copy(update={"responses": max(responses)})
    users = np.arange(len(prompts))
    slots = np.zeros_like(users)
    alone = prompts.changed(users=users, slots=slots)
    sampled = sample_public(policy, alone, recipe, rollout, "signal")
    scores = score_responses(scorer, sampled)
    signals = {}
    for count in responses:
        of_prompt = np.arange(len(sampled.user)) % max(responses)
        rows = np.flatnonzero(of_prompt < count)
        signals[count] = _signal(policy, recipe, sampled.take(rows), scores.take(rows))
    return Probe(signals, float(scores.values[scores.valid].mean()), len(prompts))


def _signal(policy: CausalLMPolicy, recipe: Recipe, responses: Responses, scores: Scores) -> Signal:
    optimizer = make_optimizer(recipe.optimizer, policy.parameters.values())
    vectors = public_gradients(
        policy,
        responses,
        scores,
        update=recipe.update,
        kl=recipe.kl,
        reward_range=recipe.reward_range,
        optimizer=optimizer,
        t=1,
    )
    subspace, clip = recipe.update.subspace, recipe.update.clip_norm
    if subspace is None:
        return signal_of(vectors, clip)
    half, avoid = len(vectors) // 2, None
    if subspace.keep_perplexity:
        size = recipe.update.batch_size
        gradients = likelihood_gradients(
            policy, responses, batch_size=size, optimizer=optimizer, t=1
        )
        avoid = gradients[:half]
    fitted = fit_subspace(
        vectors[:half],
        subspace.rank,
        clip_norm=clip,
        mean_first=subspace.mean_first,
        avoid=avoid,
    )
    return signal_of(vectors[half:], clip, fitted.directions, fitted.scale)


def signal_of(
    vectors: torch.Tensor,  # A vector for each public user, [users, dimension]
    clip_norm: float,
    directions: torch.Tensor | None = None,  # Orthonormal directions of a subspace, [p, dimension]
    scale: float = 1.0,
) -> Signal:
    """Return the signal of users' vectors before clipping."""
    finite = vectors.isfinite().all(1, keepdim=True)
    vectors = torch.where(finite, vectors, 0.0).double()
    seen = vectors if directions is None else scale * vectors @ directions.double().T
    norms = seen.norm(dim=1, keepdim=True)
    clipped = seen * (clip_norm / norms.clamp(min=1e-300)).clamp(max=1) / clip_norm
    square = max(mean_product(clipped, clipped), 0.0)
    whole = max(mean_product(vectors, vectors), 0.0)
    lifted = clipped if directions is None else clipped @ directions.double()
    both = (square * whole) ** 0.5
    alignment = mean_product(lifted, vectors) / both if both else 1.0
    # The standard error of mean_product(clipped, clipped) where its mean is zero.
    users, error = len(clipped), math.inf
    if users > 1:
        products = (clipped @ clipped.T).fill_diagonal_(0.0)
        error = float(products.norm()) * 2**0.5 / (users * (users - 1))
    return Signal(
        norm=square**0.5,
        spread=max(float(clipped.square().sum(1).mean()) - square, 0.0),
        dimension=seen.shape[1],
        alignment=min(max(alignment, 0.0), 1.0),
        gradient=whole**0.5,
        trained=vectors.shape[1],
        scale=scale,
        error=error,
    )


def mean_product(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the mean of ⟨a_u, b_w⟩ over all u ≠ w: an unbiased ⟨E a, E b⟩."""
    users = len(a)
    if users < 2:
        return 0.0
    total = float(a.sum(0) @ b.sum(0)) - float((a * b).sum())
    return total / (users * (users - 1))
