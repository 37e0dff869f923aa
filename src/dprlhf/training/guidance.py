"""The subspace of a round's releases, fitted to the gradients of PUBLIC rows.

Every few rounds, public rows are differentiated as the users' are, of the private updates after
sampling and scoring. Nothing private is read: the policy is made of releases.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from dprlhf import recipe
from dprlhf.boundary import Private
from dprlhf.data.public import Guides
from dprlhf.data.users import Prompts
from dprlhf.errors import DprlhfError
from dprlhf.gradients.subspace import Subspace, fit_subspace
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.recipe import Recipe
from dprlhf.rewards import Scorer
from dprlhf.rewards.scoring import score_responses
from dprlhf.rollout import keeps_outputs, public_sampling_settings, sample_public
from dprlhf.rollout.sampling import Keep
from dprlhf.training.run import Batch, Run
from dprlhf.updates.public_gradients import likelihood_gradients, public_gradients

Gradients = tuple[torch.Tensor, torch.Tensor | None]
"""What public users would contribute, ``[users, dimension]``, and what the directions avoid."""


class Guidance:
    """Finds the subspace of each round; its state is the current one."""

    def __init__(self, settings: recipe.Subspace, guides: Guides, seed: int) -> None:
        self._settings = settings
        self._guides = guides
        self._seed = seed
        self._subspace: Subspace | None = None

    def check(self, dimension: int) -> None:
        """Check that there are enough public prompts, and fewer directions than dimensions."""
        rank = self._settings.rank
        if rank >= dimension:
            raise DprlhfError(
                f"update.subspace.rank {rank} is not below the adapter's {dimension} dimensions:"
                " leave subspace out"
            )
        if self._guides.count < 2 * rank:
            raise DprlhfError(
                f"update.subspace.rank {rank} needs at least {2 * rank} public prompts, and there"
                f" are {self._guides.count} besides those of the evaluation: lower it, or"
                " give update.subspace.data"
            )

    def subspace(
        self, run: Run, batch: Batch, gradients: Callable[[Prompts], Gradients]
    ) -> Subspace:
        """Return the subspace of round ``batch.t``; every process calls this and gets the same."""
        if self._subspace is None or (batch.t - 1) % self._settings.refresh == 0:
            with run.progress.unlogged():
                self._subspace = self._fit(run, batch, gradients)
        # Where users' gradients are: they may be millions of numbers, in each micro-batch.
        self._subspace = self._subspace.on(run.policy.device)
        return self._subspace

    def _fit(self, run: Run, batch: Batch, gradients: Callable[[Prompts], Gradients]) -> Subspace:
        processes = run.processes
        # The draw follows from the seed and the round.
        prompts = self._guides.draw(
            self._settings.prompts, np.random.default_rng([self._seed, batch.t])
        )
        own = processes.share(np.arange(len(prompts)))
        batch.bar.start("public gradients", Private(own))

        def of_all(vectors: torch.Tensor) -> torch.Tensor:
            of_prompts = vectors.new_zeros(len(prompts), run.policy.dimension)
            of_prompts[own] = vectors
            return processes.sum(of_prompts)

        vectors, avoided = gradients(prompts.take(own))
        of_prompts = of_all(vectors)
        if not bool(of_prompts.nan_to_num().any()):
            if self._subspace is not None:
                return self._subspace  # where all scores are alike there is nothing to be learned
            raise DprlhfError(
                "update.subspace (null leaves it out): no public prompt has a gradient: all its"
                " responses are scored or labelled alike, fail, or do not end"
                " (rollout.mask_truncated); do its rows have the columns that rewards name?"
            )
        fitted = fit_subspace(
            of_prompts,
            self._settings.rank,
            clip_norm=run.plan.clip_norm,
            mean_first=self._settings.mean_first,
            avoid=None if avoided is None else of_all(avoided),
        )
        shared: Subspace = processes.from_main(fitted)
        return shared

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a checkpoint keeps, all of them public or released."""
        if self._subspace is None:
            return {}
        scale = torch.tensor([self._subspace.scale], dtype=torch.float64)
        return {"directions": self._subspace.directions.cpu(), "scale": scale}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what :meth:`state` returned."""
        if state:
            self._subspace = Subspace(state["directions"], float(state["scale"]))


def policy_gradients(run: Run, batch: Batch, scorer: Scorer, prompts: Prompts) -> Gradients:
    """Return what PUBLIC prompts would contribute to a private update, once sampled and scored.

    With ``update.subspace.keep_perplexity`` the directions avoid the gradient of the likelihood.
    """
    settings = run.recipe
    assert isinstance(settings, Recipe)
    subspace = settings.update.subspace
    assert subspace is not None
    prompts = with_factors(prompts, settings)
    count, keeps = parts_that_are_kept(run.policy, settings, len(prompts))
    gradients, likelihoods = [], []
    for places in np.array_split(np.arange(len(prompts)), count):
        rollout = settings.rollout
        if rollout.base_policy == "on-policy":
            rollout = public_sampling_settings(rollout, len(places), rollout.responses)
        keep: Keep = "gradients" if keeps else None
        responses = sample_public(
            run.policy, prompts.take(places), settings, rollout, "subspace", batch.t, keep=keep
        )
        gradients.append(
            public_gradients(
                run.policy,
                responses,
                score_responses(scorer, responses),
                update=settings.update,
                kl=settings.kl,
                reward_range=settings.reward_range,
                optimizer=run.optimizer,
                t=batch.t,
                tick=batch.tick,
            )
        )
        if subspace.keep_perplexity:
            size, optimizer = settings.update.batch_size, run.optimizer
            likelihoods.append(
                likelihood_gradients(
                    run.policy, responses, batch_size=size, optimizer=optimizer, t=batch.t
                )
            )
    return torch.cat(gradients), torch.cat(likelihoods) if likelihoods else None


def parts_that_are_kept(policy: CausalLMPolicy, settings: Recipe, prompts: int) -> tuple[int, bool]:
    """Return how many parts to take PUBLIC prompts in, and whether sampling keeps what it computes.

    There are often more of them than a round has users, and there is memory for a part alone.
    """
    if isinstance(settings.update, recipe.PPO):
        return 1, False
    for parts in (1, 2, 4, 8):  # the more parts, the smaller the batches of sampling
        if parts > max(1, prompts):
            break
        rows = -(-prompts // parts) * settings.rollout.responses
        longest = settings.data.max_prompt_tokens
        if keeps_outputs(policy, settings.rollout, rows=rows, max_prompt_tokens=longest):
            return parts, True
    return 1, False


def with_factors(prompts: Prompts, settings: Recipe) -> Prompts:
    """Return the prompts with a value of 1 in each reward's ``times_column`` that they lack.

    The factor may be what only users know. A factor of −1 turns a prompt's gradient round, which
    leaves the directions of variation as they are.
    """
    lacking = {reward.times_column for reward in settings.rewards} - {None, *prompts.columns}
    ones = {str(name): [1.0] * len(prompts) for name in lacking}
    columns = {**prompts.columns, **ones}
    return prompts.changed(columns=columns)
