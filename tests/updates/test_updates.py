"""DP-PG: baselines, weights, importance ratios, and which direction the sum points in."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from transformers import GPT2Config, GPT2LMHeadModel

from dprlhf import recipe
from dprlhf.boundary import Private, open_private
from dprlhf.gradients.clipping import Weighted, clipped_sum
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses, logprobs
from dprlhf.rollout.logprobs import log_ratio_to_base
from dprlhf.updates import UPDATES
from dprlhf.updates.pg import (
    BASELINES,
    LARGEST_RATIO,
    advantage_weights,
    importance_ratio,
    paired,
    policy_gradient,
    sampler_ratio,
)
from dprlhf.updates.round import users_with_valid_scores
from dprlhf.updates.telemetry import TelemetryCoordinates
from helpers import tiny
from helpers.autograd import gradient_of_user, relative_error
from helpers.batches import MIXED, Shape, batch_of, half_from_base, rows_of
from helpers.policies import policy_of
from helpers.rounds import flat_gradient, round_of, token_logprobs, value_of

Array = NDArray[np.float64]
ON_POLICY = np.zeros(4, dtype=bool)
TWO_ARMS = np.array([True, True, False, False])
REWARDS = np.array([[1.0, 3.0, -2.0, 6.0], [0.5, 0.5, 0.5, 0.5]])


def scores_of(values: Array, valid: NDArray[np.bool_] | None = None) -> Scores:
    return Scores(values, np.ones(len(values), dtype=bool) if valid is None else valid, {})


@pytest.mark.parametrize("arms", [ON_POLICY, TWO_ARMS])
def test_paired_by_hand(arms: NDArray[np.bool_]) -> None:
    """Arms {1, 3} and {−2, 6}: both means are 2."""
    np.testing.assert_allclose(paired(REWARDS, arms), [[-1, 1, -4, 4], [0, 0, 0, 0]])
    uneven = np.array([[1.0, 3.0, -2.0, 8.0]])  # means 2 and 3
    np.testing.assert_allclose(paired(uneven, arms), [[-2, 0, -4, 6]])


rewards_of_prompts = hnp.arrays(
    np.float64,
    st.tuples(st.integers(2, 4), st.sampled_from([2, 4, 6])),
    elements=st.floats(-10, 10),
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rewards=rewards_of_prompts, name=st.sampled_from(sorted(BASELINES)), arms=st.booleans())
def test_a_baseline_never_looks_at_another_prompt(rewards: Array, name: str, arms: bool) -> None:
    k = rewards.shape[1]
    from_base = np.arange(k) < (k // 2 if arms else 0)
    before = BASELINES[name](rewards, from_base)
    changed = rewards.copy()
    changed[0] = 100.0 * np.arange(1, k + 1)
    after = BASELINES[name](changed, from_base)
    assert np.array_equal(before[1:], after[1:])
    assert not np.array_equal(before[0], after[0])
    assert np.array_equal(before[1], BASELINES[name](rewards[1:2], from_base)[0])


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_no_bit_of_a_prompts_advantages_follows_from_the_number_of_prompts(name: str) -> None:
    for k in (2, 16, 34):
        rewards = np.random.default_rng(k).normal(size=(37, k))
        alone = [BASELINES[name](row[None], np.zeros(k, dtype=bool))[0] for row in rewards]
        assert np.array_equal(BASELINES[name](rewards, np.zeros(k, dtype=bool)), alone)


@pytest.mark.parametrize("stand_in", [math.nan, 2.0])
@pytest.mark.parametrize("baseline", sorted(BASELINES))
def test_an_invalid_score_makes_its_whole_user_zero_and_no_other(baseline, stand_in):
    responses = batch_of(MIXED, seed=1, shuffled=True)
    values = np.random.default_rng(2).uniform(-3, 3, len(responses.user))
    ratio = np.ones(len(values))
    everyone = users_with_valid_scores(responses, scores_of(values))
    assert everyone.all()
    before = advantage_weights(responses, scores_of(values), everyone, ratio, baseline=baseline)
    bad = int(np.flatnonzero(responses.user == 4)[0])
    valid = np.ones(len(values), dtype=bool)
    valid[bad] = False
    broken = values.copy()
    broken[bad] = stand_in
    scores = scores_of(broken, valid)
    users = users_with_valid_scores(responses, scores)
    assert users.tolist() == [True, True, True, True, False]
    after = advantage_weights(responses, scores, users, ratio, baseline=baseline)
    of_user = responses.user == 4
    assert not after[of_user].any()
    assert np.array_equal(after[~of_user], before[~of_user])
    assert before[of_user].any()


@pytest.mark.parametrize("baseline", ["loo", "paired", "group"])
@pytest.mark.parametrize("arms", ["on-policy", "reference"])
def test_the_sum_of_clipped_contributions_from_scratch(baseline, arms, monkeypatch):
    policy = policy_of("gpt2", "lora")
    k, largest, clip_norm, reward_range = 4, 0.9, 3.0, 3.0
    monkeypatch.setattr("dprlhf.updates.pg.LARGEST_RATIO", largest)
    shape = Shape([[5, 1], [2], [7], [4, 6]], k=k, length=4)
    responses = batch_of(shape, seed=8)
    if arms == "reference":
        responses = half_from_base(responses)
    values = np.random.default_rng(9).uniform(-3, 3, len(responses.user))
    valid = np.ones(len(values), dtype=bool)
    valid[np.flatnonzero(responses.user == 1)[2]] = False
    telemetry = TelemetryCoordinates(0.1, reward_range)
    spec = recipe.PG.model_validate({"baseline": baseline, "batch_size": 5})
    round_, gate = round_of(
        policy, responses, scores_of(values, valid), telemetry=telemetry, clip_norm=clip_norm
    )
    policy_gradient(round_, spec)

    weights = np.zeros(len(values))
    truncated = 0
    for row in range(len(values)):
        first = row - row % k
        own, others = values[row], np.delete(values[first : first + k], row - first)
        if baseline == "loo":
            advantage = own - others.mean()
        elif baseline == "paired":
            other_arm = slice(first + k // 2, first + k)
            if row - first >= k // 2:
                other_arm = slice(first, first + k // 2)
            advantage = own - values[other_arm].mean()
        else:
            of_prompt = values[first : first + k]
            advantage = (own - of_prompt.mean()) / (of_prompt.std(ddof=1) + 1e-4)
        ratio = 1.0
        if arms == "reference" and row - first < k // 2:
            with torch.no_grad():
                current = token_logprobs(policy, responses, row).sum()
                with policy.base():
                    base = token_logprobs(policy, responses, row).sum()
            ratio = float((current - base).exp())
            truncated += ratio > largest
            ratio = min(ratio, largest)
        weights[row] = ratio * advantage / (responses.user == responses.user[row]).sum()
    if arms == "reference":
        assert 0 < truncated < len(values) // 2
    expected = torch.zeros(policy.dimension + 2, dtype=torch.float64)
    bound = math.sqrt(clip_norm**2 - 0.1**2)
    norms = []
    for user in range(4):
        norms.append(0.0)
        if user == 1:
            continue
        gradient = gradient_of_user(policy, responses, weights, user)
        norms[user] = float(gradient.norm())
        expected[:-2] += gradient * min(1.0, bound / norms[user])
        mean = values[responses.user == user].mean()
        expected[-2:] += 0.1 / math.sqrt(2) * torch.tensor([mean / reward_range, 1.0])
    assert min(norms[0], norms[2], norms[3]) < bound < max(norms)
    (bounded,) = gate.sums
    assert relative_error(bounded.total, expected) < 1e-8
    assert bounded.clip_norm == clip_norm
    assert torch.equal(value_of(round_.released), bounded.total[:-2])
    assert round_.reward is not None
    assert len(value_of(round_.released)) == policy.dimension
    np.testing.assert_allclose(open_private(round_.norms), norms, rtol=1e-9)
    assert UPDATES["pg"] is policy_gradient


#
# Four tokens (0 ends a response) and at most two of them: 13 responses. Every combination of k
# responses is a "user", and its weights are multiplied by its probability, so that the sum with
# S = ∞ is the exact expectation of the estimator.

LENGTH = 2
PROMPT = [1, 2, 3]
ANSWERS = [[0], *([a, b] for a in (1, 2, 3) for b in range(4))]


@pytest.fixture(scope="module")
def small() -> CausalLMPolicy:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=4, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    policy = make_policy(
        GPT2LMHeadModel(config), tiny.tokenizer(), recipe.Adapter(type="lora", rank=2)
    )
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "wte" in name:
                parameter.mul_(20)  # else the distribution is uniform
            if "lora_" in name:
                parameter.add_(3 * torch.randn_like(parameter))
    policy.model.double()
    return policy


def log_probabilities(policy: CausalLMPolicy) -> torch.Tensor:
    """log π(y|x) of all answers, ``[13]``, one unpadded sequence after the other."""
    of_answers = []
    for answer in ANSWERS:
        ids = torch.tensor(PROMPT + answer)
        logprobs = policy.model(input_ids=ids[None]).logits[0].log_softmax(-1)
        places = range(len(PROMPT), len(ids))
        of_answers.append(torch.stack([logprobs[i - 1, ids[i]] for i in places]).sum())
    return torch.stack(of_answers)


@pytest.fixture(scope="module")
def rewards() -> Array:
    return np.random.default_rng(3).uniform(-3, 3, len(ANSWERS))


@pytest.fixture(scope="module")
def truth(small: CausalLMPolicy, rewards: Array) -> torch.Tensor:
    """∇ Σ_y π(y) r(y)."""
    probabilities = log_probabilities(small).exp()
    assert float(probabilities.detach().sum()) == pytest.approx(1, abs=1e-12)
    expected = (probabilities * torch.from_numpy(rewards)).sum()
    return flat_gradient(small, expected)


def combinations(k: int, from_base: int) -> tuple[Responses, NDArray[np.int64]]:
    """All combinations of k answers as users, and which answer each row is."""
    answers = np.array(list(itertools.product(range(len(ANSWERS)), repeat=k))).ravel()
    tokens = torch.tensor([PROMPT + [*a, 0][:LENGTH] for a in ANSWERS])[answers]
    mask = torch.tensor([[1] * len(PROMPT) + [1, len(a) - 1] for a in ANSWERS])[answers]
    return rows_of(tokens, mask, k, LENGTH, from_base=np.arange(k) < from_base), answers


def expectation(policy, rewards, baseline, k, *, from_base=0, largest=1e12, shift=None):
    """E of one user's unclipped contribution; ``largest=None`` leaves the ratio out.

    ``shift`` [13] is what the log-probabilities of the one who samples from π_t are off by.
    """
    responses, answers = combinations(k, from_base)
    ratio = np.ones(len(answers))
    if shift is not None and largest is not None:
        sampled = logprobs.token_logprobs(policy, responses, 1000)
        sampled[:, 0] += shift[answers]
        given = dataclasses.replace(responses, sampled=sampled)
        ratio = sampler_ratio(policy, given, batch_size=1000)
    elif largest is not None:
        ratio = importance_ratio(responses, log_ratio_to_base(policy, responses, 1000), largest)
    everyone = np.ones(responses.users, dtype=bool)
    weights = advantage_weights(
        responses, scores_of(rewards[answers]), everyone, ratio, baseline=baseline
    )
    with torch.no_grad():
        current = log_probabilities(policy).exp().numpy()
        with policy.base():
            base = log_probabilities(policy).exp().numpy()
    if shift is not None:
        current = current * np.exp(shift)
    of_row = np.where(responses.from_base, base[answers], current[answers])
    probability = of_row.reshape(-1, k).prod(axis=1)
    assert probability.sum() == pytest.approx(1, abs=1e-12)
    weighted = Weighted(
        responses, weights * np.repeat(probability, k), np.empty((responses.users, 0)), 0.0
    )
    return clipped_sum(
        policy, Private(weighted), clip_norm=math.inf, batch_size=2000, reduce=lambda x: x
    ).bounded.total


@pytest.mark.parametrize(("baseline", "k"), [("loo", 2), ("loo", 3), ("paired", 2), ("paired", 3)])
def test_on_policy_the_estimator_is_unbiased(small, rewards, truth, baseline, k):
    assert relative_error(expectation(small, rewards, baseline, k), truth) < 1e-10


@pytest.mark.parametrize("baseline", ["loo", "paired"])
def test_with_the_importance_ratio_the_estimator_is_unbiased(small, rewards, truth, baseline):
    measured = expectation(small, rewards, baseline, 2, from_base=1)
    assert relative_error(measured, truth) < 1e-10


@pytest.mark.parametrize("far", [0.2, 1.5])
def test_the_ratio_takes_away_what_another_sampler_shifts(small, rewards, truth, far):
    """Wholly where no ratio is above its bound, and in part where some are."""
    current = log_probabilities(small).detach().numpy()
    shift = far * np.random.default_rng(5).standard_normal(len(ANSWERS))
    shift -= np.log(np.exp(current + shift).sum())
    truncated = (-shift > math.log(LARGEST_RATIO)).any()
    assert truncated == (far > 1)
    as_it_is, corrected = (
        relative_error(expectation(small, rewards, "loo", 2, shift=shift, largest=largest), truth)
        for largest in (None, LARGEST_RATIO)
    )
    assert as_it_is > 0.05
    assert corrected < (as_it_is / 2 if truncated else 1e-10)


def off_by(policy: CausalLMPolicy, responses: Responses, gaps: list[float]) -> Responses:
    """The rows as vLLM samples them whose log-probabilities are off by this much for each user."""
    sampled = logprobs.token_logprobs(policy, responses, 100)
    with policy.base():
        of_base = logprobs.token_logprobs(policy, responses, 100)
    sampled = np.where(responses.from_base[:, None], of_base, sampled)
    sampled[:, 0] += np.array(gaps)[responses.user]
    return dataclasses.replace(responses, sampled=sampled)


def test_a_rows_ratio_to_its_sampler_is_of_its_own_policy_and_bounded() -> None:
    policy, responses = policy_of(), half_from_base(batch_of(MIXED, 0, copies=1))
    given = off_by(policy, responses, [0.0, math.log(2), -5.0, math.nan, 0.1])
    found = sampler_ratio(policy, given, batch_size=100)
    expected = np.array([1.0, 0.5, LARGEST_RATIO, math.nan, math.exp(-0.1)])
    np.testing.assert_allclose(found, expected[responses.user], rtol=1e-9)
    rows = np.flatnonzero(responses.user != 2)
    assert np.array_equal(
        sampler_ratio(policy, given.take(rows), batch_size=100), found[rows], equal_nan=True
    )


@pytest.mark.parametrize(
    "spec", [recipe.PG(batch_size=15), recipe.GRPO(batch_size=15), recipe.PPO(epochs=1)]
)
def test_the_ratio_to_the_sampler_multiplies_a_contribution_before_it_is_clipped(spec):
    policy, responses = policy_of(), half_from_base(batch_of(MIXED, 0))
    scores = scores_of(np.random.default_rng(1).uniform(-3, 3, len(responses.user)))

    def released(given: Responses, clip_norm: float) -> torch.Tensor:
        round_, gate = round_of(policy, given, scores, clip_norm=clip_norm)
        UPDATES[spec.name](round_, spec)
        return gate.sums[0].total

    half = off_by(policy, responses, [math.log(2)] * 5)
    assert relative_error(2 * released(half, 1e6), released(responses, 1e6)) < 1e-9
    only_one = off_by(policy, responses, [-5.0, *[math.nan] * 4])
    length = float(released(only_one, 1e-3).norm())
    assert length == pytest.approx(1e-3, rel=1e-5)


def test_without_the_ratio_it_is_not(small, rewards, truth):
    """The erratum of He & Zhou's Algorithm 2: ∇ log π_t at y ~ μ ≠ π_t is biased."""
    measured = expectation(small, rewards, "paired", 2, from_base=1, largest=None)
    assert relative_error(measured, truth) > 0.2
