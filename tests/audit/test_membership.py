"""Attacks on a tuned policy must find what was planted, and nothing where nothing was."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import ndtr

from dprlhf import recipe
from dprlhf.audit import (
    combined_scores,
    exposure,
    largest_tpr,
    likelihood_scores,
    membership_bound,
    membership_scores,
    roc,
    text_logprobs,
)
from dprlhf.data.public import in_memory_prompts
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.privacy.gaussian import gaussian_epsilon
from dprlhf.rewards import Scorer
from helpers import tiny

PROMPTS = [f"number {n}: " for n in (318, 507, 264, 951, 730, 182, 649, 473)]
ANSWERS = ["a", "b", "c", "d", "a", "b", "c", "d"]
VICTIM = 3


@pytest.fixture
def policy() -> CausalLMPolicy:
    model = tiny.model()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(20)  # an adapter can move its logits far
    adapter = recipe.Adapter(type="lora", rank=8, target_modules="all-linear")
    return make_policy(model, tiny.tokenizer(), adapter)


def overfit(policy: CausalLMPolicy, row: int, steps: int = 30) -> None:
    """Raise the likelihood of one user's answer and lower that of the same answer elsewhere."""
    optimizer = torch.optim.Adam(policy.parameters.values(), lr=0.02)
    tokens = torch.tensor(policy.encode([p + ANSWERS[row] for p in PROMPTS], 64))
    others = torch.arange(len(PROMPTS)) != row
    for _ in range(steps):
        likely = policy.response_logprobs(tokens, torch.ones_like(tokens), 1)[:, 0]
        (likely[others].clamp(min=-9).mean() - likely[row]).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_area_and_its_standard_error_are_those_of_known_scores() -> None:
    """Scores N(d, 1) and N(0, 1) have the area Φ(d/√2); 95% of the intervals contain it."""
    random = np.random.default_rng(0)
    true = float(ndtr(0.8 / math.sqrt(2)))
    curves = [roc(random.normal(0.8, 1, 60), random.normal(0, 1, 80)) for _ in range(400)]
    assert np.mean([c.auc for c in curves]) == pytest.approx(true, abs=0.01)
    spread = np.std([c.auc for c in curves])
    assert np.mean([c.standard_error for c in curves]) == pytest.approx(spread, rel=0.1)
    inside = [low <= true <= high for low, high in (c.interval() for c in curves)]
    assert 0.91 < np.mean(inside) < 0.98


def test_a_tie_is_half_a_success() -> None:
    assert roc(np.zeros(3), np.zeros(4)).auc == 0.5
    assert roc(np.array([1.0, 1.0]), np.array([0.0, 1.0])).auc == 0.75


def test_text_logprobs_are_those_of_the_model(policy: CausalLMPolicy) -> None:
    found = text_logprobs(policy, ["ab", ""], ["cde", "f"])
    ids = torch.tensor(policy.encode(["abcde"], 64))
    with torch.no_grad():
        logits = policy.model(input_ids=ids).logits[0].double().log_softmax(-1)
        alone = policy.model(input_ids=torch.tensor([[0]])).logits[0, 0].double().log_softmax(-1)
    by_hand = [float(sum(logits[i - 1, ids[0, i]] for i in (2, 3, 4)))]
    by_hand.append(float(alone[policy.encode(["f"], 64)[0][0]]))
    np.testing.assert_allclose(found, by_hand, atol=1e-4)


@pytest.mark.slow
def test_a_planted_leak_is_found_and_an_untouched_policy_shows_none(policy: CausalLMPolicy) -> None:
    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(c[:1] == a) for c, a in zip(completions, answer, strict=True)]

    def scores() -> dict[str, Any]:
        asked = in_memory_prompts(PROMPTS)
        asked.columns["answer"] = ANSWERS
        rollout = recipe.Rollout(max_new_tokens=1, batch_size=16)
        found = membership_scores(policy, Scorer([reward], 1.0), asked, rollout)
        return found | likelihood_scores(policy, PROMPTS, ANSWERS)

    assert all((values == 0).all() for values in scores().values())  # the control
    overfit(policy, VICTIM)
    found, others = scores(), np.arange(len(PROMPTS)) != VICTIM
    for name in ("answer", "reward"):
        assert roc(found[name][[VICTIM]], found[name][others]).auc > 0.99
    codes = np.stack([text_logprobs(policy, PROMPTS, [c] * len(PROMPTS)) for c in "abcd"], 1)
    assert exposure(codes, np.array(["abcd".index(a) for a in ANSWERS]))[VICTIM] == 2


def test_a_discriminant_fitted_on_shadow_runs_joins_scores() -> None:
    random = np.random.default_rng(1)
    included = random.random(6000) < 0.5
    features = random.normal(size=(6000, 3)) * [1, 5, 1]
    features[:, :2] += included[:, None] * [1.0, 5.0]  # each alone has the area Φ(1/√2) = 0.76
    joined = combined_scores(features[:3000], features[3000:], included[3000:])
    inside = included[:3000]
    assert roc(joined[inside], joined[~inside]).auc == pytest.approx(ndtr(1), abs=0.03)
    assert np.abs(combined_scores(0 * features, 0 * features, included)).max() == 0


@pytest.mark.parametrize("mu", [0.3, 1.0])
def test_the_curve_of_the_bound_is_above_every_attack_on_a_gaussian(mu: float) -> None:
    """The optimal attack on μ-GDP stays below the curve of its (ε, δ), and above a smaller one."""
    epsilon = gaussian_epsilon(1 / mu, 1e-5)
    threshold = np.linspace(-6, 6 + mu, 400)
    fpr, tpr = ndtr(-threshold), ndtr(mu - threshold)
    assert (tpr <= largest_tpr(fpr, epsilon, 1e-5) + 1e-12).all()
    assert (tpr > largest_tpr(fpr, epsilon / 6, 1e-5)).any()
    assert (largest_tpr(fpr, math.inf, 1e-5) == 1).all()
    np.testing.assert_allclose(largest_tpr(fpr, 0.0, 0.0), fpr, atol=1e-12)


def test_scores_that_give_members_away_refute_a_claim_and_blind_ones_do_not() -> None:
    random = np.random.default_rng(2)
    for _ in range(20):
        included = random.random(300) < 0.5
        assert membership_bound(random.normal(size=300), included, 1.0, 1e-5, 0.999) <= 1.0
    included = random.random(300) < 0.5
    assert membership_bound(included + 0.0, included, 1.0, 1e-5) > 1.0
