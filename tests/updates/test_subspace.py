"""Releases in a subspace: what is clipped and released, held against autograd in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from dprlhf import recipe
from dprlhf.gradients.subspace import Subspace
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses
from dprlhf.updates import UPDATES
from dprlhf.updates.pg import advantage_weights
from dprlhf.updates.public_gradients import likelihood_gradients, public_gradients
from dprlhf.updates.telemetry import TelemetryCoordinates
from helpers.autograd import gradient_of_user, relative_error
from helpers.batches import Shape, batch_of
from helpers.policies import policy_of
from helpers.recipes import recipe_settings, refusal
from helpers.rounds import (
    flat_parameters,
    random_scores,
    round_of,
    set_parameters,
    some_users,
    value_of,
)

SHAPE = Shape([[5, 1], [2], [18], [7]], k=2, length=4)
MANY = Shape([[3, 2, 6, 4], [5]], k=3, length=4)
"""The first user has twelve rows, more than a micro-batch."""
SUBSPACE = {"rank": 4, "prompts": 8, "data": {"path": "public.csv"}}


def update_of(name: str = "pg", **changes: Any) -> Any:
    values = {"name": name, "clip_norm": 0.5, "batch_size": 6, "subspace": SUBSPACE, **changes}
    return recipe.make_recipe(recipe_settings(update=values)).update


def drawn(policy: CausalLMPolicy, scale: float = 0.3, seed: int = 2) -> Subspace:
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randn(policy.dimension, 4, generator=generator, dtype=torch.float64)
    return Subspace(torch.linalg.qr(columns).Q.T.contiguous(), scale)


def truth_of(policy: CausalLMPolicy, responses: Responses, scores: Scores) -> torch.Tensor:
    """Each user's policy gradient by autograd, ``[users, dimension]``."""
    valid = np.ones(responses.users, dtype=bool)
    ones = np.ones(len(responses.user))
    weights = advantage_weights(responses, scores, valid, ones, baseline="loo")
    users = range(responses.users)
    return torch.stack([gradient_of_user(policy, responses, weights, u) for u in users])


def clipped(vectors: torch.Tensor, bound: float) -> torch.Tensor:
    return vectors * (bound / vectors.norm(dim=1, keepdim=True)).clamp(max=1)


def run(responses, scores, spec, subspace, **changes):
    """One round: the gate, the round, and how far the policy moved."""
    policy = policy_of()
    before = flat_parameters(policy)
    round_, gate = round_of(
        policy, responses, scores, clip_norm=spec.clip_norm, learning_rate=1.0, **changes
    )
    round_.subspace = subspace
    UPDATES[spec.name](round_, spec)
    moved = flat_parameters(policy) - before
    set_parameters(policy, before)
    return gate, round_, moved


@pytest.mark.parametrize("shape", [SHAPE, MANY], ids=["prompts", "passes"])
@pytest.mark.parametrize("clip_norm", [0.02, 0.5, 100.0])
def test_what_is_released_is_the_sum_of_clipped_coordinates(shape: Shape, clip_norm: float) -> None:
    policy, responses = policy_of(), batch_of(shape, seed=3)
    scores, subspace = random_scores(responses, 1), drawn(policy)
    gate, round_, moved = run(responses, scores, update_of(clip_norm=clip_norm), subspace)
    coordinates = 0.3 * truth_of(policy, responses, scores) @ subspace.directions.T
    expected = clipped(coordinates, clip_norm).sum(0)
    assert relative_error(gate.sums[0].total, expected) < 1e-8
    assert relative_error(value_of(round_.released), expected) < 1e-8
    assert relative_error(moved, subspace.directions.T @ expected / 0.3) < 1e-8


def test_telemetry_rides_beside_the_coordinates() -> None:
    policy, responses = policy_of(), batch_of(SHAPE, seed=3)
    scores, subspace = random_scores(responses, 1), drawn(policy)
    rider = TelemetryCoordinates(0.3, 3.0)
    gate, round_, _ = run(responses, scores, update_of(clip_norm=0.5), subspace, telemetry=rider)
    bound = math.sqrt(0.5**2 - 0.3**2)
    coordinates = 0.3 * truth_of(policy, responses, scores) @ subspace.directions.T
    total = gate.sums[0].total
    assert len(total) == 4 + 2
    assert relative_error(total[:4], clipped(coordinates, bound).sum(0)) < 1e-8
    assert round_.reward is not None


@pytest.mark.parametrize("name", ["pg", "grpo", "ppo", "rebel"])
def test_no_user_moves_a_release_by_more_than_the_clip_norm(name: str) -> None:
    policy, responses = policy_of(), batch_of(SHAPE, seed=4)
    scores = random_scores(responses, 1)
    spec = update_of(name, clip_norm=0.05)
    subspace = drawn(policy, scale=50.0)
    everybody = run(responses, scores, spec, subspace)[0].sums[0].total
    assert len(everybody) == 4
    for user in range(responses.users):
        others = [u for u in range(responses.users) if u != user]
        fewer = run(*some_users(responses, scores, others), spec, subspace)[0].sums[0].total
        assert 0.04 < float((everybody - fewer).norm()) <= 0.05


@pytest.mark.slow
def test_the_directions_of_all_parameters_change_nothing() -> None:
    """A subspace of full rank is a rotation: sums have the same norm, and moves are the same."""
    policy, responses = policy_of(), batch_of(SHAPE, seed=4)
    generator = torch.Generator().manual_seed(5)
    square = torch.randn(policy.dimension, policy.dimension, generator=generator).double()
    whole = Subspace(torch.linalg.qr(square).Q.T.contiguous(), 1.0)
    for name in ("pg", "grpo", "ppo", "rebel"):
        spec, scores = update_of(name, clip_norm=0.3), random_scores(responses, 1)
        _, _, plain = run(responses, scores, spec, None)
        _, _, turned = run(responses, scores, spec, whole)
        assert relative_error(turned, plain) < 1e-7


def public(name: str, responses: Responses, scores: Scores, **changes: Any) -> torch.Tensor:
    policy = policy_of()
    return public_gradients(
        policy, responses, scores, update=update_of(name, **changes), kl=recipe.KL(),
        reward_range=3.0, optimizer=torch.optim.SGD(policy.parameters.values(), lr=1.0), t=1,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [SHAPE, MANY], ids=["prompts", "passes"])
def test_public_gradients_are_those_of_autograd_and_move_nothing(shape: Shape) -> None:
    policy, responses = policy_of(), batch_of(shape, seed=3)
    scores, before = random_scores(responses, 1), flat_parameters(policy)
    found = public("pg", responses, scores)
    assert relative_error(found, truth_of(policy, responses, scores)) < 1e-8
    assert torch.equal(flat_parameters(policy), before)


@pytest.mark.parametrize("name", ["pg", "grpo", "ppo", "rebel"])
def test_they_are_what_the_update_itself_would_sum(name: str) -> None:
    responses = batch_of(SHAPE, seed=6)
    scores = random_scores(responses, 1)
    # Wide enough that nothing is clipped.
    gate = run(responses, scores, update_of(name, clip_norm=1e3), None)[0]
    found = public(name, responses, scores, clip_norm=1e3)
    assert relative_error(found.sum(0), gate.sums[0].total) < 1e-8


def test_likelihood_gradients_are_policy_gradients_of_the_base_models_log_probability() -> None:
    policy, responses = policy_of(), batch_of(MANY, seed=3)
    before = flat_parameters(policy)
    found = likelihood_gradients(
        policy, responses, batch_size=4, t=1,
        optimizer=torch.optim.SGD(policy.parameters.values(), lr=1.0),
    )  # fmt: skip
    # The plain network, at temperature 1, by transformers alone.
    with torch.no_grad(), policy.model.disable_adapter():
        logits = policy.model(
            responses.tokens,
            attention_mask=responses.mask,
            position_ids=(responses.mask.cumsum(1) - 1).clamp(min=0),
        ).logits
    each = torch.log_softmax(logits[:, :-1], -1).gather(2, responses.tokens[:, 1:, None])[..., 0]
    own = responses.response_mask.double()
    values = (each[:, -own.shape[1] :] * own).sum(1) / own.sum(1)
    scores = Scores(values.numpy(), np.ones(len(values), dtype=bool), {})
    assert relative_error(found, truth_of(policy, responses, scores)) < 1e-8
    assert torch.equal(flat_parameters(policy), before)
    assert not policy.is_base
    assert policy.temperature == 0.7


def test_the_kl_penalty_counts() -> None:
    responses = batch_of(SHAPE, seed=6)
    scores = random_scores(responses, 1)
    policy = policy_of()
    penalised = public_gradients(
        policy, responses, scores, update=update_of(), kl=recipe.KL(beta=0.5), reward_range=3.0,
        optimizer=torch.optim.SGD(policy.parameters.values(), lr=1.0), t=1,
    )  # fmt: skip
    assert relative_error(penalised, public("pg", responses, scores)) > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "update__subspace": SUBSPACE,
                "privacy": {"epsilon": 1.0, "partition": "fixed", "bands": 2},
            },
            "set update.subspace.refresh to the number of rounds",
        ),
        (
            {"update__subspace": {"rank": 4, "data": {"path": "prompts.csv"}}},
            "update.subspace.data names the private users",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(recipe_settings(**changes))
