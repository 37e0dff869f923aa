"""DP-NPG and its oracles in a round: against F†∇J, plain loops and normal equations."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import GPT2Config, GPT2LMHeadModel

from dprlhf import DprlhfError, recipe
from dprlhf.boundary import BoundedSum, Private, Released
from dprlhf.gradients.micro_batches import user_gradients
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses
from dprlhf.updates import UPDATES
from dprlhf.updates import regression as least_squares
from dprlhf.updates.npg import npg
from dprlhf.updates.regression import Examples, RoundRelease, check_dimension
from dprlhf.updates.telemetry import TelemetryCoordinates
from helpers import tiny
from helpers.autograd import relative_error
from helpers.batches import Shape, batch_of, half_from_base, rows_of
from helpers.marks import slow
from helpers.policies import off_start, policy_of
from helpers.rounds import (
    flat_gradient,
    flat_parameters,
    random_scores,
    round_of,
    set_parameters,
    some_users,
    token_logprobs,
    value_of,
)

Array = NDArray[np.float64]
SHAPE = Shape([[5, 1], [2], [18]], k=4, length=3)


def spec_of(**changes: Any) -> recipe.NPG:
    return recipe.NPG.model_validate({"name": "npg", "batch_size": 12, **changes})


def round_data(shape: Shape, seed: int, arms: bool = False) -> tuple[Responses, Scores]:
    responses = batch_of(shape, seed, shuffled=True)
    scores = random_scores(responses, seed)
    return (half_from_base(responses) if arms else responses), scores


def found(policy, responses, scores, spec, clip_norm):
    """w of a round without noise: how far SGD with a rate of 1 moves the policy."""
    before = flat_parameters(policy)
    round_, _ = round_of(
        policy, responses, scores, clip_norm=clip_norm, expected_batch_size=responses.users,
        learning_rate=1.0,
    )  # fmt: skip
    try:
        UPDATES[spec.name](round_, spec)
        return flat_parameters(policy) - before
    finally:
        set_parameters(policy, before)


VOCABULARY = 5
PROMPTS = [[1, 2, 3], [4, 1], [2], [3, 3, 2, 1]]


def log_linear() -> CausalLMPolicy:
    """π(y|x) ∝ exp(θ_y · A h(x)) over five tokens; the base policy is uniform."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=8, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.lm_head.weight.data.zero_()
    spec = recipe.Adapter(type="ffa-lora", rank=2, target_modules=["lm_head"])
    policy = off_start(make_policy(model, tiny.tokenizer(), spec), 1.0)
    policy.model.double()
    assert policy.dimension == 2 * VOCABULARY
    return policy


def every_answer() -> Responses:
    """A user for each prompt, with every answer of one token once: μ is uniform."""
    width = max(len(p) for p in PROMPTS)
    rows = [(p, y) for p in PROMPTS for y in range(VOCABULARY)]
    tokens = torch.tensor([[0] * (width - len(p)) + [*p, y] for p, y in rows])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * (len(p) + 1) for p, _ in rows])
    return rows_of(tokens, mask, VOCABULARY, 1, from_base=[True])


def test_without_noise_it_is_the_natural_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """w = F†∇J, both by enumeration; leave-one-out adds a factor V/(V − 1)."""
    monkeypatch.setattr("dprlhf.updates.pg.LARGEST_RATIO", 1e9)
    policy, responses = log_linear(), every_answer()
    rewards = np.random.default_rng(1).uniform(-3, 3, len(responses.user))
    scores = Scores(rewards, np.ones(len(rewards), dtype=bool), {})
    fisher = torch.zeros(policy.dimension, policy.dimension, dtype=torch.float64)
    gradient = torch.zeros(policy.dimension, dtype=torch.float64)
    for row, reward in enumerate(rewards):
        logprob = token_logprobs(policy, responses, row).sum()
        phi, probability = flat_gradient(policy, logprob), float(logprob.detach().exp())
        fisher += probability * torch.outer(phi, phi)
        gradient += probability * reward * phi
    truth = torch.linalg.pinv(fisher, rtol=1e-10, hermitian=True) @ gradient
    truth *= VOCABULARY / (VOCABULARY - 1)
    oracle = {"name": "sufficient-statistics", "radius": 1e6, "target_bound": 1e6}
    spec = spec_of(oracle=oracle)
    assert relative_error(found(policy, responses, scores, spec, 1e3), truth) < 1e-6
    # Algorithm 3 as printed regresses under μ; and the plain gradient points elsewhere.
    printed = dataclasses.replace(responses, from_base=np.zeros(len(rewards), dtype=bool))
    assert relative_error(found(policy, printed, scores, spec, 1e3), truth) > 0.1
    assert float(torch.nn.functional.cosine_similarity(truth, gradient, dim=0)) < 0.99
    assert UPDATES["npg"] is npg


def examples_by_hand(policy, responses, values, largest_ratio):
    """√ρ φ and √ρ Â of each user, by autograd on unpadded sequences."""
    of_users: list[tuple[list[torch.Tensor], list[float]]] = [
        ([], []) for _ in range(responses.users)
    ]
    for row, user in enumerate(responses.user):
        others = values[responses.prompt == responses.prompt[row]]
        advantage = values[row] - (others.sum() - values[row]) / (len(others) - 1)
        logprob = token_logprobs(policy, responses, row).sum()
        root = 1.0
        if responses.from_base[row]:
            with policy.base(), torch.no_grad():
                base = token_logprobs(policy, responses, row).sum()
            root = math.sqrt(min(float((logprob.detach() - base).exp()), largest_ratio))
        of_users[user][0].append(root * flat_gradient(policy, logprob))
        of_users[user][1].append(root * advantage)
    return [(torch.stack(phi), torch.tensor(a, dtype=torch.float64)) for phi, a in of_users]


def bounded(of_users, feature_bound, target_bound):
    return [
        (phi * (feature_bound / phi.norm(dim=1, keepdim=True)).clamp(max=1),
         a.clamp(-target_bound, target_bound))
        for phi, a in of_users
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arms", "gain"),
    [
        ("projected-sgd", True, 1.0), ("improper-batch-sgd", False, 1.0),
        slow("projected-sgd", False, 4.0), slow("improper-batch-sgd", True, 4.0),
    ],
)  # fmt: skip
def test_descent_equals_a_plain_loop_over_users(name, arms, gain, monkeypatch):
    """Every bound binds for some: features, targets, predictions, W, and answers with a gain."""
    policy = policy_of("gpt2", "lora")
    responses, scores = round_data(SHAPE, 4, arms)
    monkeypatch.setattr("dprlhf.updates.pg.LARGEST_RATIO", 1.3)
    raw = examples_by_hand(policy, responses, scores.values, 1.3)
    norms = torch.cat([phi.norm(dim=1) for phi, _ in raw])
    bound, target, steps, step_size = float(norms.median()), 1.5, 5, 12.0
    users = bounded(raw, bound, target)
    radius, largest_prediction, fractions = math.inf, 0.0, []
    for free in (True, False):
        w, tail = torch.zeros(2, policy.dimension, dtype=torch.float64)
        for j in range(steps):
            means = []
            for phi, a in users:
                prediction = phi @ w
                largest_prediction = max(largest_prediction, float(prediction.abs().max()))
                residual = prediction.clamp(-target, target) - a
                mean = (residual[:, None] * phi).mean(0)
                largest = bound * (target + min(target, bound * float(w.norm())))
                fractions.append(largest / gain / float(mean.norm()))
                means.append(mean * min(1.0, fractions[-1]))
            w = w - step_size / bound**2 * torch.stack(means).mean(0)
            if name == "projected-sgd":
                w = w * min(1.0, radius / float(w.norm()))
            tail += w if j >= steps // 2 else 0.0
        tail /= steps - steps // 2
        tail *= min(1.0, radius / float(tail.norm()))
        if free:
            radius = 0.7 * float(tail.norm())
    assert largest_prediction > target
    assert (min(fractions) < 1) == (gain > 1)
    spec = spec_of(
        oracle={
            "name": name, "steps": steps, "step_size": step_size, "radius": radius,
            "target_bound": target, "gain": gain,
        },
    )  # fmt: skip
    assert spec.releases == steps
    measured = found(policy, responses, scores, spec, bound)
    assert relative_error(measured, tail) < 1e-9
    assert float(measured.norm()) <= radius * (1 + 1e-12)


def test_features_are_computed_once_for_all_answers_if_they_fit(monkeypatch):
    policy = policy_of("gpt2", "ffa-lora")
    responses, scores = round_data(SHAPE, 4)
    spec = spec_of(oracle={"steps": 3, "step_size": 12.0})
    largest = len(responses.user) * policy.dimension * 8
    passes: list[int] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        passes.append(1)
        return user_gradients(*arguments, **options)

    monkeypatch.setattr(least_squares, "user_gradients", counted)
    moves = []
    for limit, expected in ((largest, 1), (largest - 1, 3)):
        monkeypatch.setattr(least_squares, "KEPT_BYTES", limit)
        moves.append(found(policy, responses, scores, spec, 0.5))
        assert len(passes) == expected
        passes.clear()
    assert torch.equal(*moves)
    assert float(moves[0].norm()) > 0
    # What was kept is of one round alone.
    found(policy, *round_data(SHAPE, 5), spec, 0.5)
    assert not torch.equal(found(policy, *round_data(SHAPE, 5), spec, 0.5), moves[0])


def test_sufficient_statistics_equal_the_normal_equations() -> None:
    """Σ_u mean_rows φφᵀ w = Σ_u mean_rows φA, of least norm; users weigh alike, rows do not."""
    policy = policy_of("gpt2", "ffa-lora")
    responses, scores = round_data(SHAPE, 5)
    raw = examples_by_hand(policy, responses, scores.values, 2.0)
    bound = float(torch.cat([phi.norm(dim=1) for phi, _ in raw]).median())
    users = bounded(raw, bound, 2.0)
    weighted = torch.cat([phi / math.sqrt(len(a)) for phi, a in users])
    targets = torch.cat([a / math.sqrt(len(a)) for _, a in users])
    truth = torch.linalg.lstsq(weighted, targets, rcond=1e-9, driver="gelsd").solution
    oracle = {"name": "sufficient-statistics", "radius": 1e4, "target_bound": 2}
    measured = found(policy, responses, scores, spec_of(oracle=oracle), bound)
    assert relative_error(measured, truth) < 1e-6
    oracle["radius"] = 0.5 * float(truth.norm())
    measured = found(policy, responses, scores, spec_of(oracle=oracle), bound)
    assert float(measured.norm()) <= oracle["radius"] * (1 + 1e-12)


@pytest.mark.parametrize("gain", [1.0, 8.0])
def test_noise_has_the_oracles_own_sensitivity(gain: float) -> None:
    """A contribution bounded by b gets noise zb/m, a little more beside telemetry.

    What the gate adds noise to keeps the clip norm with any gain, so that the noise may be less.
    """
    policy = policy_of("gpt2", "ffa-lora")
    responses, scores = some_users(*round_data(SHAPE, 5), [])
    z, m, clip_norm, bound = 2.0, 50.0, 0.7, 30.0
    round_, _ = round_of(
        policy, responses, scores, clip_norm=clip_norm, expected_batch_size=m, noise_multiplier=z,
        telemetry=TelemetryCoordinates(0.6 * clip_norm, 3.0),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def gate(given: BoundedSum) -> Released[torch.Tensor]:
        assert given.clip_norm == clip_norm
        noise = torch.randn(len(given.total), generator=generator, dtype=torch.float64)
        return Released((given.total + z * given.clip_norm * noise) / m, 1)

    round_.gate = gate
    nothing = Private(Examples(responses, np.empty(0), np.empty(0), 1))
    release = RoundRelease(round_, nothing, 20_000, 12, value_of, gain)
    assert release.noise_multiplier == pytest.approx(z / 0.8 / gain)
    assert release.expected_batch_size == m
    stds = [float(release(lambda x, a: x, bound).std()) for _ in range(2)]
    assert stds == pytest.approx([z / 0.8 * bound / m / gain, z * bound / m / gain], rel=0.02)
    assert len(value_of(round_.released)) == 20_000
    assert round_.reward is not None


def test_dimensions_are_checked_before_the_first_round() -> None:
    statistics = {"name": "sufficient-statistics"}
    check_dimension(recipe.REBEL(), 10**6)  # its gradient solver has no oracle
    check_dimension(spec_of(), 10**6)
    check_dimension(spec_of(oracle=statistics), 2000)
    with pytest.raises(DprlhfError, match=r"at most 2000 .* write name: projected"):
        check_dimension(spec_of(oracle=statistics), 2001)
