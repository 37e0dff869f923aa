"""Logged feedback through a reward (``update.loss_type: linear_reward``): one release, many steps.

What ∇ log π of a completion says of its reader's liking is little in a large model; its hidden
states say more. So the policy is not fitted to the log itself:

1. φ(x, y) is the mean over a completion's tokens of the base model's hidden states, two thirds of
   its layers up, standardised, in the main directions of PUBLIC completions (samples of the base
   model). A user contributes the mean of A φ over its rows, clipped to S; A is its feedback over
   ``update.reward_range``.
2. From the noised mean b follow the weights w that are likely given b: a posterior mean, for which
   the noise, the number of users and the moments of public completions are known.
3. The policy takes natural steps for the reward w φ, on fresh responses to PUBLIC prompts. All of
   that follows from the release, so it costs nothing. It starts once the release is saved: a run
   that is stopped meanwhile starts the steps again, and has spent nothing twice.

DPPrefSyn (arXiv 2605.30808) has such a reward, too. Its subspace is fitted to the users, and its
weights by many noised steps; from the reward come synthetic pairs, and the policy from these.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import chi2
from torch import nn

from dprlhf import recipe
from dprlhf.boundary import Private, restored
from dprlhf.data.in_memory import InMemoryInputs
from dprlhf.data.public import MEASURED
from dprlhf.data.users import Prompts
from dprlhf.errors import DprlhfError
from dprlhf.gradients.clipping import clip_users
from dprlhf.gradients.subspace import Subspace, fit_subspace, scale_for
from dprlhf.hardware import to_device
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.kept import Keep, forwards_replaced, parts_of, unchanged
from dprlhf.policies.optimizers import ascend
from dprlhf.privacy.plan import Plan
from dprlhf.recipe import FeedbackRecipe
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses, most_kept, public_sampling_settings
from dprlhf.rollout.batch import in_batches
from dprlhf.rollout.logprobs import rows_at_once
from dprlhf.rollout.sampling import resolve_batch_size, sample_public
from dprlhf.training.feedback import FromFeedback, Reactions
from dprlhf.training.guidance import Gradients, parts_that_are_kept
from dprlhf.training.rounds import check_finite, released_values
from dprlhf.training.run import Batch, Outcome, PreparedRun, Run
from dprlhf.updates.public_gradients import no_gate, public_gradients, weighted_gradients

_STEPS = 8
"""Steps along the reward; longer ones leave what the reward was fitted to."""

_FITTED = 512
"""Public prompts, at most, whose completions tell in which directions states vary."""

_COORDINATES = 32
"""Main directions of public completions that are released, or as many as states have."""

_FLATTENED = 0.75
"""How far coordinates are brought to one size, between 0 and 1: noise hides what varies little."""

_EXPLAINED = 0.03
"""Part of the feedback's variance that is expected of φ, before any of it is seen."""


_DOUBTFUL = 0.05
"""Chance of so large a release without any relation, above which a run warns."""


@dataclass(frozen=True, repr=False)
class Features:
    """Coordinates φ of completions, fitted to PUBLIC ones, half of which are longer than 2 S."""

    mean: torch.Tensor  # [hidden]
    std: torch.Tensor  # [hidden]
    subspace: Subspace  # of standardised states
    public: torch.Tensor  # Coordinates of the completions that they are fitted to, [rows, p]

    def coordinates(self, states: torch.Tensor) -> torch.Tensor:
        """Return φ of completions, ``[rows, p]``, from their mean states, ``[rows, hidden]``."""
        return self.subspace.coordinates((states - self.mean) / self.std)

    def weights(self, released: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Return the reward's weights, ``[p]``, from the released mean of A φ.

        With E[A|φ] = w φ, its expectation is M w, M = E[clip(φ) φᵀ]. The posterior mean of w is
        that of a normal prior, in which every direction of φ explains as much of A.
        """
        seen, rows = self.public, len(self.public)
        clipped, _ = clip_users(seen, plan.clip_norm)
        mean = clipped.T @ seen / rows
        prior = torch.linalg.pinv(seen.T @ seen / rows, hermitian=True) * (_EXPLAINED / len(mean))
        variance = mean @ prior @ mean.T + self._unrelated(plan)
        inverse = torch.linalg.pinv(variance, hermitian=True)
        posterior: torch.Tensor = prior @ mean.T @ inverse @ released.to(seen)
        return posterior

    def p_value(self, released: torch.Tensor, plan: Plan) -> float:
        """Return how likely so large a mean of A φ is where A has nothing to do with φ.

        A chi-squared test. It takes a user for one row with |A| = 1, and so errs to the high side.
        """
        variance, mean = self._unrelated(plan), released.to(self.public)
        statistic = mean @ torch.linalg.pinv(variance, hermitian=True) @ mean
        freedom = torch.linalg.matrix_rank(variance, hermitian=True)
        return float(chi2.sf(float(statistic), int(freedom)))

    def _unrelated(self, plan: Plan) -> torch.Tensor:
        """Return the released mean's covariance where A has nothing to do with φ, ``[p, p]``."""
        clipped, _ = clip_users(self.public, plan.clip_norm)
        of_users = clipped.T @ clipped / len(clipped) / plan.expected_batch_size
        noise_std = plan.noise_std_of(1) / plan.expected_batch_size
        return of_users + noise_std**2 * torch.eye(len(of_users), dtype=of_users.dtype)


def learning_from_feedback(recipe: FeedbackRecipe, sources: InMemoryInputs) -> FromFeedback:
    """Return the stage of ``dprlhf feedback`` for the recipe's loss."""
    by_reward = recipe.update.loss_type == "linear_reward"
    return (ByReward if by_reward else FromFeedback)(recipe, sources, Reactions)


class LinearReward:
    """What a checkpoint keeps: the features, and the released mean of A φ."""

    features: Features | None = None
    released: torch.Tensor  # [p]

    def state(self) -> dict[str, torch.Tensor]:
        """Return tensors, all of them public or released."""
        own = self.features
        if own is None:
            return {}
        scale = torch.tensor([own.subspace.scale], dtype=torch.float64)
        return {
            "mean": own.mean, "std": own.std, "public": own.public, "scale": scale,
            "directions": own.subspace.directions, "released": self.released,
        }  # fmt: skip

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what :meth:`state` returned."""
        if not state:
            return
        subspace = Subspace(state["directions"], float(state["scale"]))
        self.features = Features(state["mean"], state["std"], subspace, state["public"])
        self.released = state["released"]


def fit_features(states: torch.Tensor, clip_norm: float) -> Features:
    """Return coordinates in which the mean states of PUBLIC completions vary most."""
    mean, std = states.mean(0), states.std(0)
    std = torch.where(std > 0, std, 1.0)  # what no public completion varies in
    standard, rank = (states - mean) / std, min(_COORDINATES, states.shape[1])
    directions = fit_subspace(standard, rank, clip_norm=clip_norm).directions
    moments = (standard @ directions.T).square().mean(0)
    varied = moments > 1e-12 * moments.max()
    factors = torch.where(varied, moments ** (-_FLATTENED / 2), 0.0)
    directions = directions * factors[:, None]
    scale = scale_for((standard @ directions.T).norm(dim=1), clip_norm)
    subspace = Subspace(directions, scale)
    return Features(mean, std, subspace, subspace.coordinates(standard))


@torch.no_grad()
def mean_states(policy: CausalLMPolicy, responses: Responses, batch_size: int) -> torch.Tensor:
    """Return the mean hidden state of each completion's tokens under the base model.

    It is ``[rows, hidden]`` in float64. A token's state is the one that predicts it.
    """
    length, shared = responses.max_new_tokens, responses.shared_rows(policy)
    states: list[torch.Tensor] = []
    width = policy.network.config.get_text_config().hidden_size
    means = torch.zeros(len(responses.user), width, dtype=torch.float64)
    above = _layers_above(policy)

    def take(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[:] = [args[0] if args else kwargs["hidden_states"]]

    hook = above[0].register_forward_pre_hook(take, with_kwargs=True)
    parts = parts_of(policy)  # None for a model whose layers may not be replaced
    unread = [] if parts is None else above
    # Sampling kept the input of the lowest trained layer, which may be one of those above.
    replays = parts is not None and parts.lowest not in above
    try:
        size = rows_at_once(policy, responses, batch_size, shared)
        for rows in in_batches(responses.grid.ravel(), size):
            tokens, mask = (to_device(t, policy.device) for t in responses.micro_batch(rows))
            inputs = policy.inputs_of(tokens, mask, length, shared)
            last = inputs.pop("logits_to_keep")
            kept = responses.replay(rows, shared) if replays else None
            with (
                policy.base(),
                contextlib.nullcontext() if kept is None else kept.replacing(policy),
                forwards_replaced(dict.fromkeys(unread, unchanged)),
            ):
                policy.network.base_model(**inputs, use_cache=False)
            before = states[0][:, slice(-last, None) if isinstance(last, int) else last]
            of_rows = before.reshape(len(rows), length, width)
            # One sum for each row, of its own tokens alone: no other row decides how it is rounded.
            for row, of_row, own in zip(
                rows.tolist(), of_rows, responses.policy_micro_batch(rows), strict=True
            ):
                if row >= 0:
                    some = of_row[own.bool().to(of_row.device)].double()
                    means[row] = some.sum(0).cpu() / max(1, len(some))
    finally:
        hook.remove()
    return means


def contributions(
    features: Features, policy: CausalLMPolicy, encoded: Responses, update: recipe.FeedbackUpdate
) -> torch.Tensor:
    """Return each user's mean of A φ over its rows, ``[users, p]``; 0 without a row."""
    rows = np.maximum(np.bincount(encoded.user, minlength=encoded.users), 1)
    counts = np.array(encoded.extra["counts"]) / update.reward_range
    shares = torch.from_numpy(counts / rows[encoded.user])
    states = mean_states(policy, encoded, update.batch_size)
    of_rows = shares[:, None] * features.coordinates(states)
    sums = of_rows.new_zeros(encoded.users, of_rows.shape[1])
    return sums.index_add(0, torch.from_numpy(encoded.user), of_rows)


def _layers_above(policy: CausalLMPolicy) -> list[nn.Module]:
    """Return the layers from the one on whose input is the state two thirds of the layers up."""
    layers = policy.layers
    if not layers:
        raise DprlhfError(
            "update.loss_type: linear_reward reads hidden states, and"
            f" {type(policy.network).__name__} has no layers for it: take policy_gradient"
        )
    return layers[2 * len(layers) // 3 :]


class ByReward(FromFeedback):
    """The stage of ``dprlhf feedback`` with ``update.loss_type: linear_reward``."""

    on_policy = True
    _rollout: recipe.Rollout
    _longest: int  # Tokens of a prompt

    def load(self, prepared: PreparedRun) -> None:
        """Also settle how public prompts are sampled."""
        super().load(prepared)
        self.stateful["reward"] = self._reward = LinearReward()
        _layers_above(prepared.policy)  # before anything is charged
        spec, guides = self.recipe.update.subspace, prepared.guides
        assert spec is not None
        assert guides is not None
        self._longest, response = self.recipe.data.widths
        rollout = recipe.Rollout(max_new_tokens=response, batch_size="auto")
        rows = min(spec.prompts, guides.count) * rollout.responses
        self._rollout = resolve_batch_size(
            rollout, prepared.policy, rows=rows, max_prompt_tokens=self._longest
        )

    def update(self, run: Run, batch: Batch) -> Outcome:
        """Release the mean of A φ; the policy moves once that is saved."""
        assert run.guides is not None
        with run.progress.unlogged():
            public = run.guides.first_rows(_FITTED)
            shown = self._sampled(run.policy, public, "features")
            states = self._states(run.policy, shown)
        fitted = fit_features(states, run.plan.clip_norm)
        self._reward.features = features = run.processes.from_main(fitted)
        batch.bar.start("features", batch.users)

        def vectors(users: NDArray[np.int64]) -> torch.Tensor:
            return contributions(features, run.policy, self.encoded(run, users), self.recipe.update)

        released, norms = self.release(run, batch, vectors, features.subspace.rank)
        self._reward.released = torch.tensor(released_values(released), dtype=torch.float64)
        return Outcome(released, norms, {}, Private({}))

    def finish(self, run: Run) -> None:
        """Move the policy along the reward that follows from the release."""
        assert self.guidance is not None
        features = self._reward.features
        if features is None:
            raise DprlhfError(
                "this run was stopped between the charge of its only release and the checkpoint:"
                " its users are spent, and nothing was learnt; start a run anew with this one under"
                " previous"
            )
        chance = features.p_value(self._reward.released, run.plan)
        if chance > _DOUBTFUL and run.processes.main:
            run.progress.warn(
                f"the log may say nothing that this reward can hold (p = {chance:.2g}): the policy"
                " may follow noise; compare its responses with those of the model before it"
            )
        weights = restored(features.weights(self._reward.released, run.plan), 1)
        for step in range(1, _STEPS + 1):
            with run.progress.phases(f"step {step}") as bar:
                at = Batch(step, Private(np.empty(0, dtype=np.int64)), no_gate, bar, bar.tick)
                move = weights.map(partial(self._direction, run, at, features))
                rows = partial(self._sampled, run.policy, use=f"length {step}", responses=1)
                with self.guidance.trust_region(run, at, rows, steps=_STEPS):
                    ascend(run.policy.parameters.values(), run.optimizer, move)
        check_finite(run, run.plan.rounds)

    def _states(self, policy: CausalLMPolicy, responses: Responses) -> torch.Tensor:
        return mean_states(policy, responses, self.recipe.update.batch_size)

    def _sampled(
        self, policy: CausalLMPolicy, prompts: Prompts, use: str, responses: int | None = None,
        keep: Keep | None = None,
    ) -> Responses:  # fmt: skip
        """Return responses of the policy to PUBLIC prompts."""
        given = self._rollout
        spec = public_sampling_settings(given, len(prompts), responses or given.responses)
        sizes = {"rows": len(prompts) * spec.responses, "max_prompt_tokens": self._longest}
        keep = keep or most_kept(policy, spec, **sizes, most="input")
        return sample_public(policy, prompts, self.recipe, spec, use, keep=keep)

    def _direction(
        self, run: Run, at: Batch, features: Features, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the natural gradient of the reward over public prompts, ``[dimension]``."""
        spec, clip_norm = self.recipe.update.subspace, run.plan.clip_norm
        assert spec is not None
        assert self.guidance is not None
        with run.progress.unlogged():
            of_reward = partial(self._of_reward, run, at, features, weights)
            vectors, _ = self.guidance.vectors(run, at, of_reward)
        subspace = fit_subspace(vectors, spec.rank, clip_norm=clip_norm, natural=True)
        clipped, _ = clip_users(subspace.coordinates(vectors), clip_norm)
        move: torch.Tensor = run.processes.from_main(subspace.lift(clipped.mean(0)))
        return move

    def _of_reward(
        self, run: Run, at: Batch, features: Features, weights: torch.Tensor, public: Prompts
    ) -> Gradients:
        """Return the policy gradient of the reward for each PUBLIC prompt."""
        policy = run.policy
        parts, keep = parts_that_are_kept(policy, self._rollout, self._longest, len(public))
        gradients = []
        for places in np.array_split(np.arange(len(public)), parts):
            some = self._sampled(policy, public.take(places), f"reward {at.t}", keep=keep)
            values = features.coordinates(self._states(policy, some)) @ weights
            gradients.append(
                public_gradients(
                    policy,
                    some,
                    Scores(values.numpy(), np.ones(len(values), dtype=np.bool_), {}),
                    update=recipe.PG(batch_size=self.recipe.update.batch_size),
                    kl=recipe.KL(),
                    reward_range=math.inf,
                    optimizer=run.optimizer,
                    t=at.t,
                    tick=at.tick,
                )
            )
        return torch.cat(gradients), None

    def seconds_a_round(self, run: PreparedRun, of_row: float | None = None) -> float | None:
        """Time a micro-batch of fresh responses to public prompts."""
        spec, guides = self.recipe.update.subspace, run.guides
        assert spec is not None
        assert guides is not None
        size, each = self._rollout.batch_size, self._rollout.responses
        assert size != "auto"
        of_step = min(spec.prompts, guides.count)
        _, keep = parts_that_are_kept(run.policy, self._rollout, self._longest, of_step)
        clock = [time.perf_counter()]
        some = self._sampled(
            run.policy, guides.first_rows(max(1, size // each)), "timing", keep=keep
        )
        clock.append(time.perf_counter())
        self._states(run.policy, some)
        clock.append(time.perf_counter())
        weighted_gradients(run.policy, some, np.ones(len(some.user)), self.recipe.update.batch_size)
        clock.append(time.perf_counter())
        sampling, states, gradient = np.diff(clock) / len(some.user)
        # The length of a step takes three forward passes, about as long as a gradient; to read
        # what was logged takes a pass, as sampling does.
        rows = _STEPS * (of_step * each + min(MEASURED, guides.count))
        logged = run.plan.expected_batch_size * self.recipe.data.prompts_in_round
        once = min(_FITTED, guides.count) * each + logged
        return float(rows * (sampling + states + gradient) + once * (sampling + states))
