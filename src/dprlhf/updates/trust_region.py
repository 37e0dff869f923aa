"""The clip norm from a trust region (Rio et al. 2025, arXiv 2501.19080, section 4).

One SGD step moves the policy by Δ = η(ḡ + (zS/m) ξ): the sum of a round's n clipped gradients, of
norm at most nS, over m, plus Gaussian noise in d coordinates. S is the largest clip norm that keeps
the step in a region of size α with probability 1 − β, whatever the gradients:

- ``l2``: ‖Δ‖²/2 ≤ α: S = (m/(ηz)) √(2α/q), with q a quantile of the non-central χ² with d degrees
  of freedom and non-centrality (n/z)² (equation 4.4);
- ``l2-markov``: the same by Markov's inequality: S = (1/η) √(2αβ/(E(n/m)² + (z/m)² d)) (4.5);
- ``kl``: ΔᵀFΔ/2 ≤ α, the local KL divergence of responses, by Markov's inequality: S = (1/η)
  √(2αβ/(λ(F) E(n/m)² + (z/m)² tr F)), with F the Fisher matrix and λ its top eigenvalue (4.7).

F is estimated on public prompts. Departures from the paper:

- m is in the formulas: the paper's noise is that of a sum over one user (m = 1).
- n is, too: under random allocation and Poisson sampling a round has more or fewer users than m. A
  hundredth of β is for rounds of more users than n in ``l2``, and the quantile takes the rest.
- z is that of the round with the most noise, where noise is correlated.
- F is that of whole responses y ~ π_θ, as the mean of s sᵀ over n sampled scores s = ∇ log π(y|x).
  It is never built. Its trace is the mean of ‖s‖², with no need of Hutchinson's random vectors; its
  top eigenvalue comes from power iteration on F v = (1/n) Σ s ⟨s, v⟩. With fewer samples than
  dimensions λ errs upwards, which makes S smaller.
- η is the learning rate at its largest, and momentum is not counted.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from dprlhf.gradients.micro_batches import user_gradients
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.privacy.plan import Plan
from dprlhf.recipe import TrustRegion
from dprlhf.rollout import Responses

_TAIL = 0.01
"""Share of β for rounds that are larger than the n of ``l2``."""
_ITERATIONS = 100
_TOLERANCE = 1e-4


def clip_norm(
    region: TrustRegion,
    *,
    learning_rate: float,
    noise_multiplier: float,
    expected_batch_size: float,
    dimension: int,
    fisher: tuple[float, float] | None = None,
    sizes: tuple[float, float] = (1.0, 1.0),
) -> float:
    """Return S, the largest clip norm whose step stays in the trust region.

    Args:
        region: Kind of region, its size α and the probability β of leaving it.
        learning_rate: Learning rate η of the SGD step.
        noise_multiplier: Noise multiplier z; 0 without privacy.
        expected_batch_size: The divisor m of a round's sum.
        dimension: Number d of trained parameters.
        fisher: Trace tr F and top eigenvalue λ(F) of the Fisher matrix; needed for the kind ``kl``.
        sizes: What :func:`round_sizes` returns; as it is, every round has m users.
    """
    largest, square = sizes
    per_user = noise_multiplier / expected_batch_size
    if region.trust_region == "l2":
        if not per_user:
            return math.sqrt(2 * region.alpha) / (learning_rate * largest)
        level = 1 - (1 - _TAIL) * region.beta
        quantile = _noncentral_quantile(level, dimension, (largest / per_user) ** 2)
        return math.sqrt(2 * region.alpha / quantile) / (learning_rate * per_user)
    trace, top = (dimension, 1.0) if region.trust_region == "l2-markov" else fisher or (0.0, 0.0)
    mean_square = top * square + per_user**2 * trace
    return math.sqrt(2 * region.alpha * region.beta / mean_square) / learning_rate


def round_sizes(plan: Plan, beta: float) -> tuple[float, float]:
    """Return the largest n/m that rounds of n users are counted on to have, and the mean of (n/m)².

    Args:
        plan: The plan of the run, whose rounds have m users in the mean.
        beta: The probability β of leaving the region; a round is larger in a hundredth of it.
    """
    m = plan.expected_batch_size
    if plan.partition in ("fixed", "stream"):
        return 1.0, 1.0
    from scipy.stats import binom

    share = m / plan.users
    return float(binom.ppf(1 - _TAIL * beta, plan.users, share)) / m, 1 + (1 - share) / m


def fisher_trace_and_top(
    policy: CausalLMPolicy, responses: Responses, batch_size: int
) -> tuple[float, float]:
    """Return tr F and λ(F) at the current parameters.

    Args:
        policy: The policy π_θ.
        responses: One response to each of several PUBLIC prompts, sampled from π_θ.
        batch_size: Number of rows differentiated at once.
    """
    ones = np.ones(len(responses.user))
    gradients = user_gradients(policy, responses, ones, batch_size=batch_size, rows=1)
    scores = torch.cat([of_users.flatten(0, 1).cpu() for _, of_users, _ in gradients])
    n = len(scores)
    trace = float(scores.double().square().sum() / n)
    v, top = scores.sum(0) + scores[0], 0.0
    for _ in range(_ITERATIONS):
        v = v / v.norm().clamp(min=torch.finfo(v.dtype).tiny)
        product = scores.T @ (scores @ v) / n
        before, top = top, float(product.norm())
        if abs(top - before) <= _TOLERANCE * top:
            break
        v = product
    return trace, top


def _noncentral_quantile(level: float, degrees: int, noncentrality: float) -> float:
    from scipy.stats import ncx2

    return float(ncx2.ppf(level, degrees, noncentrality))
