"""What PUBLIC rows decide in a round: the subspace of its releases, and the length of its step.

Every few rounds, public rows are differentiated as the users' are, of the private updates after
sampling and scoring. Nothing private is read: the policy is made of releases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.boundary import Private
from dprlhf.data.public import MEASURED, Guides
from dprlhf.data.users import Prompts
from dprlhf.errors import DprlhfError
from dprlhf.gradients.subspace import Subspace, fit_subspace
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.kept import Keep
from dprlhf.policies.protocol import Sampling
from dprlhf.recipe import Recipe
from dprlhf.rewards import Scorer
from dprlhf.rewards.scoring import score_responses
from dprlhf.rollout import Responses, most_kept, public_sampling_settings, sample_public
from dprlhf.rollout.logprobs import token_logprobs
from dprlhf.training.run import Batch, Run
from dprlhf.updates.public_gradients import likelihood_gradients, public_gradients

Gradients = tuple[torch.Tensor, torch.Tensor | None]
"""What public users would contribute, ``[users, dimension]``, and what the directions avoid."""


_MOST_LENGTHS, _TOLERANCE = 20, 1.1
"""Lengths of a step that are tried at most, and by how much its divergence may miss its share."""


_WHOLE = 24
"""Tokens of a response from which on it may have all of the target divergence."""


class Guidance:
    """Finds the subspace of each round and shortens its step; its state is the last subspace."""

    def __init__(
        self, settings: recipe.Subspace, guides: Guides, seed: int, *, on_policy: bool
    ) -> None:
        self._settings = settings
        # How public responses vary is the price of a step only where the policy itself wrote them:
        # along what a log hardly varies in, a policy soon leaves what the log can tell.
        self._natural = on_policy and settings.target_kl is not None
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

    def vectors(
        self, run: Run, batch: Batch, gradients: Callable[[Prompts], Gradients]
    ) -> Gradients:
        """Return the gradients of the PUBLIC prompts of round ``batch.t``, on every process."""
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
        return of_all(vectors), None if avoided is None else of_all(avoided)

    def _fit(self, run: Run, batch: Batch, gradients: Callable[[Prompts], Gradients]) -> Subspace:
        of_prompts, avoided = self.vectors(run, batch, gradients)
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
            natural=self._natural,
            avoid=avoided,
        )
        shared: Subspace = run.processes.from_main(fitted)
        return shared

    @contextmanager
    def trust_region(
        self,
        run: Run,
        batch: Batch,
        rows_of: Callable[[Prompts], Responses],
        steps: int | None = None,
    ) -> Iterator[None]:
        """Shorten what the block moves the policy by to its share of ``target_kl``.

        Args:
            rows_of: Returns the rows of PUBLIC prompts on which the divergence is measured.
            steps: How many such steps a run takes; None for one each round.
        """
        target = self._settings.target_kl
        if target is None:
            yield
            return
        # A trust region's step length (TRPO, arXiv 1502.05477), for the whole of a round.
        draw = np.random.default_rng([self._seed, batch.t, 1])
        prompts = self._guides.draw(MEASURED, draw)
        own = run.processes.share(np.arange(len(prompts)))
        with run.progress.unlogged():
            rows = rows_of(prompts.take(own))

        def logprobs() -> NDArray[np.float64]:
            with run.policy.sampled_with(Sampling()):  # no token is cut: ratios are finite
                return token_logprobs(run.policy, rows, run.recipe.update.batch_size)

        parameters = list(run.policy.parameters.values())
        start, before = [p.detach().clone() for p in parameters], logprobs()
        yield
        batch.bar.start("length of the step", Private(own))
        moves = [p.detach() - of_start for p, of_start in zip(parameters, start, strict=True)]
        share = 1.0
        for _ in range(_MOST_LENGTHS):
            # KL(π_t ‖ π_t+1) is E ½ Σ_tokens (log π_t+1 − log π_t)² to second order.
            squares = float(((logprobs() - before) ** 2).sum()) / 2
            own_sums = [squares, len(before), float(rows.policy_mask.sum())]
            total, count, tokens = run.processes.sum(
                torch.tensor(own_sums, dtype=torch.float64)
            ).tolist()
            divergence = total / count
            # T equal steps may add up to one that is T times as long.
            most = target * min(1.0, tokens / count / _WHOLE) / (steps or run.plan.rounds) ** 2
            too_short = share < 1.0 and 0 < divergence < most / _TOLERANCE
            if divergence <= _TOLERANCE * most and not too_short:
                return
            # It grows with the square of the length; not so far away, and so this is repeated.
            share *= math.sqrt(most / divergence) if divergence < math.inf else 0.1
            share = min(share, 1.0)
            with torch.no_grad():
                for parameter, of_start, move in zip(parameters, start, moves, strict=True):
                    parameter.copy_(of_start + share * move)

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
    count, keep = 1, None
    if not isinstance(settings.update, recipe.PPO):
        longest = settings.data.max_prompt_tokens
        count, keep = parts_that_are_kept(run.policy, settings.rollout, longest, len(prompts))
    gradients, likelihoods = [], []
    for places in np.array_split(np.arange(len(prompts)), count):
        rollout = settings.rollout
        if rollout.base_policy == "on-policy":
            rollout = public_sampling_settings(rollout, len(places), rollout.responses)
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


def policy_rows(run: Run, batch: Batch, prompts: Prompts) -> Responses:
    """Return a response of the policy to each PUBLIC prompt."""
    settings = run.recipe
    assert isinstance(settings, Recipe)
    rollout = public_sampling_settings(settings.rollout, len(prompts), 1)
    sizes = {"rows": len(prompts), "max_prompt_tokens": settings.data.max_prompt_tokens}
    # No logits: a move is measured between two passes over responses, which round alike.
    keep = most_kept(run.policy, rollout, **sizes, most="input")
    return sample_public(run.policy, prompts, settings, rollout, "target_kl", batch.t, keep=keep)


def parts_that_are_kept(
    policy: CausalLMPolicy, rollout: recipe.Rollout, max_prompt_tokens: int, prompts: int
) -> tuple[int, Keep | None]:
    """Return how many parts to take PUBLIC prompts in, and what sampling keeps of each.

    There are often more of them than a round has users, and there is memory for a part alone.
    """
    keep = partial(most_kept, policy, rollout, max_prompt_tokens=max_prompt_tokens)
    for parts in (1, 2, 4, 8):  # the more parts, the smaller the batches of sampling
        if parts > max(1, prompts):
            break
        if keep(rows=-(-prompts // parts) * rollout.responses) == "outputs":
            return parts, "outputs"
    return 1, keep(rows=prompts * rollout.responses)


def with_factors(prompts: Prompts, settings: Recipe) -> Prompts:
    """Return the prompts with a value of 1 in each reward's ``times_column`` that they lack.

    The factor may be what only users know. A factor of −1 turns a prompt's gradient round, which
    leaves the directions of variation as they are.
    """
    lacking = {reward.times_column for reward in settings.rewards} - {None, *prompts.columns}
    ones = {str(name): [1.0] * len(prompts) for name in lacking}
    columns = {**prompts.columns, **ones}
    return prompts.changed(columns=columns)
