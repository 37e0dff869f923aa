"""The duration of each phase, measured on public prompts.

The duration of a private round is itself private, because it reveals the round's number of users.
So every duration that a run publishes is measured on public prompts.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dprlhf.boundary import Private
from dprlhf.data.public import MEASURED, Guides
from dprlhf.data.users import Prompts
from dprlhf.gradients.clipping import Weighted, clipped_sum
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.kept import Keep
from dprlhf.privacy.plan import Plan
from dprlhf.recipe import Recipe
from dprlhf.rewards import Scorer
from dprlhf.rewards.scoring import score_responses
from dprlhf.rollout import Responses, sample_public

if TYPE_CHECKING:
    from dprlhf.recipe.supervised import StageRecipe
    from dprlhf.training.tasks import Task


def seconds_a_response(
    policy: CausalLMPolicy,
    scorer: Scorer,
    prompts: Prompts,
    recipe: Recipe,
    *,
    keep: Keep | None,
) -> dict[str, float]:
    """Sample, score and differentiate one micro-batch of PUBLIC prompts.

    The gradient is discarded: nothing is released and the policy does not move.
    """
    rollout, update = recipe.rollout, recipe.update
    rows = max(int(rollout.batch_size), update.batch_size)
    count = max(1, rows // rollout.responses)
    chosen = np.arange(count) % len(prompts)
    users = np.arange(count)
    slots = np.zeros_like(users)
    # In the shapes of a private round.
    batch = prompts.take(chosen).changed(users=users, slots=slots, round_users=users)
    clock = [time.perf_counter()]
    responses = sample_public(policy, batch, recipe, rollout, "timing", keep=keep)
    clock.append(time.perf_counter())
    score_responses(scorer, responses)
    clock.append(time.perf_counter())
    ones = np.ones(len(responses.user))
    _differentiate(policy, responses, ones, update.clip_norm, update.batch_size)
    clock.append(time.perf_counter())
    seconds = np.diff(clock) / len(responses.user)
    return dict(zip(("rollout", "reward", "update"), seconds.tolist(), strict=True))


def _differentiate(
    policy: CausalLMPolicy,
    rows: Responses,
    weights: NDArray[np.float64],
    clip_norm: float,
    batch_size: int,
) -> None:
    clipped_sum(
        policy,
        Private(Weighted(rows, weights, np.zeros((rows.users, 0)), 0.0)),
        clip_norm=clip_norm,
        batch_size=batch_size,
        reduce=lambda total: total,
    )


def seconds_a_round(
    recipe: Recipe, plan: Plan, phases: dict[str, float], guides: Guides | None
) -> float:
    """Return the seconds of a round of expected size on one process, from those per response."""
    passes = plan.releases_per_round * recipe.update.passes
    of_response = phases["rollout"] + phases["reward"] + passes * phases["update"]
    # A user may have fewer prompts; how many is private.
    seconds = plan.expected_batch_size * recipe.data.prompts_in_round * of_response
    subspace = recipe.update.subspace
    if subspace is not None and guides is not None:
        # Public prompts end at the first sum. To keep the perplexity their likelihood is computed
        # and differentiated, too: a forward pass, about a third of a gradient, and a gradient.
        updates = recipe.update.passes + (4 / 3 if subspace.keep_perplexity else 0)
        of_public = phases["rollout"] + phases["reward"] + updates * phases["update"]
        seconds += min(subspace.prompts, guides.count) / subspace.refresh * of_public
        if subspace.target_kl is not None:
            # One response each, and three forward passes, each about a third of a gradient.
            measured = min(MEASURED, guides.count) / recipe.rollout.responses
            seconds += measured * (phases["rollout"] + phases["update"])
    return seconds * recipe.rollout.responses


def rows_a_round(recipe: StageRecipe, plan: Plan, guides: Guides | None) -> float:
    """Return how many rows are differentiated in a round of expected size of a supervised stage."""
    rows = plan.expected_batch_size * recipe.data.prompts_in_round
    subspace = recipe.update.subspace
    if subspace is not None and guides is not None:
        public = min(subspace.prompts, guides.count) / subspace.refresh
        if subspace.target_kl is not None:  # three forward passes, each about a third of a gradient
            public += min(MEASURED, guides.count)
        # Of a log, public rows lack the two forward passes of the weights.
        rows += public * (3 / 5 if recipe.stage == "feedback" else 1)
    return rows


def in_words(seconds: float) -> str:
    """Return a duration in seconds or minutes.

    >>> in_words(7.31), in_words(99.7), in_words(5400)
    ('7.3 seconds', '2 minutes', '90 minutes')
    """
    return f"{seconds:.2g} seconds" if seconds < 99 else f"{seconds / 60:,.0f} minutes"


def seconds_a_row(
    policy: CausalLMPolicy, task: Task, rows: Prompts, batch_size: int, clip_norm: float
) -> float:
    """Time the gradient of some PUBLIC rows of a supervised stage; the gradient is discarded."""
    encoded = task.encode(policy, rows)
    start = time.perf_counter()
    weights = task.weights(policy, encoded, batch_size)
    _differentiate(policy, encoded, weights, clip_norm, batch_size)
    return (time.perf_counter() - start) / len(rows)
