"""DP-REBEL: against autograd on the true loss at θ_t and at a moved θ, and where it ends."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from dprlhf import recipe
from dprlhf.boundary import BoundedSum, Released
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses
from dprlhf.updates import UPDATES
from dprlhf.updates.pg import policy_gradient
from dprlhf.updates.rebel import rebel
from helpers.autograd import relative_error
from helpers.batches import Shape, batch_of
from helpers.policies import policy_of
from helpers.rounds import (
    flat_gradient,
    flat_parameters,
    random_scores,
    round_of,
    set_parameters,
    token_logprobs,
)

SHAPE = Shape([[5, 1], [2], [7]], k=4, length=4)


def spec_of(**changes: object) -> recipe.REBEL:
    return recipe.REBEL.model_validate({"name": "rebel", **changes})


def round_data(shape: Shape, seed: int) -> tuple[Responses, Scores]:
    responses = batch_of(shape, seed)
    return responses, random_scores(responses, seed)


def logprobs(policy: CausalLMPolicy, responses: Responses) -> torch.Tensor:
    """log π(y|x) of every row."""
    return torch.stack(
        [token_logprobs(policy, responses, row).sum() for row in range(len(responses.user))]
    )


def losses(policy, responses, values, start):
    """Each user's loss as the paper has it, ``[users]``; ``start`` is log π_t of every row."""
    delta = logprobs(policy, responses) - start
    of_users: list[list[torch.Tensor]] = [[] for _ in range(responses.users)]
    k = len(responses.user) // len(responses.prompts)
    for prompt in range(len(responses.prompts)):
        rows = np.flatnonzero(responses.prompt == prompt)
        for y, other in zip(rows[: k // 2], rows[k // 2 :], strict=True):
            advantage = values[y] - values[other]
            loss = (delta[y] - delta[other] - advantage) ** 2
            of_users[responses.user[y]].append(loss)
    return torch.stack([torch.stack(of_user).mean() for of_user in of_users])


class Recorder:
    """A gate that keeps θ at each release."""

    def __init__(self, policy: CausalLMPolicy) -> None:
        self.policy = policy
        self.sums: list[torch.Tensor] = []
        self.thetas: list[torch.Tensor] = []

    def __call__(self, bounded: BoundedSum) -> Released[torch.Tensor]:
        self.sums.append(bounded.total)
        self.thetas.append(flat_parameters(self.policy))
        return Released(bounded.total, 1)


def test_every_release_is_the_gradient_of_the_true_loss() -> None:
    policy = policy_of("gpt2", "lora")
    theta = flat_parameters(policy)
    responses, scores = round_data(SHAPE, 5)
    rate = 1e-3
    round_, _ = round_of(policy, responses, scores, clip_norm=math.inf, learning_rate=rate)
    gate = Recorder(policy)
    round_.gate = gate
    with torch.no_grad():
        start = logprobs(policy, responses)
    try:
        rebel(round_, spec_of(steps=3, batch_size=6))
        assert len(gate.sums) == 3
        assert torch.equal(gate.thetas[0], theta)
        for at, measured in zip(gate.thetas, gate.sums, strict=True):
            set_parameters(policy, at)
            loss = losses(policy, responses, scores.values, start).sum()
            assert relative_error(measured, -flat_gradient(policy, loss)) < 1e-8
        # The optimizer stepped down the loss after each, and far enough to tell θ_j from θ_t.
        for before, after, total in zip(gate.thetas, gate.thetas[1:], gate.sums, strict=False):
            assert relative_error(after - before, rate * total) < 1e-10
        assert relative_error(gate.sums[2], gate.sums[0]) > 0.05
    finally:
        set_parameters(policy, theta)
    assert UPDATES["rebel"] is rebel


def test_at_the_start_a_pair_is_the_paired_policy_gradient() -> None:
    """∇ loss = −2 Â (∇ log π(y) − ∇ log π(y′)), and DP-PG takes the mean of two such terms."""
    policy = policy_of("gpt2", "lora")
    responses, scores = round_data(Shape([[5, 1], [2], [7]], k=2, length=4), 6)
    sums = []
    for update, spec in (
        (rebel, spec_of(steps=1)),
        (policy_gradient, recipe.PG(baseline="paired")),
    ):
        round_, gate = round_of(policy, responses, scores, clip_norm=math.inf)
        update(round_, spec)
        sums.append(gate.sums[0].total)
    assert relative_error(sums[0], sums[1] * 4) < 1e-10


def test_the_arms_of_reference_sampling_are_paired() -> None:
    """μ's rows come first, so the halves are the arms; no ratio enters, whatever μ is."""
    policy = policy_of("gpt2", "lora")
    responses, scores = round_data(SHAPE, 7)
    from_base = np.tile([True, True, False, False], len(responses.prompts))
    sums = []
    for arms in (from_base, ~from_base & False):
        given = dataclasses.replace(responses, from_base=arms)
        round_, gate = round_of(policy, given, scores, clip_norm=1.0)
        rebel(round_, spec_of(steps=1))
        sums.append(gate.sums[0].total)
    assert torch.equal(*sums)


@pytest.mark.slow
def test_the_step_as_printed_does_not_minimise_and_ours_does() -> None:
    """The erratum of Algorithm 5: step 3 minimises over θ, step 4 returns θ_t + η w_t.

    With w_t the minimiser θ itself that lands elsewhere. With w_t the minimiser of the linearised
    loss, a direction, it is right to first order.
    """
    policy = policy_of("gpt2", "lora")
    theta = flat_parameters(policy)
    responses, scores = round_data(Shape([[3], [5], [2]], k=2, length=3), 10)
    scores = Scores(0.02 * scores.values, scores.valid, {})  # the linearisation is nearly exact
    start = logprobs(policy, responses).detach()
    features = pair_features(policy, responses)
    rate = 0.5 / (2 * float(torch.linalg.matrix_norm(features, 2)) ** 2 / 3)

    @torch.no_grad()
    def loss_at(flat: torch.Tensor) -> float:
        set_parameters(policy, flat)
        return float(losses(policy, responses, scores.values, start).mean())

    try:
        at_start = loss_at(theta)
        round_, _ = round_of(
            policy, responses, scores, clip_norm=math.inf, expected_batch_size=3, learning_rate=rate
        )
        rebel(round_, spec_of(steps=60))
        ours = flat_parameters(policy)
        assert loss_at(ours) < 1e-3 * at_start
        assert loss_at(theta + ours) > 0.3 * at_start
        advantages = torch.from_numpy(scores.values.reshape(-1, 2) @ [1.0, -1.0])
        direction = torch.linalg.lstsq(features, advantages, driver="gelsd").solution
        assert loss_at(theta + direction) < 1e-2 * at_start
    finally:
        set_parameters(policy, theta)


@pytest.mark.slow
def test_gauss_newton_solves_the_normal_equations() -> None:
    """θ_t + w, w the least-squares solution: k = 4, so a user has several pairs."""
    policy = policy_of("gpt2", "ffa-lora")
    theta = flat_parameters(policy)
    responses, scores = round_data(SHAPE, 12)
    features, targets, share = [], [], []
    for prompt in range(len(responses.prompts)):
        rows = np.flatnonzero(responses.prompt == prompt)
        for y, other in zip(rows[:2], rows[2:], strict=True):
            both = [token_logprobs(policy, responses, row).sum() for row in (y, other)]
            features.append(flat_gradient(policy, both[0] - both[1]))
            targets.append(scores.values[y] - scores.values[other])
            share.append(2 / np.sum(responses.user == responses.user[y]))
    root = torch.tensor(share, dtype=torch.float64).sqrt()
    phi, a = torch.stack(features), torch.tensor(targets, dtype=torch.float64)
    w = torch.linalg.lstsq(phi * root[:, None], a * root, rcond=1e-9, driver="gelsd").solution
    spec = spec_of(oracle={"name": "sufficient-statistics", "radius": 1e4, "target_bound": 1e3})
    assert spec.releases == 1
    round_, _ = round_of(
        policy, responses, scores, clip_norm=1e3, expected_batch_size=responses.users,
        learning_rate=1.0,
    )  # fmt: skip
    try:
        rebel(round_, spec)
        assert relative_error(flat_parameters(policy) - theta, w) < 1e-6
    finally:
        set_parameters(policy, theta)


def pair_features(policy: CausalLMPolicy, responses: Responses) -> torch.Tensor:
    """∇ log π(y) − ∇ log π(y′) of neighbouring rows, ``[pairs, dimension]``."""
    pairs = logprobs(policy, responses).reshape(-1, 2)
    differences = pairs[:, 0] - pairs[:, 1]
    parameters = list(policy.parameters.values())
    rows = []
    for difference in differences:
        gradients = torch.autograd.grad(difference, parameters, retain_graph=True)
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows)
